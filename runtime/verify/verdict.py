"""The answer of ``pm.verify()``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import zip_longest
from typing import Any

import torch
from torch import fx

from shardfx.ir.errors import Error
from shardfx.ir.graph import Graph, Input, Node, Output, OutputKind
from shardfx.ir.program.devices import CPU
from shardfx.ir.program.lower import lower, select
from shardfx.ir.program.plain import plain
from shardfx.ir.program.rank_program import RankProgram
from shardfx.ir.program.validate_program import ProgramError, validate_program
from shardfx.ir.rules.book import RuleBook

from .claims import other_claim
from .families import many_ranks
from .fault import Fault
from .first_change import named
from .proof import every_rank
from .proof.known import Proof
from .sample import compare, shrink_plan
from .sample.counterexample import Numbers


class Status(StrEnum):
    """What a verification came to."""

    PROVEN = "proven"
    REFUTED = "refuted"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Verdict:
    """Whether the ranks' programs compute what the model computes; true where that is proven only.

    ``status`` is ``"proven"``, ``"refuted"`` (some output is another one: ``fault.numbers`` has a counterexample where
    one was found by running) or ``"unknown"`` (the proof does not come to its end, and random numbers do not differ).
    ``why`` names the output, the rank, the node and the source line; ``programs`` are those that were proven,
    ``checked`` says how much was looked at.
    """

    status: Status
    why: str = ""
    how: str = "proven"
    checked: Mapping[str, int] = field(default_factory=dict)
    fault: Fault | None = None
    claim: str = "the ranks compute what the model computes"
    programs: tuple[str, ...] = ()

    @staticmethod
    def of(fault: Fault | None, **more: Any) -> Verdict:
        """The verdict for the first fault that was found, if any."""
        if fault is None:
            return Verdict(Status.PROVEN, **more)
        return Verdict(Status.REFUTED if fault.certain else Status.UNKNOWN, text(fault), fault=fault, **more)

    @property
    def ok(self) -> bool:
        """Whether it is proven."""
        return self.status is Status.PROVEN

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        looked = ", ".join(f"{count:,} {what}" for what, count in self.checked.items())
        if self.ok:
            of = f" in {', '.join(self.programs)}" if self.programs else ""
            return f"{self.how}: {self.claim}{of} ({looked})"
        return f"{self.status}: not {self.how}\n{self.why}\n  {'checked:':<10}{looked}"


def text(fault: Fault) -> str:
    """The fault as an error reads."""
    rank = "" if fault.rank is None else f"rank {fault.rank}"
    node = f"node {fault.node!r}" if fault.node else ""
    place = "; ".join(part for part in (rank, node, fault.where) if part)
    lines = [fault.what]
    lines += [f"  {'where:':<10}{place}"] if place else []
    lines += [f"  {'output:':<10}{fault.output}"] if fault.output else []
    lines += [f"  {'numbers:':<10}{fault.numbers}"] if fault.numbers else []
    return "\n".join(lines)


@dataclass(frozen=True)
class Asked:
    """Programs for outputs of some kinds.

    Args:
        name: what is said of them.
        program: ``program(graph, rank)``: the plan's own program of a rank; of the planned graph, or of the same plan
            in small.
        used: programs that run on some ranks in the place of the plan's own.
        modules: programs that somebody changed, in the place of those of some ranks.
    """

    name: str
    kinds: frozenset[OutputKind]
    program: Callable[[Graph, int], RankProgram]
    used: Mapping[int, RankProgram] = field(default_factory=dict)
    modules: Mapping[int, fx.GraphModule] = field(default_factory=dict)

    def changed(self, graph: Graph) -> dict[int, RankProgram]:
        """The programs that are not the plan's own."""
        return {**self.used, **{r: self.program(graph, r).changed(module) for r, module in self.modules.items()}}


def verify(
    before: Graph,
    after: Graph,
    rules: RuleBook,
    asked: Sequence[Asked],
    run: bool,
    stored: Mapping[str, torch.Tensor],
    device: torch.device = CPU,
) -> Verdict:
    """Verify the programs of a plan.

    Args:
        before, after: the captured graph and the planned one.
        stored: inputs whose content counts.
        device: what programs are written for.

    Raises:
        Error: ``modules`` names a rank that the mesh does not have, or has a module of another plan.
    """
    mesh = after.mesh
    unknown = [r for each in asked for r in each.modules if not (isinstance(r, int) and 0 <= r < mesh.size)]
    if unknown:
        raise Error(f"no rank {unknown[0]} on this mesh", where="verify(modules=...)", expected=f"0 .. {mesh.size - 1}")
    how = "shown on random float64 numbers" if run else "proven"
    names = tuple(each.name for each in asked)
    claim = other_claim(before, after)
    if claim is not None:
        return Verdict.of(claim, how=how, checked={"ranks": mesh.size})
    changed = [each.changed(after) for each in asked]
    small = (
        shrink_plan.shrink(before, after, rules) if run and not any(changed) and shrink_plan.needed(before) else None
    )
    if small is not None and not compare.alike(small.before, small.after, small.known(stored)):
        small = None  # numbers of the program stand for sizes: a count that a sum is divided by
    if small is not None:
        before, after, stored = small.before, small.after, small.known(stored)
        how = f"{how}, on shapes that were shrunk"
    counts: Counter[str] = Counter({"ranks": mesh.size})
    proof = _Proof(
        before,
        after,
        rules,
        [_Task.of(*each, after) for each in zip(asked, changed, strict=True)],
        stored,
        device,
        counts,
    )
    try:
        fault = proof.shown() if run else proof.proven()
    except _Broken as broken:
        fault = broken.fault
    if small is not None:
        counts["sizes shrunk"] += small.sizes
    return Verdict.of(fault, how=how, checked=dict(counts), programs=() if fault is not None else names)


