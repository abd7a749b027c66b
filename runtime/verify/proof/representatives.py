"""The proof for many ranks, at the cost of a few: equal ops once, equal ranks once.

Where every cut of the plan is even, all ranks hold equal shapes, and their programs differ in names of groups and in
offsets only. Then three things are proven instead of all programs:

1. *Every op at every rank.* An op of the planned graph, alone, takes its operands as the plan places them to its
   results as the plan places them: its code is written, and interpreted. Ops that are equal (types, placements,
   arguments: those of 80 equal blocks) are taken once. An op that communicates is taken at all ranks. Of another one,
   ranks that agree on the coordinates along its own axes have one code, for that is all that a rule's ``local``
   function gets to see (:class:`shardfx.ir.rules.local.Emit`); and without such a function only shapes could differ,
   and they are equal.
2. *The planned graph is the captured one*, by terms, and places its outputs as promised, on every rank.
3. *Whole programs*, of a rank inside the mesh and of its mirror image, with all their collectives: order, operands,
   waits and results. Their partners in collectives are *shadows* (:mod:`.meeting`): by 1, they hold at each node what
   the rank itself holds, at their own coordinates.

By 1 and 2, any program that does the ops of the planned graph in order is right on its rank. That the program of a
rank which was not looked at in 3 is such a program, put together as the programs of 3 are, is taken as given: it is the
same loop over the same nodes. A program that somebody gives is never taken as given: it is interpreted, and so is every
rank to which it speaks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from shardfx.ir.graph import Graph, Input, InputKind, Node, Output, OutputKind, Value, substitute
from shardfx.ir.mesh import Mesh
from shardfx.ir.ops.table import OwnOp
from shardfx.ir.rules.book import RuleBook
from shardfx.ir.spec import Spec
from shardfx.runtime.verify.fault import Failed, Fault, place

from .deduction import Deduction
from .every_rank import begin
from .interpreter import HasGraph, Rank
from .known import Proof
from .meeting import LockStep
from .numbering import Numbering
from .terms import Ref, build, frozen

EVERY = 16
"""On a mesh of up to so many ranks every program is interpreted."""
Write = Callable[[Graph, int], HasGraph]
"""Writes one rank's program for the results of a graph."""


def is_even(graph: Graph) -> bool:
    """Whether every rank holds as much as any other of every value."""
    seen: set[tuple[tuple[int, ...], Spec]] = set()
    for value in graph.values():
        if value.spec is not None:
            seen.add((value.shape, value.spec))
    for node in graph.nodes:
        if node.strategy is not None:
            seen.update(zip((v.shape for v in node.operands), node.strategy.operands, strict=False))
            seen.update(zip((v.shape for v in node.outs), node.strategy.results, strict=False))
    return all(
        part.size % graph.mesh.extent(part.axes) == 0
        for shape, spec in seen
        for cut, size in zip(spec.dims, shape, strict=True)
        for part in cut.sub(size)
    )


def representatives(mesh: Mesh) -> list[int]:
    """A rank inside the mesh, at other coordinates along each axis as far as possible, and its mirror image."""
    inside = {axis.name: (i + 1) % axis.size for i, axis in enumerate(mesh.space)}
    mirrored = {axis.name: axis.size - 1 - inside[axis.name] for axis in mesh.space}
    return sorted({mesh.rank(inside), mesh.rank(mirrored)})


def verify(
    before: Graph,
    after: Graph,
    book: RuleBook,
    write: Write,
    program: Callable[[int], HasGraph],
    changed: Mapping[int, HasGraph],
    inputs: Sequence[Input],
    outputs: Sequence[Output],
) -> tuple[Fault | None, dict[str, int]]:
    """The first fault of the programs, or None; and how much was checked. The plan must be even.

    ``program`` gives the plan's own programs, ``changed`` are others, by rank.
    """
    mesh = after.mesh
    counts: dict[str, int] = {"ranks": mesh.size, "outputs": len(outputs) * mesh.size}
    fragment = Fragments(after, book, write, counts).fault()
    if fragment is not None:
        return fragment, counts
    proof = begin(before, after, book, outputs, counts)
    if isinstance(proof, Fault):
        return proof, counts
    pattern: Rank | None = None
    chosen: list[dict[int, Rank]] = [{r: Rank(proof, r, program(r), inputs)} for r in representatives(mesh)]
    if changed:
        near = sorted({m for r in changed for m in _neighbours(after, r)})
        chosen.append({r: Rank(proof, r, changed.get(r) or program(r), inputs, r in changed) for r in near})
    fault: Fault | None = None
    try:
        for ranks in chosen:
            LockStep(proof, ranks, pattern if len(ranks) > 1 else None).run()
            for rank in ranks.values():
                rank.outputs(outputs)
            pattern = pattern or next(iter(ranks.values()))
    except Failed as failed:
        fault = failed.fault
    counts |= {"whole programs": sum(map(len, chosen)), "nodes": proof.nodes, "collectives": proof.collectives}
    return fault, counts


