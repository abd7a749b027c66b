"""The blocks that :mod:`.repeats` left out of a capture, put back into its joint graph, forward and backward.

Of a run five blocks were traced: ``s, a, b | c, e``. If ``b`` is to ``a`` and ``c`` what ``a`` is to ``s`` and ``b``
(node by node, each operand at the same place of the same neighbour, nothing else using what is inside), then every
block between ``b`` and ``c`` is ``b`` again, with its own parameters and with its own neighbours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from shardfx.ir.graph import Graph, Input, Node, Output, OutputKind, Phase, Value, substitute
from shardfx.ir.ops.traits import draw_slot, with_defaults

from .convert import sort_gradients
from .tape import HEAD, Repeat

Parts = tuple[list[Node], list[Node]]
"""A block's nodes: of the forward, of the backward."""


def unfold(graph: Graph, runs: Sequence[Repeat], names: Sequence[str]) -> bool:
    """Put back what the runs left out; says whether that could be done. If not, the graph is of no use.

    Args:
        names: of all parameters and buffers of the whole model, in order.
    """
    if not all(_Unfolding(graph, run).apply() for run in runs):
        return False
    order = {name: i for i, name in enumerate(names)}
    graph.inputs.sort(key=lambda given: order.get(given.name, len(order)))
    sort_gradients(graph)
    _renumber_draws(graph)
    graph.rename()
    return True


def _renumber_draws(graph: Graph) -> None:
    """Each mask has a number of its own: two that shared one would be the same mask. A backward has its forward's."""
    numbers: dict[Node, int] = {}
    for node in graph.nodes:
        slot = draw_slot(node)
        if slot is None:
            continue
        made = with_defaults(node.op, node.args, node.kwargs).get("logsumexp")
        numbers[node] = numbers[made.node] if made is not None else len(set(numbers.values())) + 1
        node.args = (*node.args[:slot], numbers[node], *node.args[slot + 1 :])


@dataclass(frozen=True)
class _At:
    """Where a node stands: in which block, counted from the one in question, in which part, as which."""

    delta: int
    part: int
    place: int


