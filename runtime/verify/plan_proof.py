"""Verification of a plan's programs, by proof or on random numbers; :mod:`.verdict` gives the answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any

import torch
from torch import fx

from shardfx.ir.cost.fake_calls import CallEffect, FakeCalls, Result, TensorLayout, leaves
from shardfx.ir.cost.replay import replay
from shardfx.ir.graph import Graph, Input, Node, Output, OutputKind, op_name
from shardfx.ir.mesh import Mesh
from shardfx.ir.ops.comm_local import iteration_number
from shardfx.ir.ops.local_ops import observers, row_of
from shardfx.ir.program.loops.schedule_actions import local_ends
from shardfx.ir.program.lower import lower
from shardfx.ir.program.plain import plain
from shardfx.ir.program.rank_program import RankProgram
from shardfx.ir.program.validate_program import ProgramError, validate_program
from shardfx.ir.rules.book import RuleBook

from .aten_calls import as_aten_calls
from .data_movement import MESSAGES
from .families import many_ranks
from .families.equal_shards import EqualShards, equal_shards
from .families.family import Family
from .families.varying import Together, Varying
from .fault import Failed, Fault, at_first_change, first_line
from .numeric_check import FAILS, Counterexample, compare
from .proof.calls import Proof
from .proof.collective_matching import interpret

MOST_ITERATIONS = 1024
"""The most ranks times iterations of which each is interpreted where the proof for many ranks is incomplete."""


@dataclass(frozen=True)
class ProgramRequest:
    """A request to verify the programs for outputs of some kinds.

    Args:
        name: what the verdict calls them.
        program: ``program(graph, rank)`` writes the plan's own program of a rank, for the planned graph.
        used: programs that run on some ranks in the place of the plan's own.
        modules: programs that somebody changed, in the place of those of some ranks.
        together: of ranks that are iterations of a loop: ``together(graph, rank)`` is the program in use, for all ranks
            of which ``rank`` is the number (:class:`.families.varying.Varying`).
    """

    name: str
    kinds: frozenset[OutputKind]
    program: Callable[[Graph, int], RankProgram]
    used: Mapping[int, RankProgram] = field(default_factory=dict)
    modules: Mapping[int, fx.GraphModule] = field(default_factory=dict)
    together: Callable[[Graph, Any], RankProgram] | None = None

    def changed(self, graph: Graph) -> Mapping[int, RankProgram]:
        """The programs that are not the plan's own."""
        if not isinstance(self.used, dict):  # programs of iterations, each written when it is asked for
            return self.used
        modules = {rank: self.program(graph, rank).changed(module) for rank, module in self.modules.items()}
        return {rank: as_aten_calls(program) for rank, program in (self.used | modules).items()}


@dataclass(frozen=True)
class Task:
    """The programs of a request, and the part of the planned graph that they compute."""

    request: ProgramRequest
    changed: Mapping[int, RankProgram]
    inputs: Sequence[Input]
    nodes: Sequence[Node]
    outputs: Sequence[Output]
    after: Graph
    observers: dict[str, None] = field(default_factory=dict)
    """The names of the observers that its programs call."""

    def own(self, rank: int) -> RankProgram:
        """The plan's own program of a rank."""
        return self.request.program(self.after, rank)

    def program(self, rank: int) -> RankProgram:
        """The program in use on a rank."""
        return self.changed.get(rank) or self.own(rank)

    def checked(self, program: RankProgram, *, in_place: bool = False) -> RankProgram:
        """The plain form of a program, which is the subject of the proof.

        Raises:
            Failed: it is not well formed, or does not have the plan's inputs and outputs.
        """
        takes, gives = local_ends(self.after, self.inputs, self.outputs, self.after.mesh.coords(program.rank))
        for what, mine, theirs in (("takes", program.inputs, takes), ("gives", program.outputs, gives)):
            names, wanted = ([f"{each.kind.value} {each.name}" for each in ends] for ends in (mine, theirs))
            if names != wanted:
                other = next((w for w, n in zip_longest(wanted, names) if w != n), None)
                said = f"the program {what} {len(names)} values, not the plan's {len(wanted)}, from {other} on"
                raise Failed(Fault(said, str(other or ""), program.rank, certain=True))
        if (fault := malformed(program)) is not None:
            raise Failed(fault)
        results: Any = program.result().args[0]
        for output, result in zip(gives, results, strict=False) if isinstance(results, (list, tuple)) else ():
            if not isinstance(result, fx.Node):
                name = f"{output.kind.value} {output.name}"
                raise Failed(Fault(f"the program returns {result!r}", name, program.rank, "output", certain=True))
        self.observers.update(dict.fromkeys(observers(program.graph)))
        return plain(program, in_place=in_place)

    def replay(self, program: RankProgram, fakes: FakeCalls) -> None:
        """Run a program on fake tensors.

        Raises:
            Failed: it does not run, or a call may misread an operand's memory layout.
        """
        try:
            replay(program, fakes=fakes)
        except FAILS as error:
            node = getattr(error, "node", "")
            misread = isinstance(error.__cause__, Misread)
            what = first_line(error.__cause__) if misread else f"the program does not run: {first_line(error)}"
            raise Failed(Fault(what, _leads_to(program, node), program.rank, node, certain=not misread)) from error


