"""The programs of a plan, proven or run; :mod:`.verdict` gives the answer."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import torch
from torch import fx

from shardfx.ir.cost.fake_calls import FakeCalls
from shardfx.ir.cost.replay import replay
from shardfx.ir.graph import Graph, Input, Node, Output, OutputKind
from shardfx.ir.mesh import Mesh
from shardfx.ir.ops.local_ops import observers
from shardfx.ir.ops.time.handover import turn_number
from shardfx.ir.program.loops.schedule_actions import ends_here, made_at
from shardfx.ir.program.lower import lower, select
from shardfx.ir.program.plain import plain
from shardfx.ir.program.rank_program import RankProgram
from shardfx.ir.program.validate_program import ProgramError, validate_program
from shardfx.ir.rules.book import RuleBook

from .exact_calls import ExactCalls, Misread
from .families import many_ranks, own_programs
from .families.alike_ranks import AlikeRanks, alike_ranks
from .families.whole_programs import place_of
from .fault import Fault
from .first_change import named
from .forms.as_planned import as_planned
from .movers import MESSAGES
from .proof import every_rank
from .proof.known import Proof
from .sample import compare, shrink_plan
from .sample.counterexample import FAILS, Numbers, first_line

MOST_TURNS = 1024
"""Of so many ranks and turns each is interpreted where families say nothing certain."""


@dataclass(frozen=True)
class Asked:
    """Programs for outputs of some kinds.

    Args:
        name: what is said of them.
        program: ``program(graph, rank)``: the plan's own program of a rank; of the planned graph, or of the same plan
            in small.
        used: programs that run on some ranks in the place of the plan's own.
        modules: programs that somebody changed, in the place of those of some ranks.
        together: of ranks that are turns of one: ``together(graph, rank)`` is the program that is used, for all ranks
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
        if not self.modules:
            return self.used
        return {**self.used, **{r: self.program(graph, r).changed(module) for r, module in self.modules.items()}}


@dataclass(frozen=True)
class Task:
    """Programs for outputs of some kinds, and what of the graph they are."""

    asked: Asked
    changed: Mapping[int, RankProgram]
    inputs: Sequence[Input]
    nodes: Sequence[Node]
    outputs: Sequence[Output]
    after: Graph
    observers: dict[str, None] = field(default_factory=dict)
    """The names of the observers that its programs call."""

    @staticmethod
    def of(asked: Asked, changed: Mapping[int, RankProgram], after: Graph) -> Task:
        """The part of a planned graph that some programs are of."""
        return Task(asked, changed, *select(after, asked.kinds), after)

    def sound(self, program: RankProgram, *, in_place: bool = False) -> RankProgram:
        """The plain form of a program that is well formed, and takes and gives what it should: that is what is
        proven."""
        takes, gives = ends_here(self.after, self.inputs, self.outputs, self.after.mesh.coords(program.rank))
        for what, mine, theirs in (("takes", program.inputs, takes), ("gives", program.outputs, gives)):
            names, wanted = ([f"{each.kind.value} {each.name}" for each in ends] for ends in (mine, theirs))
            if names != wanted:
                other = next((w for w, n in zip_longest(wanted, names) if w != n), None)
                said = f"the program {what} {len(names)} values, not the plan's {len(wanted)}, from {other} on"
                raise Broken(Fault(said, str(other or ""), program.rank, certain=True))
        fault = first_broken([program])
        if fault is not None:
            raise Broken(fault)
        results: Any = program.result().args[0]
        none = (
            None
            if not isinstance(results, (list, tuple))
            else next((i for i, each in enumerate(results) if not isinstance(each, fx.Node)), None)
        )
        if none is not None:
            output = gives[none]
            said = f"the program returns {results[none]!r}"
            raise Broken(Fault(said, f"{output.kind.value} {output.name}", program.rank, "output", certain=True))
        self.observers.update(dict.fromkeys(observers(program.graph)))
        return plain(program, in_place=in_place)

    def run(self, programs: Iterable[RankProgram], fakes: FakeCalls) -> Fault | None:
        """Every call gives something, of operands that lie in memory as they will; the first that may misread one.

        Raises:
            Broken: one does not.
        """
        for program in programs:
            try:
                replay(program, fakes=fakes)
            except FAILS as error:
                node = getattr(error, "node", "")
                if isinstance(error.__cause__, Misread):
                    what = first_line(error.__cause__)
                    return Fault(what, _leads_to(program, node), program.rank, node)
                what = f"the program does not run: {first_line(error)}"
                raise Broken(Fault(what, _leads_to(program, node), program.rank, node, certain=True)) from error
        return None


