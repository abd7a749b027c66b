"""Proof of single ops: the code of each planned op maps operands as placed to results as placed, on every rank.

Ops that are equal (types, placements, arguments: those of 80 equal blocks) are taken once. The code of each is written
at once (:mod:`.varying`) for all ranks with equal shards (:mod:`.equal_shards`: where every sharding is even, these are
all). The shard of such a rank begins at an element number that is a *linear* function of the rank's coordinates, and is
else the same on all of them. So, for each box of such ranks, the code is interpreted

- of an op that communicates, or that moves elements: at every coordinate along its *own* axes (those of its group, and
  those along which its code is not the same), and along each other axis at two, for what is linear and right at two
  places is right at all;
- of an op whose rule writes the code itself (``local``): at two ranks of each family, and the code is compared with
  what the rule says for all ranks at once;
- of any other, at two ranks of each family: only shapes could differ, and they are equal;
- of a send from stage to stage, as one that communicates, where all ranks' messages are received: it is in the stages
  that make its operand and in those that it leads to, and elsewhere there is nothing. Any other op is in all stages
  here.

Where that is not so (no rule is the code's reason, yet it has numbers that differ), it is interpreted on all ranks.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from shardfx.ir.graph import Graph, Input, InputKind, Node, Output, OutputKind, Value, substitute
from shardfx.ir.mesh import Mesh
from shardfx.ir.ops import comm
from shardfx.ir.ops.alike import argument_key
from shardfx.ir.ops.loop import stage_transfer
from shardfx.ir.ops.pack import IDENTITY
from shardfx.ir.ops.table import OwnOp, carried
from shardfx.ir.program.loops.schedule_actions import stages_of
from shardfx.ir.rules.book import RuleBook
from shardfx.ir.rules.local import gives_list, is_sharded
from shardfx.runtime.verify.data_movement import MESSAGES
from shardfx.runtime.verify.fault import Fault, first_output, place
from shardfx.runtime.verify.proof.calls import Proof
from shardfx.runtime.verify.proof.collective_matching import interpret
from shardfx.runtime.verify.proof.deduction import same, written
from shardfx.runtime.verify.proof.interpreter import HasGraph
from shardfx.runtime.verify.proof.terms import build

from .equal_shards import EqualShards
from .family import Family, families, varies
from .varying import Diverged, leaves

Write = Callable[[Graph, Any], HasGraph]
"""A function that lowers results of a graph for a rank, or for ranks together."""


class SingleOps:
    """The proof of a graph's ops by their lowered code, one by one."""

    def __init__(self, graph: Graph, nodes: Sequence[Node], book: RuleBook, write: Write, alike: EqualShards) -> None:
        self.alike = alike
        self._graph, self._nodes, self._book, self._write = graph, list(dict.fromkeys(nodes)), book, write
        numbers: dict[Any, int] = {}
        self._keys = {node: numbers.setdefault(op_key(node), len(numbers)) for node in self._nodes}
        self._codes: dict[int, list[Family]] = {}
        self.parts: list[list[int]] = [list(box) for box in alike.boxes]
        """Ranks on which every op has the same code, numbers aside."""

    def __len__(self) -> int:
        return len(self._codes)

    def codes(self, ranks: Sequence[int], nodes: Sequence[Node]) -> dict[Value, Family]:
        """The code of planned nodes, by their first result, on ranks that are in one part."""
        chosen = {
            key: next(code for code in codes if ranks[0] in code.together.place) for key, codes in self._codes.items()
        }
        return {node.outs[0]: chosen[self._keys[node]] for node in nodes}

    def fault(self) -> Fault | None:
        """The first op that is wrong on some rank."""
        for node in self._nodes:
            key = self._keys[node]
            if key in self._codes:
                continue
            small = alone(node, self._graph)
            made = list(families(lambda rank, small=small: self._write(small, rank), self.parts))  # type: ignore[misc]
            self._codes[key] = made
            self.parts = refined(self.parts, [family.ranks for family in made])
            found = self._fault(small, made)
            if found is not None:
                return Fault(found.what, first_output(self._graph, node.outs), found.rank, node.name, place(node))
        return None

    def _fault(self, small: Graph, made: Sequence[Family]) -> Fault | None:
        proof = Proof.of(small, build(_silent(small), small, self._book), self._book)
        of = {rank: family for family in made for rank in family.ranks}
        asked = self._ranks(small.nodes[0], made, small.mesh)
        return interpret(proof, {r: of[r].at(r) for r in asked}, small.inputs, small.outputs)

    def _ranks(self, node: Node, made: Sequence[Family], mesh: Mesh) -> Iterable[int]:
        """The ranks at which the code of an op is interpreted."""
        if node.op is comm.send:
            (axis,) = node.kwargs["axes"]
            return self._linear((axis,)) if all_meet(made, axis, mesh) else range(mesh.size)
        if isinstance(node.op, OwnOp):
            numbers = _numbers(made, mesh)
            differ = [axes_of({rank: numbers[rank] for rank in box}, mesh) for box in self.alike.boxes]
            return self._linear({*node.kwargs.get("axes", ())}.union(*differ))
        entry = self._book.entry(node.op)
        if entry is not None and entry.local is not None and node.strategy is not None and is_sharded(node):
            if not all(self._as_the_rule_says(node, family, mesh) for family in made):
                return range(mesh.size)
        elif any(family.varying for family in made):
            return range(mesh.size)
        return sorted({rank for family in made for rank in pair(family.ranks, mesh)})

    def _linear(self, own: Iterable[str]) -> list[int]:
        """The ranks at every place along some axes, and at two in each box along each other one."""
        mesh = self.alike.mesh
        axes = mesh.sort(own)
        return sorted({rank for start in self.alike.starts(axes) for rank in mesh.group(start, axes)})

    def _as_the_rule_says(self, node: Node, family: Family, mesh: Mesh) -> bool:
        """Whether the code equals the op's rule, as lowered for all ranks of a family."""
        assert node.strategy is not None
        nodes, root = list(family.program.graph.nodes), dict[fx.Node, fx.Node]()
        for each in nodes:
            if each.target in IDENTITY:
                root[each] = root.get(each.args[0], each.args[0])
        values = dict(zip(dict.fromkeys(node.operands), (n for n in nodes if n.op == "placeholder"), strict=True))
        result = nodes[-1].args[0][0]
        if len(node.results) > 1 or gives_list(node.op):
            result = result.args[0]
        tensors = [values[value] for value in node.operands]
        try:
            forms = written(node, node.strategy, tensors, mesh, family.together.rank(), self._book)
            return any(same(form, result, root) for form in forms)
        except Diverged:
            return False