@dataclass
class PlanProof:
    """The verification of a plan's programs: proven, or compared on random numbers."""

    before: Graph
    after: Graph
    rules: RuleBook
    tasks: Sequence[Task]
    stored: Mapping[str, torch.Tensor]
    device: torch.device
    counts: Counter[str]
    mesh: Mesh
    """The plan's mesh, with its loop axes; in ``after`` each iteration is a rank."""

    def __post_init__(self) -> None:
        self._calls = LayoutChecks(self.rules, {node.op for node in self.after.nodes})

    @property
    def ranks(self) -> range:
        """All ranks of the mesh."""
        return range(self.after.mesh.size)

    def compared(self) -> Fault | None:
        """The first output that differs on random numbers."""
        for task in self.tasks:
            programs = {rank: task.program(rank) for rank in self.ranks}
            for each in programs.values():
                task.checked(each)
            fault, checked = compare(self.before, self.after, programs, task.inputs, task.outputs, self.stored)
            self.counts["outputs"] += checked["outputs"]
            if fault is not None:
                return fault
        return None

    def proven(self) -> Fault | None:
        """The first fault of the proof, with a counterexample if there is one."""
        fault, task = self.unproven()
        if fault is None or (fault.certain and task is not None):
            return fault
        numbers = Counterexample(self.before, self.after, self.stored)
        if task is None:
            return numbers.of_graph(fault)
        return numbers.of_ranks(fault, task.program, task.inputs, task.outputs)

    def unproven(self) -> tuple[Fault | None, Task | None]:
        """The first fault of the proof, and its task; None for a fault of the planned graph."""
        proof = self._begun()
        if isinstance(proof, Fault):
            return proof, None
        self.counts["outputs"] += sum(len(task.outputs) for task in self.tasks)
        fault, number = self._programs(proof)
        if fault is not None and not fault.certain and any(task.changed for task in self.tasks):
            finer = self._begun(decomposed=True)
            if isinstance(finer, Proof) and self._programs(finer)[0] is None:
                fault = None
        self.counts.update({"nodes": proof.nodes, "collectives": proof.collectives})
        task = self.tasks[number]
        if fault is not None and task.changed:
            fault = at_first_change(fault, {rank: task.own(rank) for rank in task.changed}, task.changed)
        return fault, task

    def _begun(self, **how: bool) -> Proof | Fault:
        return Proof.begin(self.before, self.after, self.rules, self.after.outputs, self.counts, **how)

    def _programs(self, proof: Proof) -> tuple[Fault | None, int]:
        """The first fault of all programs, and the number of its task."""
        alike = equal_shards(self.after) if len(self.ranks) > many_ranks.EVERY else None
        if alike is None:
            return self._each(proof)
        fault, number = self._many(proof, alike)
        loops = any(task.request.together for task in self.tasks)
        few = len(alike.boxes) > 1 or (loops and len(self.ranks) <= MOST_ITERATIONS)
        return self._each(proof) if fault is not None and not fault.certain and few else (fault, number)

    def _each(self, proof: Proof) -> tuple[Fault | None, int]:
        for number, task in enumerate(self.tasks):
            programs = {r: task.program(r) for r in self.ranks}
            try:
                checked = {r: task.checked(each) for r, each in programs.items()}
                for each in programs.values():
                    task.replay(each, self._calls)
                fault = interpret(proof, checked, task.inputs, task.outputs)
            except Failed as failed:
                fault = failed.fault
            if fault is not None:
                return fault, number
        return None, 0

    def _many(self, proof: Proof, alike: EqualShards) -> tuple[Fault | None, int]:
        def write(graph: Graph, rank: int) -> RankProgram:
            made = plain(lower(graph, rank, self.rules, {OutputKind.RESULT}, self.device), in_place=True)
            for node in made.graph.nodes if graph.pipeline is not None else ():
                if node.target in MESSAGES:  # of the iteration that a rank is
                    sent, coords = node.meta["shardfx"].operands[0].spec, graph.mesh.coords(rank)
                    node.args = (*node.args[:-2], iteration_number(sent, self.mesh, coords), node.args[-1])
            return made

        requests = []
        for number, task in enumerate(self.tasks):
            try:
                requests.append(self._of_families(task, alike))
            except Failed as failed:
                return failed.fault, number
        return many_ranks.verify(proof, self.rules, write, requests, alike, self.counts)

    def _of_families(self, task: Task, alike: EqualShards) -> many_ranks.FamilyRequest:
        """The programs of a task; those of iterations are written together, whoever gave them. One of ranks with equal
        shards is run on fake tensors."""
        together = task.request.together
        alone = {} if together is not None else task.changed
        program = together or task.request.program
        replayed: set[tuple[int, int]] = set()

        def write(rank: Any) -> RankProgram:
            made = program(self.after, rank)
            one = rank.together.ranks[0] if isinstance(rank, Varying) else rank
            place = many_ranks.place_of(self.after, one), alike.box_of[one]
            if place not in replayed:
                with Family(rank.together if isinstance(rank, Varying) else Together([rank]), made).only(one):
                    task.replay(replace(made, rank=one), self._calls)
                replayed.add(place)
            return task.checked(made, in_place=True)

        for each in alone.values():
            task.replay(each, self._calls)
        return many_ranks.FamilyRequest(
            write,
            {rank: task.checked(each) for rank, each in alone.items()},
            task.nodes,
            task.inputs,
            task.outputs,
            frozenset(task.changed) - alone.keys(),
        )


