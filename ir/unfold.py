"""The blocks that a graph leaves out (:mod:`.repeat`), put back: forward and backward, planned or not.

Of ``repeat layers 2..77`` four blocks are there: ``s, a | b, e``. If ``b`` is to ``a`` and ``e`` what ``a`` is to
``s`` and ``b`` (node by node, each operand at the same place of the same neighbour, placed alike and for the same
reasons, and nothing further off uses what is inside), then ``a`` again between ``a`` and ``b`` changes nothing for any
of them: each copy has the neighbours that ``a`` has, and so has ``a``. The graph with all blocks is then put together
of parts that were all seen.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields, replace
from difflib import SequenceMatcher
from itertools import pairwise
from typing import Any, NoReturn

from .errors import Error
from .graph import Graph, Input, Node, Output, Phase, Value, Where, substitute
from .ops.traits import draw_slot
from .repeat import Repeat
from .twin import At, Parts, Row, Twin, Unfolded, copied, fill

COMPARED = [f.name for f in fields(Node) if f.name not in ("args", "kwargs", "results", "where")]
"""What nodes alike have in common as it is."""
SEEN = [f.name for f in fields(Value) if f.name not in ("node", "index", "name", "hinted_by")]
"""What values alike have in common as it is."""


class Irregular(Error):
    """The blocks around those that are left out are not alike, so that nothing can be put between them."""


def unfold(
    graph: Graph, gone: Collection[Node] = (), difference: Callable[[Twin], str] = lambda other: ""
) -> list[Unfolded]:
    """Put back what ``graph.repeats`` leaves out, in place; says of each repeat what was put back.

    Args:
        gone: nodes that a pass took out of the graph, and of which something is still told: they have copies too.
        difference: what else, not on the graph, is different in a block that is there and should be like another.

    Raises:
        Irregular: the blocks that are there are not alike; the graph is of no use then.
    """
    made: list[Unfolded] = []
    copies: dict[Node, tuple[str, int]] = {}
    for repeat in graph.repeats:
        each = _Unfolding(graph, repeat, gone)
        if what := difference(each.next):
            each.refuse("other things were decided of them", what)
        made.append(each.apply())
        copies |= each.draws
    graph.repeats = ()
    if made:
        _renumber_draws(graph, copies)
        graph.rename()
    return made


def check_regular(graph: Graph) -> None:
    """Whether :func:`unfold` can put back what is left out, without doing it.

    Raises:
        Irregular: it cannot.
    """
    for repeat in graph.repeats:
        _Unfolding(graph, repeat)


def whole(graph: Graph) -> Graph:
    """A copy of a graph with the equal blocks that it leaves out put back."""
    made = graph.copy()
    unfold(made)
    return made


def _renumber_draws(graph: Graph, copies: Mapping[Node, tuple[str, int]]) -> None:
    """Each mask has a number of its own: two that shared one would be the same mask. What shares one in a block, as a
    backward does with its forward, shares one in each copy of it."""
    numbers: dict[tuple[object, int], int] = {}
    for node in graph.nodes:
        slot = draw_slot(node)
        if slot is not None:
            number = numbers.setdefault((copies.get(node), node.args[slot]), len(numbers) + 1)
            node.args = (*node.args[:slot], number, *node.args[slot + 1 :])


class _Unfolding:
    """One repeat in one graph.

    Raises:
        Irregular: as :func:`unfold`.
    """

    def __init__(self, graph: Graph, repeat: Repeat, gone: Collection[Node] = ()) -> None:
        self.graph, self.repeat, self.gone = graph, repeat, gone
        self.draws: dict[Node, tuple[str, int]] = {}
        self.given = {given.name: given for given in graph.inputs}
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
        self.next = Twin(repeat, (around[1], *around[2:]), self.rows[1:], self.places, {})
        self._check()

    # ---- is it regular? -------------------------------------------------------------------------------------

    def _blocks(self) -> list[Parts]:
        """The nodes of s, a, b and e: in the forward from a block's first one to the next block's first one, in the
        backward likewise, the other way round."""
        around = self.repeat.around
        starts = {phase: self._starts(phase) for phase in (Phase.FORWARD, Phase.BACKWARD)}
        ups = [starts[Phase.FORWARD].get(i, -1) for i in around]
        downs = [starts[Phase.BACKWARD].get(i, -1) for i in reversed(around)]
        training = any(at >= 0 for at in downs)
        if ups != sorted(set(ups)) or ups[0] < 0 or (training and (downs != sorted(set(downs)) or downs[0] < 0)):
            self.refuse("they do not follow one another", f"forward at {ups}, backward at {downs}")
        nodes = self.graph.nodes
        ups.append(downs[0] if training else len(nodes))
        downs.append(len(nodes))
        ahead = [nodes[start:end] for start, end in pairwise(ups)]
        back = [nodes[start:end] if training else [] for start, end in pairwise(downs)][::-1]
        for parts, phase in ((ahead[:3], Phase.FORWARD), (back[1:], Phase.BACKWARD)):
            for node in (node for part in parts for node in part):
                if node.phase is not phase:
                    self.refuse(f"a node of the {node.phase} stands in the {phase}", node)
        gone = [
            sorted((n for n in self.gone if self.repeat.within(n.where.module) == i), key=self._kind) for i in around
        ]
        return list(zip(ahead, back, gone, strict=True))

    def _kind(self, node: Node) -> str:
        """What nodes at the same place of two blocks have in common, as a text."""
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

    def _own_inputs(self, index: int) -> list[Input]:
        return [given for given in self.graph.inputs if self.repeat.within(given.name) == index]

    def _check(self) -> None:
        """Compare b with a, seen from one block further on."""
        for given in self._own_inputs(self.repeat.around[1]):
            like = self.given.get(self.next.name(given.name))
            if like is None or (given.kind, self._moved_on(given.value)) != (like.kind, self._seen(like.value)):
                self.refuse("an input is placed otherwise", given.name)
            self.next.inputs[given.value] = like.value
        inside = {node: self.next.node(node) for part in self.a for node in part}
        for one, other in inside.items():
            if not self._alike(one, other):
                self.refuse("their nodes differ", f"{one} and {other}")
        self._check_uses(inside)
        self._check_outputs(inside)

    def _seen(self, value: Value) -> list[Any]:
        return [*(getattr(value, name) for name in SEEN), value.hinted_by]

    def _moved_on(self, value: Value) -> list[Any]:
        """What is seen of a value of a, as b has it."""
        return [*self._seen(value)[:-1], self.next.name(value.hinted_by)]

    def _alike(self, one: Node, other: Node) -> bool:
        """Whether ``other`` is ``one``, a block further on."""
        fixed = all(getattr(one, name) == getattr(other, name) for name in COMPARED)
        kinds = (
            [v and self._moved_on(v) for v in one.results],
            [v and self._seen(v) for v in other.results],
        )
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
        own = {given.value for given in self._own_inputs(self.repeat.around[1])}
        near = {node: one for node, one in zip(self.rows[0][1], self.a[1], strict=True) if node is not None}
        after = set(inside.values())
        for node in self.graph.nodes:
            if node in inside or node in after:
                continue
            for position, value in enumerate(node.operands):
                if value in own or (value.node in inside and node not in near):
                    self.refuse("what one of them has is used further off", node)
                if value.node in inside and self._moved(value) not in near[node].operands[position : position + 1]:
                    self.refuse("what one of them makes is used otherwise by the one before", node)

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
        a, b = (self.repeat.block(index) for index in self.repeat.around[1:3])
        raise Irregular(
            f"the blocks {a!r} and {b!r} are not alike: {what}",
            where=f"repeat {self.repeat}",
            expected="blocks that differ in nothing but their number",
            got=got,
        )

    # ---- putting back ---------------------------------------------------------------------------------------

    def apply(self) -> Unfolded:
        """Put the blocks back between a and b."""
        graph, repeat, a, b = self.graph, self.repeat, self.a, self.b
        new = [self._blank(index) for index in repeat.left_out]
        rows = [a, *new, b]
        around = (*repeat.around[:2], repeat.first)
        twins = []
        own = self._own_inputs(repeat.around[1])
        for row, index in enumerate(repeat.left_out):
            inputs = {given.value: replace(given.value) for given in own}
            near = (index - 1, index, index + 1)
            twins.append(Twin(repeat, near, rows[row : row + 3], self.places, inputs))
        for twin in twins:
            for value in twin.inputs.values():
                value.name, value.hinted_by = twin.name(value.name), twin.name(value.hinted_by)
            for node in (node for part in a for node in part):
                fill(twin.node(node), node, twin.value)
        self._join(b, 0, new[-1])
        self._join(a, 1, new[0])
        self._spread(twins)
        ahead = [node for parts in new for node in parts[0]]
        back = [node for parts in reversed(new) for node in parts[1]]
        for nodes, before in ((ahead, b[0]), (back, a[1])):
            if nodes:
                position = graph.nodes.index(before[0])
                graph.nodes[position:position] = nodes
        same = Twin(repeat, around, [self.rows[0], a, new[0]], self.places, {v: v for v in twins[0].inputs})
        return Unfolded(same, twins)

    def _blank(self, index: int) -> Parts:
        """Copies of a's nodes, without arguments."""
        places: dict[Where, Where] = {}

        def name(name: str) -> str:
            own = self.repeat.within(name) == self.repeat.around[1]
            return self.repeat.moved(name, index) if own else name

        def copy(old: Node) -> Node:
            if old.where not in places:
                places[old.where] = replace(old.where, module=name(old.where.module))
            new = copied(old, places[old.where])
            for value in new.outs:
                value.hinted_by = name(value.hinted_by)
            self.draws[new] = self.repeat.path, index
            return new

        ahead, back, gone = ([copy(n) for n in part] for part in self.a)
        return ahead, back, gone

    def _join(self, block: Parts, old: int, now: Parts) -> None:
        """Let the nodes of b use the last copy where they used a, and those of a the first one where they used b."""

        def change(value: Value) -> Value:
            at = self.places.get(value.node) if value.node is not None else None
            if at is None or at.delta != old:
                return value
            found = now[at.part][at.place].results[value.index]
            assert found is not None
            return found

        for node in (node for part in block for node in part):
            fill(node, node, change)

    def _spread(self, twins: Sequence[Twin]) -> None:
        """The inputs and outputs of the copies, behind those of a."""
        a = self.repeat.around[1]

        def each(things: Sequence[Any], make: Callable[[Twin, Any], Any]) -> list[Any]:
            found: list[Any] = []
            run: list[Any] = []
            for thing in (*things, None):
                if thing is not None and self.repeat.within(thing.name) == a:
                    run.append(thing)
                else:
                    found += [make(twin, one) for twin in twins for one in run]
                    run = []
                if thing is not None:
                    found.append(thing)
            return found

        def give(twin: Twin, given: Input) -> Input:
            return replace(given, name=twin.name(given.name), value=twin.inputs[given.value])

        def give_back(twin: Twin, output: Output) -> Output:
            return replace(output, name=twin.name(output.name), value=twin.value(output.value))

        self.graph.inputs = each(self.graph.inputs, give)
        self.graph.outputs = each(self.graph.outputs, give_back)
