"""Regularity of the blocks around a repeat: only if they are alike can more be put between them.

Of ``repeat layers 2..77`` four blocks are there: ``s, a | b, e``; :mod:`.unfold` says what is asked of them, and why.
Behind the backward a block's nodes stand in runs; copies of ``a`` stand between its run and that of ``b``, in the order
of the blocks, or the other way round.

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
"""What nodes alike have in common as it is."""
SEEN = [f.name for f in fields(Value) if f.name not in ("node", "index", "name", "hinted_by")]
"""What values alike have in common as it is."""


class IrregularBlocks(Error):
    """The blocks around those that are left out are not alike, so that nothing can be put between them."""


class BlocksAround:
    """The blocks ``s, a, b, e`` around those that one repeat of a graph leaves out, found to be alike.

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
        """The nodes of s, a, b and e: in the forward from a block's first one to the next block's first one, in the
        backward likewise, the other way round; from the first node of the update on those that say so."""
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
        """The nodes that belong to a block."""
        return [node for node in nodes if self.repeat.within(node.where.module) == index]

    def _kind(self, node: Node) -> str:
        """A key of nodes: equal for nodes at the same place of two blocks."""
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
        """Compare b with a, seen from one block further on."""
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
        """The counterpart in b of what is seen of a value of a."""
        return [*self._seen(value)[:-1], self.next.name(value.hinted_by)]

    def _alike(self, one: Node, other: Node) -> bool:
        """Whether ``other`` is ``one``, a block further on."""
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
        """Arguments of a, as b has them."""
        return substitute(arg, self.next.value)

    def _beside(self, block: Parts) -> Row:
        """The nodes of s or e at the places of a's: s may hold more (what all blocks share), e less."""

        def aligned(nodes: Sequence[Node], others: Sequence[Node]) -> Sequence[Node | None]:
            found: list[Node | None] = [None] * len(nodes)
            matcher = SequenceMatcher(None, [*map(self._kind, nodes)], [*map(self._kind, others)], autojunk=False)
            for start, other, size in matcher.get_matching_blocks():
                found[start : start + size] = others[other : other + size]
            return found

        return tuple(aligned(nodes, others) for nodes, others in zip(self.a, block, strict=True))

    def _check_uses(self, inside: Mapping[Node, Node]) -> None:
        """What a makes is used by its neighbours alone, and by s as b's is by a; its inputs by itself alone."""
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
        """What a has behind the backward as those blocks beside it have that a node is made of."""
        ats = [self.places[v.node] for v in node.operands if v.node in self.places]
        return [self.a[BEHIND][at.place] for at in ats if at.part == BEHIND and at.delta]

    def _check_outputs(self, inside: Mapping[Node, Node]) -> None:
        """What a makes for the outside is for its own parameters and buffers, and b makes the same."""
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
        """Raise :class:`IrregularBlocks`: ``what`` is not alike, as ``got`` shows."""
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
    """A run of consecutive nodes of a block; ``falls``: those of the next block stand before them."""

    nodes: tuple[Node, ...]
    falls: bool


def runs_of(nodes: Iterable[Node], twin: Mapping[Node, Node]) -> list[NodeRun] | None:
    """The runs of nodes that have a twin in the next block; None, where these stand before and behind."""
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
    """Whether what a node is made of in the block beside it stands in the same run, or in one before.

    Args:
        like: the nodes of the block itself that are like those beside it that a node is made of.
    """
    number = {node: i for i, run in enumerate(found) for node in run.nodes}
    return all(number[other] <= number[node] for node in number for other in like(node))