class _Unfolding:
    """One run in one graph."""

    def __init__(self, graph: Graph, run: Repeat) -> None:
        self.graph, self.run = graph, run
        first = run.first
        self.s, self.a, self.b = first, first + 1, first + HEAD - 1
        self.c, self.e = run.left_out[-1] + 1, run.last
        self.parts: dict[int, Parts] = {}
        self.stored = {given.value: given for given in graph.inputs}
        self.given: dict[str, Input] = {given.name: given for given in graph.inputs}

    def apply(self) -> bool:
        self.parts = self._parts()
        if not self.parts or not self._regular():
            return False
        self._insert()
        return True

    # ---- is it regular? -------------------------------------------------------------------------------------

    def _parts(self) -> dict[int, Parts]:
        """The nodes of s, a, b and c: in the forward from a block's first one to the next block's first one, in the
        backward likewise, the other way round. {} if the blocks are not in this order."""
        kept = [self.s, self.a, self.b, self.c, self.e]
        training = any(o.kind is OutputKind.GRADIENT for o in self.graph.outputs)
        forward = self._starts(Phase.FORWARD)
        backward = self._starts(Phase.BACKWARD)
        ups = [forward.get(i, -1) for i in kept]
        downs = [backward.get(i, -1) for i in reversed(kept)]
        if ups != sorted(set(ups)) or ups[0] < 0 or (training and (downs != sorted(set(downs)) or downs[0] < 0)):
            return {}
        nodes = self.graph.nodes
        parts: dict[int, Parts] = {}
        for at, index in enumerate(kept[:-1]):
            ahead = nodes[ups[at] : ups[at + 1]]
            back: list[Node] = []
            if training and index != self.s:
                back = nodes[downs[4 - at] : downs[5 - at]]
            if any(n.phase is not Phase.FORWARD for n in ahead) or any(n.phase is not Phase.BACKWARD for n in back):
                return {}
            parts[index] = (ahead, back)
        return parts

    def _starts(self, phase: Phase) -> dict[int, int]:
        found: dict[int, int] = {}
        for position, node in enumerate(self.graph.nodes):
            index = self.run.within(node.where.module) if node.phase is phase else None
            if index is not None:
                found.setdefault(index, position)
        return found

    def _neighbours(self, index: int) -> dict[Node, _At]:
        """Where the nodes of a block and of those beside it stand, seen from it."""
        row = [self.s, self.a, self.b, self.c]
        at = row.index(index)
        return {
            node: _At(other - at, part, place)
            for other in range(max(at - 1, 0), min(at + 2, len(row)))
            for part, nodes in enumerate(self.parts[row[other]])
            for place, node in enumerate(nodes)
        }

    def _regular(self) -> bool:
        if self._form(self.a) != self._form(self.b):
            return False
        near = {node for index in (self.a, self.b, self.c) for part in self.parts[index] for node in part}
        made = {value for part in self.parts[self.b] for node in part for value in node.outs}
        used_elsewhere = (v for n in self.graph.nodes if n not in near for v in n.operands)
        returned = [o for o in self.graph.outputs if o.value in made]
        block = self.run.block(self.b) + "."
        fine = all(o.kind is OutputKind.GRADIENT and o.name.startswith(block) for o in returned)
        return fine and not any(value in made for value in used_elsewhere)

    def _form(self, index: int) -> object:
        """What a block's nodes are, in words that are equal where a and b are alike."""
        places = self._neighbours(index)
        block = self.run.block(index)

        def word(value: Value) -> object:
            if value.node is not None and value.node in places:
                return places[value.node], value.index
            given = self.stored.get(value)
            if given is not None and given.name.startswith(block + "."):
                return given.name[len(block) :], given.kind, value.type
            return value

        forms: list[object] = []
        for part in self.parts[index]:
            for node in part:
                slot = draw_slot(node)
                args = node.args if slot is None else (*node.args[:slot], 0, *node.args[slot + 1 :])
                arguments = substitute((args, tuple(node.kwargs.items())), lambda v: _Word(word(v)))
                kinds = tuple(None if v is None else v.type for v in node.results)
                module = node.where.module
                place = module[len(block) :] if self.run.within(module) == index else "/" + module
                forms.append((node.op, repr(arguments), place, kinds))
        gradients = tuple(
            (o.name[len(block) :], word(o.value))
            for o in self.graph.outputs
            if o.kind is OutputKind.GRADIENT and o.name.startswith(block + ".")
        )
        return forms, gradients

    # ---- putting back ---------------------------------------------------------------------------------------

    def _insert(self) -> None:
        places = self._neighbours(self.b)
        indices = list(self.run.left_out)
        made: dict[int, Parts] = {index: self._blank(index) for index in indices}
        rows: dict[int, Parts] = {self.b: self.parts[self.b], **made, self.c: self.parts[self.c]}
        order = list(rows)

        def at(index: int, where: _At, value: Value) -> Value:
            """The value at a place, seen from the block ``index``."""
            neighbour = rows[order[order.index(index) + where.delta]]
            found = neighbour[where.part][where.place].results[value.index]
            assert found is not None
            return found

        for index in indices:
            block, own = self.run.block(self.b), self.run.block(index)

            def change(value: Value, index: int = index, block: str = block, own: str = own) -> Value:
                where = places.get(value.node) if value.node is not None else None
                if where is not None:
                    return at(index, where, value)
                given = self.stored.get(value)
                if given is not None and given.name.startswith(block + "."):
                    return self._stored(own + given.name[len(block) :], given).value
                return value

            for old_part, new_part in zip(self.parts[self.b], made[index], strict=True):
                for old, new in zip(old_part, new_part, strict=True):
                    new.args = substitute(old.args, change)
                    new.kwargs = {k: substitute(a, change) for k, a in old.kwargs.items()}
            for output in [o for o in self.graph.outputs if o.name.startswith(block + ".")]:
                name = own + output.name[len(block) :]
                self.graph.outputs.append(Output(output.kind, name, change(output.value)))
        self._join(self.b, +1, rows[indices[0]], self.parts[self.c])
        self._join(self.c, -1, rows[indices[-1]], self.parts[self.b])
        ahead = [node for index in indices for node in made[index][0]]
        back = [node for index in reversed(indices) for node in made[index][1]]
        self._place(ahead, self.parts[self.c][0][0])
        if back:
            self._place(back, self.parts[self.b][1][0])

    def _stored(self, name: str, like: Input) -> Input:
        """The parameter or buffer of a block that was left out."""
        if name not in self.given:
            self.given[name] = Input(like.kind, name, Value(like.value.type, None, 0, name))
            self.graph.inputs.append(self.given[name])
        return self.given[name]

    def _blank(self, index: int) -> Parts:
        """Copies of b's nodes, without arguments."""
        block, own = self.run.block(self.b), self.run.block(index)

        def copy(old: Node) -> Node:
            where = old.where
            if self.run.within(where.module) == self.b:
                where = replace(where, module=own + where.module[len(block) :])
            new = Node(old.op, (), {}, [], old.phase, where)
            new.results = [None if v is None else Value(v.type, new, v.index) for v in old.results]
            return new

        ahead, back = self.parts[self.b]
        return [copy(n) for n in ahead], [copy(n) for n in back]

    def _join(self, index: int, delta: int, now: Parts, before: Parts) -> None:
        """Let the nodes of a block use its new neighbour where they used the old one."""
        places: Mapping[Node, tuple[int, int]] = {
            node: (part, place) for part, nodes in enumerate(before) for place, node in enumerate(nodes)
        }

        def change(value: Value) -> Value:
            if value.node is None or value.node not in places:
                return value
            part, place = places[value.node]
            found = now[part][place].results[value.index]
            assert found is not None
            return found

        for part in self.parts[index]:
            for node in part:
                node.args = substitute(node.args, change)
                node.kwargs = {k: substitute(a, change) for k, a in node.kwargs.items()}

    def _place(self, nodes: list[Node], before: Node) -> None:
        position = self.graph.nodes.index(before)
        self.graph.nodes[position:position] = nodes


@dataclass(frozen=True)
class _Word:
    """Stands for a value in a form; equal words are printed alike."""

    text: object

    def __repr__(self) -> str:
        return f"value at {id(self.text)}" if isinstance(self.text, Value) else repr(self.text)
