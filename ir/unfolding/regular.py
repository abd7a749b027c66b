"""Regularity check of the blocks around a repeat: copies can be inserted between them only if they are alike.

Of ``repeat layers 2..77`` the graph has four blocks: ``s, a | b, e``; :mod:`.unfold` states the conditions, and why.
Behind the backward a block's nodes form runs; copies of ``a`` go between its run and that of ``b``, in the order of
the blocks, or reversed.

    squares of s, of a | b, e, the norm, steps of s, of a | b, e, gathers of e, of b | a, s
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from difflib import SequenceMatcher
from itertools import groupby, pairwise
from typing import Any, NoReturn

from shardfx.ir.errors import Error
from shardfx.ir.graph import Graph, Input, Node, Phase, Value, substitute
from shardfx.ir.node import draw_slot
from shardfx.ir.repeat import Repeat

from .twin import BACKWARD, BEHIND, At, BlockTwin, Parts, Row

COMPARED = [f.name for f in fields(Node) if f.name not in ("args", "kwargs", "results", "where")]
"""The node fields that must be equal between alike nodes."""
SEEN = [f.name for f in fields(Value) if f.name not in ("node", "index", "name", "hinted_by")]
"""The value fields that must be equal between alike values."""


class IrregularBlocks(Error):
    """The error for a repeat whose neighbouring blocks are not alike, so that it cannot be unfolded."""


class BlocksAround:
    """The blocks ``s, a, b, e`` around one repeat of a graph, checked to be alike.

    Raises:
        IrregularBlocks: they are not alike.
    """

    def __init__(self, graph: Graph, repeat: Repeat, gone: Collection[Node] = ()) -> None:
        self.graph, self.repeat, self.gone = graph, repeat, gone
        self.given = {inp.name: inp for inp in graph.inputs}
        blocks = self._blocks()
        s, self.a, self.b, e = blocks
        if [len(part) for part in self.a] != [len(part) for part in self.b]:
            self.refuse("they have different numbers of nodes", [[len(part) for part in parts] for parts in blocks])
        self.rows: list[Row] = [self._beside(s), self.a, self.b, self._beside(e)]
        self.places = {
            node: At(row - 1, part, place)
            for row, parts in enumerate(self.rows[:3])
            for part, nodes in enumerate(parts)
            for place, node in enumerate(nodes)
            if node is not None
        }
        around = repeat.around
        self.next = BlockTwin(repeat, (around[1], *around[2:]), self.rows[1:], self.places, {})
        self.runs = self._runs()
        self._check()

    def _blocks(self) -> list[Parts]:
        """The nodes of s, a, b and e: in the forward from a block's first node to the next block's, in the backward
        likewise, reversed; from the first node of the update on, by the module of each."""
        around = self.repeat.around
        starts = {phase: self._starts(phase) for phase in (Phase.FORWARD, Phase.BACKWARD)}
        ups = [starts[Phase.FORWARD].get(i, -1) for i in around]
        downs = [starts[Phase.BACKWARD].get(i, -1) for i in reversed(around)]
        training = any(at >= 0 for at in downs)
        if ups != sorted(set(ups)) or ups[0] < 0 or (training and (downs != sorted(set(downs)) or downs[0] < 0)):
            self.refuse("they do not follow one another", f"forward at {ups}, backward at {downs}")
        nodes = self.graph.nodes
        end = next((i for i, node in enumerate(nodes) if node.phase is Phase.UPDATE), len(nodes))
        ups.append(downs[0] if training else end)
        downs.append(end)
        ahead = [nodes[start:end] for start, end in pairwise(ups)]
        back = [nodes[start:end] if training else [] for start, end in pairwise(downs)][::-1]
        for parts, phase in ((ahead[:3], Phase.FORWARD), (back[1:], Phase.BACKWARD)):
            for node in (node for part in parts for node in part):
                if node.phase is not phase:
                    self.refuse(f"a node of the {node.phase} stands in the {phase}", node)
        behind = [self._of(nodes[end:], i) for i in around]
        gone = [sorted(self._of(self.gone, i), key=self._kind) for i in around]
        return list(zip(ahead, back, behind, gone, strict=True))

    def _of(self, nodes: Iterable[Node], index: int) -> list[Node]:
        """The nodes of a block."""
        return [node for node in nodes if self.repeat.within(node.where.module) == index]

    def _kind(self, node: Node) -> str:
        """A key of nodes: equal for corresponding nodes of two blocks."""
        where = node.where
        module = self.repeat.moved(where.module, self.repeat.around[0])
        return repr((node.phase.value, str(node.op), module, where.line, [v.type for v in node.outs]))

    def _starts(self, phase: Phase) -> dict[int, int]:
        """The position of each block's first node."""
        found: dict[int, int] = {}
        for position, node in enumerate(self.graph.nodes):
            index = self.repeat.within(node.where.module) if node.phase is phase else None
            if index is not None:
                found.setdefault(index, position)
        return found

    def own_inputs(self, index: int) -> list[Input]:
        """The inputs of one block."""
        return [inp for inp in self.graph.inputs if self.repeat.within(inp.name) == index]

    def _check(self) -> None:
        """Compare b with a, shifted by one block."""
        for inp in self.own_inputs(self.repeat.around[1]):
            like = self.given.get(self.next.name(inp.name))
            if like is None or (inp.kind, self._moved_on(inp.value)) != (like.kind, self._seen(like.value)):
                self.refuse("an input is placed otherwise", inp.name)
            self.next.inputs[inp.value] = like.value
        inside = {node: self.next.node(node) for part in self.a for node in part}
        for one, other in inside.items():
            if not self._alike(one, other):
                self.refuse("their nodes differ", f"{one} and {other}")
        self._check_uses(inside)
        self._check_outputs(inside)

    def _seen(self, value: Value) -> list[Any]:
        return [*(getattr(value, name) for name in SEEN), value.hinted_by]

    def _moved_on(self, value: Value) -> list[Any]:
        """The counterpart in b of an operand's key in a."""
        return [*self._seen(value)[:-1], self.next.name(value.hinted_by)]

    def _alike(self, one: Node, other: Node) -> bool:
        """Whether ``other`` is the counterpart of ``one`` in the next block."""
        fixed = all(getattr(one, name) == getattr(other, name) for name in COMPARED)
        kinds = ([v and self._moved_on(v) for v in one.results], [v and self._seen(v) for v in other.results])
        where = replace(one.where, module=self.next.name(one.where.module))
        if not fixed or kinds[0] != kinds[1] or where != other.where:
            return False
        mine: tuple[Any, ...] = tuple(one.args), tuple(one.kwargs.items())
        theirs: tuple[Any, ...] = tuple(other.args), tuple(other.kwargs.items())
        slot = draw_slot(one)
        if slot is not None:
            mine, theirs = ((*args[:slot], *args[slot + 1 :]) for args in (one.args, other.args))
        return bool(self._moved(mine) == theirs)

    def _moved(self, arg: Any) -> Any:
        """The arguments of a node of a, mapped to b."""
        return substitute(arg, self.next.value)

    def _beside(self, block: Parts) -> Row:
        """The nodes of s or e that correspond to a's: s may have more (shared by all blocks), e fewer."""

        def aligned(nodes: Sequence[Node], others: Sequence[Node]) -> Sequence[Node | None]:
            found: list[Node | None] = [None] * len(nodes)
            matcher = SequenceMatcher(None, [*map(self._kind, nodes)], [*map(self._kind, others)], autojunk=False)
            for start, other, size in matcher.get_matching_blocks():
                found[start : start + size] = others[other : other + size]
            return found

        return tuple(aligned(nodes, others) for nodes, others in zip(self.a, block, strict=True))

    def _check_uses(self, inside: Mapping[Node, Node]) -> None:
        """Check that a's values are used only by its neighbours, by s as b's are by a; its inputs only by itself."""
        own = {inp.value for inp in self.own_inputs(self.repeat.around[1])}
        beside = zip(self.rows[0][BACKWARD], self.a[BACKWARD], strict=True)
        near = {node: one for node, one in beside if node is not None}
        after = set(inside.values())
        for node in self.graph.nodes:
            if node in inside or node in after:
                continue
            for position, value in enumerate(node.operands):
                if value in own or (value.node in inside and node not in near):
                    self.refuse("what one of them has is used further off", node)
                if value.node in inside and self._moved(value) not in near[node].operands[position : position + 1]:
                    self.refuse("what one of them makes is used otherwise by the one before", node)

    def _runs(self) -> list[NodeRun]:
        """The runs of a's nodes behind the backward."""
        a, b = self.a[BEHIND], self.b[BEHIND]
        found = runs_of(self.graph.nodes, dict(zip(a, b, strict=True))) if a else []
        if found is None or not in_order(found, self._like_beside):
            self.refuse("behind the backward they do not follow one another", self.repeat)
        return found

    def _like_beside(self, node: Node) -> list[Node]:
        """The counterparts in a of those operands of a node that neighbouring blocks compute behind the backward."""
        ats = [self.places[v.node] for v in node.operands if v.node in self.places]
        return [self.a[BEHIND][at.place] for at in ats if at.part == BEHIND and at.delta]

    def _check_outputs(self, inside: Mapping[Node, Node]) -> None:
        """Check that a's outputs are of its own parameters and buffers, and that b has the same."""
        outputs = {(output.kind, output.name): output for output in self.graph.outputs}
        a = self.repeat.around[1]
        for output in self.graph.outputs:
            made, own = output.value.node in inside, self.repeat.within(output.name) == a
            if made is not own:
                self.refuse("what one of them makes is returned", output.name)
            other = outputs.get((output.kind, self.next.name(output.name)))
            same = other is not None and other.value is self._moved(output.value) and other.spec == output.spec
            if own and not same:
                self.refuse("their outputs differ", output.name)

    def refuse(self, what: str, got: object) -> NoReturn:
        """Raise :class:`IrregularBlocks`: ``what`` differs, ``got`` is the difference."""
        a, b = (self.repeat.block(index) for index in self.repeat.around[1:3])
        raise IrregularBlocks(
            f"the blocks {a!r} and {b!r} are not alike: {what}",
            where=f"repeat {self.repeat}",
            expected="blocks that differ in nothing but their number",
            got=got,
        )


# ---- behind the backward ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NodeRun:
    """A run of consecutive nodes of a block; ``falls``: the next block's run precedes it."""

    nodes: tuple[Node, ...]
    falls: bool


def runs_of(nodes: Iterable[Node], twin: Mapping[Node, Node]) -> list[NodeRun] | None:
    """The runs of nodes with a twin in the next block; None, if twins both precede and follow."""
    position = {node: i for i, node in enumerate(nodes)}
    found = []
    for own, run in groupby(position, twin.__contains__):
        nodes_ = tuple(run)
        falls = {position[twin[node]] < position[node] for node in nodes_} if own else set()
        if len(falls) > 1:
            return None
        if own:
            found.append(NodeRun(nodes_, falls.pop()))
    return found


def in_order(found: Sequence[NodeRun], like: Callable[[Node], Iterable[Node]]) -> bool:
    """Whether the operands of a node in the neighbouring block are in the same run, or in an earlier one.

    Args:
        like: the nodes of the block itself that correspond to those operands in the neighbouring block.
    """
    number = {node: i for i, run in enumerate(found) for node in run.nodes}
    return all(number[other] <= number[node] for node in number for other in like(node))