def _neighbours(graph: Graph, rank: int) -> set[int]:
    """A rank and those with which it communicates."""
    axes = {tuple(node.kwargs["axes"]) for node in graph.nodes if isinstance(node.op, OwnOp) and node.kwargs["axes"]}
    return {rank, *(member for each in axes for member in graph.mesh.group(rank, each))}


class Fragments:
    """The ops of a graph, each alone, at every rank."""

    def __init__(self, graph: Graph, book: RuleBook, write: Write, counts: dict[str, int]) -> None:
        self._graph, self._book, self._write, self._counts = graph, book, write, counts

    def fault(self) -> Fault | None:
        """The first op that is wrong on some rank."""
        seen: set[Any] = set()
        checked = 0
        for node in self._graph.nodes:
            key = _class(node)
            if key in seen:
                continue
            seen.add(key)
            ranks = self._ranks(node)
            checked += len(ranks)
            found = self._fault(node, ranks)
            if found is not None:
                return Fault(found.what, self._leads_to(node), found.rank, node.name, place(node))
        self._counts |= {"distinct ops": len(seen), "at ranks": checked}
        return None

    def _ranks(self, node: Node) -> Sequence[int]:
        """All ranks where the op communicates; one for each place along its own axes where its rule writes its code."""
        mesh = self._graph.mesh
        if isinstance(node.op, OwnOp) or node.strategy is None:
            return range(mesh.size)
        entry = self._book.entry(node.op)
        if entry is None or entry.local is None:
            return representatives(mesh)
        specs = [*node.strategy.operands, *node.strategy.results]
        axes = mesh.sort(axis for spec in specs for axis in (*spec.axes, *spec.partial_axes))
        return mesh.group(0, axes)

    def _fault(self, node: Node, ranks: Iterable[int]) -> Fault | None:
        small = alone(node, self._graph.mesh)
        universe = build(_silent(small), small, self._book)
        proof = Proof(small, universe, Deduction(universe, self._book, small.mesh), Numbering(universe, small.mesh))
        made = {r: Rank(proof, r, self._write(small, r), small.inputs) for r in ranks}
        try:
            LockStep(proof, made).run()
            for rank in made.values():
                rank.outputs(small.outputs)
        except Failed as failed:
            return failed.fault
        return None

    def _leads_to(self, node: Node) -> str:
        """The first output that needs a node."""
        needs = set(node.outs)
        for each in self._graph.nodes:
            if needs & set(each.operands):
                needs.update(each.outs)
        found = next((o for o in self._graph.outputs if o.value in needs), None)
        return "" if found is None else f"{found.kind.value} {found.name}"


def _class(node: Node) -> Any:
    """Equal for nodes whose programs are equal."""
    places: dict[Value, int] = {}
    args = substitute(node.args, lambda v: Ref(places.setdefault(v, len(places))))
    kwargs = {k: substitute(a, lambda v: Ref(places.setdefault(v, len(places)))) for k, a in node.kwargs.items()}
    held = tuple((v.type, v.spec) for v in [*places, *node.outs])
    missing = tuple(v is None for v in node.results)
    return node.op, frozen(args), frozen(kwargs), held, missing, node.strategy


def alone(node: Node, mesh: Mesh) -> Graph:
    """A graph of one node: its operands come in as the plan places them, and its results go out so."""
    inputs: dict[Value, Value] = {}

    def given(value: Value) -> Value:
        if value not in inputs:
            inputs[value] = Value(value.type, None, 0, f"x{len(inputs)}", value.spec)
        return inputs[value]

    made = Node(node.op, (), {}, [], node.phase, node.where, node.stage, node.strategy)
    made.args = substitute(node.args, given)
    made.kwargs = {k: substitute(a, given) for k, a in node.kwargs.items()}
    made.results = [None if v is None else Value(v.type, made, v.index, v.name, v.spec) for v in node.results]
    return Graph(
        mesh,
        [Input(InputKind.ARGUMENT, v.name, v) for v in inputs.values()],
        [made],
        [Output(OutputKind.RESULT, str(i), v) for i, v in enumerate(made.outs)],
    )


def _silent(graph: Graph) -> Graph:
    """The same graph without its communication: what it computes."""
    found = graph.copy()
    same: dict[Value, Value] = {}
    for node in found.nodes:
        if isinstance(node.op, OwnOp):
            same.update(zip(node.outs, node.operands, strict=True))
    found.nodes = [node for node in found.nodes if not isinstance(node.op, OwnOp)]
    found.outputs = [replace(o, value=same.get(o.value, o.value)) for o in found.outputs]
    return found