def _numbers(made: Sequence[Family], mesh: Mesh) -> dict[int, Any]:
    """The parts of an op's code that differ between ranks, the names of a rank's own groups aside."""
    found: dict[int, list[Any]] = {rank: [i] for i, family in enumerate(made) for rank in family.ranks}
    names = [axis.name for axis in mesh.space]
    orders = [axes for i in range(len(names)) for axes in itertools.permutations(names, i + 1)]
    for family in made:
        groups = {mesh.group_name(family.together.rank(), axes) for axes in orders}
        for node in family.varying:
            for arg in leaves(node.args, node.kwargs):
                each = None if isinstance(arg, str) and arg in groups else family.together.on_each(arg)
                for rank, number in zip(family.ranks, each or (), strict=bool(each)):
                    found[rank].append(number)
    return {rank: tuple(numbers) for rank, numbers in found.items()}


def pair(ranks: Sequence[int], mesh: Mesh) -> list[int]:
    """Two sample ranks: one inside the mesh, at other coordinates along each axis as far as possible, and its mirror
    image (or the last of them)."""
    inside = {axis.name: (i + 1) % axis.size for i, axis in enumerate(mesh.space)}
    mirrored = {axis.name: axis.size - 1 - inside[axis.name] for axis in mesh.space}
    mirrored = {name: 0 if at == inside[name] else at for name, at in mirrored.items()}  # in the middle of three
    wanted = [mesh.rank(inside), mesh.rank(mirrored)]
    if len(ranks) == mesh.size:
        return sorted(set(wanted))
    known = set(ranks)
    return sorted({a if a in known else b for a, b in zip(wanted, (ranks[len(ranks) // 2], ranks[-1]), strict=True)})


def op_key(node: Node) -> Any:
    """A key of a node, equal for nodes whose code is equal, and right or wrong alike."""
    places: dict[Value, int] = {}

    def index(value: Value) -> tuple[str, int]:
        return "operand", places.setdefault(value, len(places))

    args = tuple([argument_key(arg, index) for arg in node.args])
    kwargs = tuple([(name, argument_key(arg, index)) for name, arg in node.kwargs.items()])
    placed = tuple([(v.type, v.spec) for v in places])
    made = tuple([None if v is None else (v.type, v.spec) for v in node.results])
    stages = (node.at, *map(stages_of, places)) if node.op is comm.send else ()
    return node.op, args, kwargs, placed, made, node.strategy, stages


def alone(node: Node, graph: Graph) -> Graph:
    """A graph of one node: its inputs and outputs are placed as the plan places its operands and results. What passes
    from stage to stage does so here, too; any other op is in all stages."""
    inputs: dict[Value, Value] = {}

    def given(value: Value) -> Value:
        if value not in inputs:
            inputs[value] = Value(value.type, None, 0, f"x{len(inputs)}", value.spec)
        return inputs[value]

    made = Node(node.op, (), {}, [], node.phase, node.where, node.at, node.strategy)
    made.args = substitute(node.args, given)
    made.kwargs = {k: substitute(a, given) for k, a in node.kwargs.items()}
    made.results = [None if v is None else Value(v.type, made, v.index, v.name, v.spec) for v in node.results]
    staged = node.op is comm.send
    return Graph(
        graph.mesh,
        [Input(InputKind.ARGUMENT, v.name, v, at=stages_of(of) if staged else ()) for of, v in inputs.items()],
        [made],
        [Output(OutputKind.RESULT, str(i), v) for i, v in enumerate(made.outs)],
        pipeline=graph.pipeline if staged else None,
    )


def _silent(graph: Graph) -> Graph:
    """The graph without its communication: its computation alone."""
    found = graph.copy()
    same: dict[Value, Value] = {}
    for node in found.nodes:
        if isinstance(node.op, OwnOp):
            same.update((made, source) for source, made in carried(node))
    found.nodes = [node for node in found.nodes if not isinstance(node.op, OwnOp)]
    found.outputs = [replace(o, value=same.get(o.value, o.value)) for o in found.outputs]
    return found


def refined(parts: Sequence[Sequence[int]], others: Sequence[Sequence[int]]) -> list[list[int]]:
    """The common refinement of two partitions of ranks."""
    found: dict[tuple[int, int], list[int]] = {}
    mine = {rank: i for i, part in enumerate(parts) for rank in part}
    theirs = {rank: i for i, part in enumerate(others) for rank in part}
    for rank in sorted(mine):
        found.setdefault((mine[rank], theirs[rank]), []).append(rank)
    return list(found.values())


def axes_of(values: dict[int, Any], mesh: Mesh) -> set[str]:
    """The axes along which the ranks' values differ."""
    found = set()
    for axis in mesh.space:
        seen: dict[tuple[int, ...], Any] = {}
        for rank, value in values.items():
            rest = tuple(i for name, i in mesh.coords(rank).items() if name != axis.name)
            if seen.setdefault(rest, value) != value:
                found.add(axis.name)
                break
    return found


def all_meet(made: Sequence[Family], axis: str, mesh: Mesh) -> bool:
    """Whether each message of an op along ``axis`` is both sent and received, and no number but those of groups and
    iterations depends on the rank."""
    sent, received = Counter[Any](), Counter[Any]()
    for family in made:
        together = family.together
        coords = mesh.coords(together.rank())
        line = mesh.rank({**coords, axis: 0})
        for node in family.program.graph.nodes:
            if node.target not in MESSAGES:
                if any(map(varies, leaves(node.args, node.kwargs))):
                    return False
                continue
            *before, other, tag, iteration, group = node.args
            if any(map(varies, leaves(before, other, tag))) or group != mesh.group_name(together.rank(), [axis]):
                return False
            sends = node.target is stage_transfer.send
            ends = [coords[axis], other] if sends else [other, coords[axis]]
            columns = [together.on_each(each) or [each] * len(family.ranks) for each in (line, iteration, *ends)]
            (sent if sends else received).update((tag, *each) for each in zip(*columns, strict=True))
    return sent == received
