"""Unfolding of repeats (:mod:`shardfx.ir.repeat`): insert copies of the blocks that a graph leaves out, in forward,
backward and update, planned or not.

Of ``repeat layers 2..77`` the graph has four blocks: ``s, a | b, e``. If ``b`` is to ``a`` and ``e`` what ``a`` is to
``s`` and ``b`` (node by node, with corresponding operands in the same neighbour, the same placements, and no uses
from blocks further away), then another ``a`` between ``a`` and ``b`` changes nothing for any of them: each copy has
the neighbours that ``a`` has, and so has ``a``. The unfolded graph then consists of captured parts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain, groupby
from typing import TypeVar

from shardfx.ir.graph import Graph, Input, Node, Output, Value, Where
from shardfx.ir.node import draw_slot
from shardfx.ir.repeat import Repeat

from .regular import BlocksAround
from .twin import BACKWARD, FORWARD, BlockTwin, Parts, Unfolded

T = TypeVar("T")


def unfold(graph: Graph, gone: Collection[Node] = ()) -> list[Unfolded]:
    """Insert the blocks that ``graph.repeats`` leaves out, in place; returns the copies of each repeat.

    Args:
        gone: nodes that a pass removed from the graph, but reports still refer to: they are copied too.

    Raises:
        Irregular: the blocks that are there are not alike; the graph is of no use then.
    """
    made: list[Unfolded] = []
    copies: dict[Node, tuple[str, int]] = {}
    for repeat in graph.repeats:
        each = _Unfolding(graph, repeat, gone)
        made.append(each.apply())
        copies |= each.draws
    graph.repeats = ()
    if made:
        _renumber_draws(graph, copies)
        graph.rename()
    return made


def check_regular(graph: Graph) -> None:
    """Check that :func:`unfold` can unfold a graph, without changing it.

    Raises:
        Irregular: it cannot.
    """
    for repeat in graph.repeats:
        BlocksAround(graph, repeat)


def unfolded(graph: Graph) -> Graph:
    """An unfolded copy of a graph."""
    made = graph.copy()
    unfold(made)
    return made


def _renumber_draws(graph: Graph, copies: Mapping[Node, tuple[str, int]]) -> None:
    """Give each copy of a dropout mask a number of its own, as equal numbers draw equal masks; within a block the
    backward shares its forward's number."""
    numbers: dict[tuple[object, int], int] = {}
    for node in graph.nodes:
        slot = draw_slot(node)
        if slot is not None:
            number = numbers.setdefault((copies.get(node), node.args[slot]), len(numbers) + 1)
            node.args = (*node.args[:slot], number, *node.args[slot + 1 :])


class _Unfolding(BlocksAround):
    """The unfolding of one repeat of a graph."""

    def __init__(self, graph: Graph, repeat: Repeat, gone: Collection[Node] = ()) -> None:
        super().__init__(graph, repeat, gone)
        self.draws: dict[Node, tuple[str, int]] = {}

    def apply(self) -> Unfolded:
        """Insert the copies between a and b."""
        graph, repeat, a, b = self.graph, self.repeat, self.a, self.b
        new = [self._blank(index) for index in repeat.left_out]
        rows = [a, *new, b]
        around = (*repeat.around[:2], repeat.first)
        twins = []
        own = self.own_inputs(repeat.around[1])
        for row, index in enumerate(repeat.left_out):
            inputs = {inp.value: replace(inp.value) for inp in own}
            near = (index - 1, index, index + 1)
            twins.append(BlockTwin(repeat, near, rows[row : row + 3], self.places, inputs))
        for twin in twins:
            for value in twin.inputs.values():
                value.name, value.hinted_by = twin.name(value.name), twin.name(value.hinted_by)
            for node in (node for part in a for node in part):
                twin.node(node).fill(node, twin.value)
        self._join(b, 0, new[-1])
        self._join(a, 1, new[0])
        self._give(twins)
        ahead = [node for parts in new for node in parts[FORWARD]]
        back = [node for parts in reversed(new) for node in parts[BACKWARD]]
        for nodes, before in ((ahead, b[FORWARD]), (back, a[BACKWARD])):
            if nodes:
                position = graph.nodes.index(before[0])
                graph.nodes[position:position] = nodes
        self._put_behind(twins)
        same = BlockTwin(repeat, around, [self.rows[0], a, new[0]], self.places, {v: v for v in twins[0].inputs})
        return Unfolded(same, twins)

    def _put_behind(self, twins: Sequence[BlockTwin]) -> None:
        """Insert the copies' nodes behind the backward, each run next to a's."""
        nodes, done = self.graph.nodes, 0
        found: list[Node] = []
        for run in self.runs:
            copies = [[twin.node(node) for node in run.nodes] for twin in twins]
            made = [*copies[::-1], run.nodes] if run.falls else [run.nodes, *copies]
            start = nodes.index(run.nodes[0], done)
            found += [*nodes[done:start], *chain.from_iterable(made)]
            done = start + len(run.nodes)
        self.graph.nodes = [*found, *nodes[done:]]

    def _blank(self, index: int) -> Parts:
        """Copies of a's nodes, without arguments."""
        places: dict[Where, Where] = {}

        def name(name: str) -> str:
            own = self.repeat.within(name) == self.repeat.around[1]
            return self.repeat.moved(name, index) if own else name

        def copy(old: Node) -> Node:
            if old.where not in places:
                places[old.where] = replace(old.where, module=name(old.where.module))
            new = old.blank(places[old.where])
            for value in new.outs:
                value.hinted_by = name(value.hinted_by)
            self.draws[new] = self.repeat.path, index
            return new

        ahead, back, behind, gone = ([copy(n) for n in part] for part in self.a)
        return ahead, back, behind, gone

    def _join(self, block: Parts, old: int, now: Parts) -> None:
        """Redirect uses by b of a's values to the last copy, and uses by a of b's values to the first."""

        def change(value: Value) -> Value:
            at = self.places.get(value.node) if value.node is not None else None
            if at is None or at.delta != old:
                return value
            found = now[at.part][at.place].results[value.index]
            assert found is not None
            return found

        for node in (node for part in block for node in part):
            node.fill(node, change)

    def _give(self, twins: Sequence[BlockTwin]) -> None:
        """Insert the copies' inputs and outputs behind those of a; and rename what all blocks share."""

        def own(name: str) -> bool:
            return self.repeat.within(name) == self.repeat.around[1]

        def give(twin: BlockTwin, inp: Input) -> Input:
            return replace(inp, name=twin.name(inp.name), value=twin.inputs[inp.value])

        def give_back(twin: BlockTwin, output: Output) -> Output:
            return replace(output, name=twin.name(output.name), value=twin.value(output.value))

        for inp in self.graph.inputs:
            inp.aliases = tuple(_spread(inp.aliases, own, twins, BlockTwin.name))
        self.graph.inputs = _spread(self.graph.inputs, lambda inp: own(inp.name), twins, give)
        self.graph.outputs = _spread(self.graph.outputs, lambda output: own(output.name), twins, give_back)


def _spread(
    things: Iterable[T], own: Callable[[T], bool], twins: Sequence[BlockTwin], make: Callable[[BlockTwin, T], T]
) -> list[T]:
    """Insert behind each run of a's ``own`` elements the counterparts in the copies, copy by copy."""
    found: list[T] = []
    for mine, each in groupby(things, own):
        run = list(each)
        found += run
        found += [make(twin, one) for twin in twins for one in run] if mine else []
    return found