@dataclass(frozen=True)
class _Task:
    """Programs for outputs of some kinds, and what of the graph they are."""

    asked: Asked
    changed: Mapping[int, RankProgram]
    inputs: Sequence[Input]
    nodes: Sequence[Node]
    outputs: Sequence[Output]

    @staticmethod
    def of(asked: Asked, changed: Mapping[int, RankProgram], after: Graph) -> _Task:
        return _Task(asked, changed, *select(after, asked.kinds))

    def sound(self, program: RankProgram, *, in_place: bool = False) -> RankProgram:
        """The plain form of a program that is well formed, and takes and gives what it should: that is what is
        proven."""
        for what, mine, theirs in (("takes", program.inputs, self.inputs), ("gives", program.outputs, self.outputs)):
            names, wanted = ([f"{each.kind.value} {each.name}" for each in ends] for ends in (mine, theirs))
            if names != wanted:
                other = next((w for w, n in zip_longest(wanted, names) if w != n), None)
                said = f"the program {what} {len(names)} values, not the plan's {len(wanted)}, from {other} on"
                raise _Broken(Fault(said, str(other or ""), program.rank, certain=True))
        fault = first_broken([program])
        if fault is not None:
            raise _Broken(fault)
        return plain(program, in_place=in_place)


@dataclass
class _Proof:
    """The programs of a plan, to be proven, or shown to be right."""

    before: Graph
    after: Graph
    rules: RuleBook
    tasks: Sequence[_Task]
    stored: Mapping[str, torch.Tensor]
    device: torch.device
    counts: Counter[str]

    @property
    def ranks(self) -> range:
        return range(self.after.mesh.size)

    def shown(self) -> Fault | None:
        """The first output that random numbers show to be another one."""
        for task in self.tasks:
            own = {rank: task.asked.program(self.after, rank) for rank in self.ranks}
            given = {**own, **task.changed}
            for each in given.values():
                task.sound(each)
            fault, checked = compare.verify(
                self.before,
                self.after,
                self.rules,
                given,
                own if task.changed else given,
                task.inputs,
                task.outputs,
                self.stored,
            )
            self.counts["outputs"] += checked["outputs"]
            if fault is not None:
                return fault
        return None

    def proven(self) -> Fault | None:
        """The first fault, with numbers that show it if there are some."""
        numbers = Numbers(self.before, self.after, self.rules, self.stored)
        proof = every_rank.begin(self.before, self.after, self.rules, self.after.outputs, self.counts)
        if isinstance(proof, Fault):
            return numbers.of_graph(proof)
        for task in self.tasks:
            self.counts["outputs"] += len(task.outputs) * len(self.ranks)
        if len(self.ranks) > many_ranks.EVERY and many_ranks.is_even(self.after):
            fault, number = self._many(proof)
        else:
            fault, number = self._each(proof)
        self.counts.update({"nodes": proof.nodes, "collectives": proof.collectives})
        if fault is None:
            return None
        task = self.tasks[number]
        if task.changed:
            fault = named(fault, {rank: task.asked.program(self.after, rank) for rank in task.changed}, task.changed)
        if fault.certain or len(self.ranks) > many_ranks.EVERY:
            return fault
        given = {rank: task.changed.get(rank) or task.asked.program(self.after, rank) for rank in self.ranks}
        return numbers.of_ranks(fault, given, task.inputs, task.outputs)

    def _each(self, proof: Proof) -> tuple[Fault | None, int]:
        for number, task in enumerate(self.tasks):
            given = {r: task.changed.get(r) or task.asked.program(self.after, r) for r in self.ranks}
            sound = {r: task.sound(each) for r, each in given.items()}
            fault = every_rank.interpret(proof, sound, task.inputs, task.outputs)
            if fault is not None:
                return fault, number
        return None, 0

    def _many(self, proof: Proof) -> tuple[Fault | None, int]:
        def write(graph: Graph, rank: int) -> RankProgram:
            return plain(lower(graph, rank, self.rules, {OutputKind.RESULT}, self.device), in_place=True)

        asked = [
            many_ranks.Asked(
                lambda rank, task=task: task.sound(task.asked.program(self.after, rank), in_place=True),  # type: ignore[misc]
                {rank: task.sound(each) for rank, each in task.changed.items()},
                task.nodes,
                task.inputs,
                task.outputs,
            )
            for task in self.tasks
        ]
        return many_ranks.verify(proof, self.rules, write, asked, self.counts)


def first_broken(programs: Iterable[RankProgram]) -> Fault | None:
    """The first program that is not well formed, so that it may not compute what its plain form does."""
    for program in programs:
        try:
            validate_program(program)
        except ProgramError as error:
            leads = _leads_to(program, error.node)
            return Fault(error.what, leads, program.rank, error.node, error.line, certain=True)
    return None


def _leads_to(program: RankProgram, name: str) -> str:
    """The first output of a program that is made of a call."""
    made = {node for node in program.graph.nodes if node.name == name}
    for node in program.graph.nodes:
        if made & set(node.all_input_nodes):
            made.add(node)
    results = program.result().args[0]
    pairs = zip(program.outputs, results, strict=False)  # type: ignore[arg-type]
    return next((f"{output.kind.value} {output.name}" for output, node in pairs if node in made), "")


class _Broken(Exception):
    """A program that is not well formed."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.what)
        self.fault = fault