@dataclass
class PlanProof:
    """The programs of a plan, to be proven, or shown to be right."""

    before: Graph
    after: Graph
    rules: RuleBook
    tasks: Sequence[Task]
    stored: Mapping[str, torch.Tensor]
    device: torch.device
    counts: Counter[str]
    mesh: Mesh
    """That of the plan: its turns are none of :attr:`after`'s, where each is a rank."""
    fakes: FakeCalls = field(default_factory=FakeCalls)
    rewrites: bool = False
    """Programs that somebody changed are written as the plan writes them, before they are proven."""

    def __post_init__(self) -> None:
        self._calls = ExactCalls(self.rules, {node.op for node in self.after.nodes})

    @property
    def observers(self) -> list[str]:
        """The names of the observers that the programs call."""
        return list(dict.fromkeys(name for task in self.tasks for name in task.observers))

    @property
    def ranks(self) -> range:
        """All ranks of the mesh."""
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
            self.counts["outputs"] += sum(map(self._givers, task.outputs))
        fault, number = self._programs(proof)
        if fault is not None and not fault.certain and any(task.changed for task in self.tasks):
            self.rewrites = True
            proof = every_rank.anew(proof)
            if self._programs(proof)[0] is None:
                fault = None
        self.counts.update({"nodes": proof.nodes, "collectives": proof.collectives})
        if fault is None:
            return None
        task = self.tasks[number]
        if task.changed:
            fault = named(fault, {rank: task.asked.program(self.after, rank) for rank in task.changed}, task.changed)
        return fault if fault.certain else self._with_numbers(fault, task, numbers)

    def _programs(self, proof: Proof) -> tuple[Fault | None, int]:
        """The first fault of all programs, and of which task."""
        alike = alike_ranks(self.after) if len(self.ranks) > many_ranks.EVERY else None
        if alike is not None:
            fault, number = self._many(proof, alike)
            turns = any(task.asked.together for task in self.tasks)
            few = len(alike.boxes) > 1 or (turns and len(self.ranks) <= MOST_TURNS)
            if fault is not None and not fault.certain and few:
                fault, number = self._each(proof)  # turns are few enough for that: each is gone through in a step
        else:
            fault, number = self._each(proof)
        return fault, number

    def _givers(self, output: Output) -> int:
        """How many ranks give an output."""
        pipeline = self.after.pipeline
        if pipeline is None:
            return len(self.ranks)
        return len(pipeline.places(made_at(output.value))) * len(self.ranks) // self.after.mesh[pipeline.axis].size

    def _with_numbers(self, fault: Fault, task: Task, numbers: Numbers) -> Fault:
        """The fault with numbers that show it, of the plan or of the same in small, where all ranks can be run."""
        after = self.after
        if not task.changed and not numbers.affordable(len(self.ranks)):
            small = shrink_plan.shrink(self.before, self.after, self.rules)
            if small is not None:
                numbers = Numbers(small.before, small.after, self.rules, small.known(self.stored))
                task, after = Task.of(task.asked, {}, small.after), small.after
        together = task.asked.together or task.asked.program

        def program(rank: Any) -> RankProgram:
            return task.asked.program(after, rank) if isinstance(rank, int) else together(after, rank)

        return numbers.of_ranks(fault, program, task.changed, task.inputs, task.outputs)

    def _each(self, proof: Proof) -> tuple[Fault | None, int]:
        for number, task in enumerate(self.tasks):
            given = {r: task.changed.get(r) or task.asked.program(self.after, r) for r in self.ranks}
            sound = {r: self._sound(task, each) for r, each in given.items()}
            fault = task.run(given.values(), self._calls)
            fault = fault or every_rank.interpret(proof, sound, task.inputs, task.outputs)
            if fault is not None:
                return fault, number
        return None, 0

    def _sound(self, task: Task, program: RankProgram) -> RankProgram:
        """The plain form of a program, as it is proven."""
        made = task.sound(program)
        if not self.rewrites or program is not task.changed.get(program.rank):
            return made
        return as_planned(task.sound(task.asked.program(self.after, program.rank)), made, self.fakes)

    def _many(self, proof: Proof, alike: AlikeRanks) -> tuple[Fault | None, int]:
        def write(graph: Graph, rank: int) -> RankProgram:
            made = plain(lower(graph, rank, self.rules, {OutputKind.RESULT}, self.device), in_place=True)
            if graph.pipeline is not None:
                self._in_its_turn(made, graph.mesh.coords(rank))
            return made

        own = {(place_of(self.after, rank), alike.box_of[rank]): rank for rank in self.ranks}.values()
        for number, task in enumerate(self.tasks):
            given = [task.changed[rank] for rank in sorted(task.changed)]
            given = given if task.asked.together is None else given[:1]
            written = (task.asked.program(self.after, rank) for rank in own if rank not in task.changed)
            fault = task.run(itertools.chain(given, written), self._calls)
            if fault is not None:
                return fault, number
        asked = [self._asked_of_many(task) for task in self.tasks]
        return many_ranks.verify(proof, self.rules, write, asked, alike, self.counts)

    def _in_its_turn(self, program: RankProgram, coords: Mapping[str, int]) -> None:
        """Number the messages of an op that stands alone, as those of the turn that a rank is."""
        for node in program.graph.nodes:
            if node.target in MESSAGES:
                made = node.meta["shardfx"]
                turn = turn_number(made.operands[0].spec, self.mesh, coords)
                node.args = (*node.args[:-2], turn, node.args[-1])

    def _asked_of_many(self, task: Task) -> own_programs.Asked:
        """The programs of a task; those of turns are written together, whoever gave them."""
        together = task.asked.together
        alone = {} if together is not None else task.changed
        given = frozenset(task.changed) - alone.keys()
        program = together or task.asked.program
        return own_programs.Asked(
            lambda rank: task.sound(program(self.after, rank), in_place=True),
            {rank: self._sound(task, each) for rank, each in alone.items()},
            task.nodes,
            task.inputs,
            task.outputs,
            given,
        )


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


class Broken(Exception):
    """A program that is not well formed."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.what)
        self.fault = fault