def malformed(program: RankProgram) -> Fault | None:
    """The fault of a program that is not well formed, so that it may not compute what its plain form does."""
    try:
        validate_program(program)
    except ProgramError as error:
        return Fault(error.what, _leads_to(program, error.node), program.rank, error.node, error.line, certain=True)
    return None


def _leads_to(program: RankProgram, name: str) -> str:
    """The first output of a program that depends on a call."""
    made = {node for node in program.graph.nodes if node.name == name}
    for node in program.graph.nodes:
        if made & set(node.all_input_nodes):
            made.add(node)
    results = program.result().args[0]
    pairs = zip(program.outputs, results, strict=False)  # type: ignore[arg-type]
    return next((f"{output.kind.value} {output.name}" for output, node in pairs if node in made), "")


class Misread(TypeError):
    """A kernel that does not support the memory layout of an operand, so that it may compute wrong numbers."""


class LayoutChecks(FakeCalls):
    """Calls on fake tensors, checked for what the proof does not see: a value written into memory of a smaller dtype,
    and operands in a memory layout that the op's row does not allow.

    ``planned`` are the ops of the graph: rows that are discovered hold for these alone.

    Raises:
        TypeError: memory cannot hold the dtype of what a call writes there.
        Misread: an operand has another memory layout than the row of the op states.
    """

    def __init__(self, book: RuleBook, planned: Container[Any]) -> None:
        super().__init__()
        self._book, self._planned = book, planned

    def _run(self, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> CallEffect:
        self._check_layouts(target, leaves((args, kwargs), TensorLayout))
        made, row = super()._run(target, args, kwargs), row_of(target)
        if row is not None and row.into is not None and row.plain is not None:
            out_of_place: Any = row.plain(tuple(args), dict(kwargs))
            values = [out_of_place] if isinstance(out_of_place, TensorLayout) else _layouts(self.made(*out_of_place))
            for value, memory in zip(values, _layouts(made), strict=False):
                if torch.promote_types(value.dtype, memory.dtype) != memory.dtype:
                    raise TypeError(f"a value of {value.dtype} is written into memory of {memory.dtype}")
        return made

    def _check_layouts(self, target: Any, layouts: Iterable[TensorLayout]) -> None:
        entry = self._book.entry(target) if isinstance(target, torch._ops.OpOverload) else None
        if entry is None or (entry.discovered and target not in self._planned):
            return
        for layout in layouts:
            if not entry.contiguous.takes(layout.shape, layout.stride):
                wanted = f"contiguous in {entry.contiguous.value}"
                raise Misread(f"{op_name(target)} takes operands {wanted}, not of strides {layout.stride}")


def _layouts(made: CallEffect) -> list[TensorLayout]:
    return [result.layout for result in leaves(made.results, Result)]
