"""The read side of a parallel module: programs, verdict, report, memory, timeline, pictures, and probes of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import fx

from shardfx.compile import Compiled, no_collection
from shardfx.explain import Explanation, explain
from shardfx.ir.cost.fake_calls import FakeCalls
from shardfx.ir.cost.footprint import Footprint
from shardfx.ir.cost.machine import Machine
from shardfx.ir.cost.replay import replay, values
from shardfx.ir.dim_sharding import is_strided
from shardfx.ir.errors import Error, did_you_mean
from shardfx.ir.graph import Graph, InputKind, Value
from shardfx.ir.program.rank_module import RankModule
from shardfx.ir.program.rank_program import RankProgram
from shardfx.ir.rules.book import RuleBook
from shardfx.ir.schedule.actions import Schedule
from shardfx.memory.rank_memory import RankMemory, Sizes
from shardfx.module.execution_target import CompileOptions, ExecutionTarget
from shardfx.module.model_state import ModelState
from shardfx.module.module_tree import ProxyRoot, ProxyTree
from shardfx.module.programs import Programs
from shardfx.module.specializations import Specializations
from shardfx.plan import Plan, make_plan
from shardfx.report.figures import Report, make_report
from shardfx.rerun import after_each_pass, diff, verify_every_pass
from shardfx.runtime.distributed.groups import is_dry_run
from shardfx.runtime.distributed.peer_failure import tell_all
from shardfx.runtime.engine import Probe
from shardfx.runtime.nan_debug import NanDebug
from shardfx.runtime.recording import Recording
from shardfx.runtime.store import Store
from shardfx.runtime.verify.verdict import Verdict
from shardfx.schedules.timeline import PlanTimeline, plan_timeline, write_recording


class PlannedModule(ProxyRoot):
    """A planned model, for inspection."""

    _compiled: Compiled
    _target: ExecutionTarget
    _state: ModelState
    _tree: ProxyTree
    _variants: Specializations
    _compiling: CompileOptions | None
    _measured: Recording | None
    _watch: Probe | None
    """The probe of each call; None by default, which costs nothing."""

    @property
    def _store(self) -> Store:
        """The shards of parameters and buffers in this process."""
        return self._state.store

    @property
    def _programs(self) -> Programs:
        """The programs of the call signature for which the model was captured."""
        return self._variants.known[0][1]

    @property
    def captured(self) -> Graph:
        """The captured graph, before all passes."""
        return self._compiled.before

    @property
    def planned(self) -> Graph:
        """The planned graph, after all passes."""
        return self._compiled.after

    def rank_module(self, rank: int, *, training: bool | None = None) -> RankModule:
        """The program of a rank, of this process or another, as a ``GraphModule``.

        Inputs are the rank's own shards, in the order of the placeholders; results are the loss, gradients and new
        buffers (or, where there is no loss, the model's results). ``str(pm.rank_program(rank))`` is its text.
        ``meta["val"]`` of a node is a tensor without content, of the shape and stride of what the node gives.
        """
        program = self.rank_program(rank, training=training)
        with no_collection():
            module, known = program.module(), values(program)
        for node in module.graph.nodes:
            if node.op == "output":
                node.meta["val"] = fx.map_arg(node.args[0], lambda each: known[each.name])
            else:
                node.meta["val"] = known.get(node.name)
        return module

    def rank_program(self, rank: int, *, training: bool | None = None) -> RankProgram:
        """The program of a rank: its ``graph``, its text (``str``), its inputs and outputs."""
        with no_collection():
            return self._programs.running(rank, self._programs.kinds(training))

    def verify(
        self, modules: Mapping[int, fx.GraphModule] | None = None, *, run: bool = False, every_pass: bool = False
    ) -> Verdict:
        """Whether the ranks' programs, all that a call may run, compute what the model computes: true, or false with
        ``.why``; ``.status`` is ``"proven"``, ``"refuted"`` or ``"unknown"``.

        By default a proof, without numbers (see :mod:`shardfx.runtime.verify.proof`). With ``run`` all ranks run beside
        the captured model in this process, in float64, on random numbers.

        Args:
            modules: programs that somebody changed, by rank; those of the other ranks are the plan's own.
            every_pass: compare the graph with the captured one after each pass first: the first pass after which it is
                another function is named.

        Raises:
            Error: an unknown rank; with ``run``, a model that is too large to run here.

        Example::

            assert pm.verify()
            print(pm.verify(modules={1: changed}).why)
        """
        if every_pass and not (verdict := verify_every_pass(self._compiled)):
            return verdict
        return self._variants.verify(modules, run, self._state.known_inputs())

    @property
    def plan(self) -> Plan:
        """The plan: its decisions, saved as JSON, compared, and passed back as ``Hints(specs=plan.specs)``."""
        return make_plan(self._compiled)

    def report(self, machine: Machine | str | None = None) -> Report:
        """The cost report of the plan: ``.memory``, ``.communication``, ``.time``, ``.warnings``.

        Memory and time are those of the program that rank 0 runs, on the machine that the hints name, or another one
        (``"h100-dgx"``). ``.stages`` are those of a pipeline, and ``.measured`` is what :meth:`record` measured.
        """
        programs, replayed = self._programs, self._replays()
        memory = self._memory(programs, 0, None, replayed)
        timeline = self._timeline(machine, None, replayed)
        warnings = list(dict.fromkeys(each for _, made in self._variants.known for each in made.warnings()))
        made = make_report(self._compiled, memory, timeline, warnings, self._measured, self._target.virtual)
        return replace(made, notes=self._variants.notes)

    def memory(self, rank: int = 0, *, training: bool | None = None) -> RankMemory:
        """What a rank holds in a step: ``.peak`` (bytes), ``.by_category``, ``.at_peak``, ``.draw(path)``, as
        the program predicts it::

            print(pm.memory())

        Args:
            rank: any rank, also one that this process is not.
            training: as for :meth:`rank_program`.
        """
        programs, sizes = self._programs, Sizes.of(self._compiled.hints)
        memory = self._memory(programs, rank, training, self._replays())

        def resized(by: dict[str, Fraction]) -> RankMemory:
            variants = self._variants
            with torch.enable_grad():
                compiled = variants.build(variants.skeleton, sizes.changed(self._compiled.hints, by))
            return self._memory(programs.of(compiled), rank, training, self._replays())

        return replace(memory, sizes=sizes, resized=resized)

    @property
    def schedule(self) -> Schedule | None:
        """The pipeline schedule: the actions of each rank in order; None for a plan without stages."""
        return self.planned.pipeline.schedule if self.planned.pipeline is not None else None

    def timeline(self, machine: Machine | str | None = None, *, training: bool | None = None) -> PlanTimeline:
        """The predicted timeline of a step, from the cost of its programs: for each rank its compute stream, and one
        stream for each of its links. Communication is hidden where the rank computes meanwhile, and exposed where it
        waits::

            timeline = pm.timeline()
            print(timeline.step, timeline.bubble, timeline.exposed, timeline.hidden)
            timeline.trace("step.json")  # for ui.perfetto.dev

        Args:
            machine: on which; None: the one that the plan is made for (``Hints(machine=...)``).
            training: as for :meth:`rank_program`.
        """
        return self._timeline(machine, training, self._replays())

    def _timeline(
        self, machine: Machine | str | None, training: bool | None, replayed: Callable[[RankProgram], Footprint]
    ) -> PlanTimeline:
        planned, kinds = Machine.of(self._compiled.hints.machine), self._programs.kinds(training)
        device = planned if machine is None else Machine.of(machine)
        with no_collection():
            return plan_timeline(
                self.planned, lambda rank: self._programs.running(rank, kinds), device, planned, replayed
            )

    def _replays(self) -> Callable[[RankProgram], Footprint]:
        """Replays programs, each once."""
        compiled = self._compiling is not None
        fakes, ahead = FakeCalls(), 0 if compiled else self._target.ahead_here
        return cache(lambda program: replay(program, ahead, fakes, compiled))

    def _memory(
        self, programs: Programs, rank: int, training: bool | None, replayed: Callable[[RankProgram], Footprint]
    ) -> RankMemory:
        with no_collection():
            program = programs.running(rank, programs.kinds(training))
            return RankMemory(program, replayed(program), compiled=self._compiling is not None)

    @property
    def _this_rank(self) -> int | None:
        """The rank of this process; None where all ranks are virtual, in this process."""
        return None if self._target.virtual else dist.get_rank()

    @property
    def _rule_book(self) -> RuleBook:
        """The rule book of the plan."""
        return self._compiled.context.rules

    def tile(self, name: str, rank: int | None = None, halo: int = 0) -> tuple[slice, ...]:
        """A rank's part of an input, as slices of the global input: its tile of a sharded image. ::

            window = scene[pm.tile("args.0")]  # a part of the global batch

        Args:
            name: ``args.0``, ``kwargs.image``, ``targets.0``, ...
            rank: any rank; None: that of this process.
            halo: so many rows more on each side of every dim that is sharded, but the first, as far as there are any.

        Raises:
            Error: no input has this name; the rank reads several ranges of a dim; no rank is named, and there are
                virtual ones.
        """
        rank = self._this_rank if rank is None else rank
        if rank is None:
            raise Error(
                "virtual ranks read a tile each",
                where=f"pm.tile({name!r})",
                expected=f"a rank, 0 .. {self.planned.mesh.size - 1}",
                got="none",
                remedy=f"pm.tile({name!r}, rank=0)",
            )
        return tile_of(self.planned, name, rank, halo)

    def _traced(self, *args: Any) -> Graph:
        """The captured program of the model's results for other arguments (tensors on ``meta`` will do), in the mode
        that the model is in now. Nothing is planned.

        Raises:
            Error: the model cannot be captured for them.
        """
        with no_collection():
            return self._variants.trace(args)

    def explain(self, name: str) -> Explanation:
        """Explain why a parameter, ``args.N``, a module's ops or a value (``%12``) are sharded so, back to the hints.

        Raises:
            Error: nothing has this name.
        """
        return explain(self.planned, self._rule_book, name)

    def draw(self, folder: str | Path, every_pass: bool = False) -> list[Path]:
        """Draw the program as ``before.svg`` and ``after.svg``, if wished also after each pass; gives the paths."""
        from shardfx.visualize import draw_folder

        between = after_each_pass(self._compiled) if every_pass else {}
        return draw_folder({"before": self.captured, **between, "after": self.planned}, folder)

    def diff(self, name: str) -> str:
        """What a pass changed, as a unified diff of the graph's text (see :func:`shardfx.rerun.diff`)::

            print(pm.diff("bucket-comm"))

        Raises:
            Error: no pass of the plan has this name.
        """
        return diff(self._compiled, name)

    @contextmanager
    def debug_nan(self, *, inf: bool = True) -> Iterator[None]:
        """Stop at the first node that makes a NaN or an inf from finite numbers, in forward or backward, on any rank::

            with pm.debug_nan():
                loss = pm(x, y)

        The error names the rank, the node, module path and source line, and the shapes, smallest and largest numbers of
        its operands. Infinities that the model itself writes, as in a mask, are let through. Every result is looked at,
        so a step takes some times longer. Under ``torchrun`` all ranks open it.

        Args:
            inf: whether an infinity counts, too.

        Raises:
            Error: when something is found.
        """
        with self._watching(NanDebug(inf)):
            yield

    @contextmanager
    def _watching(self, watch: Probe) -> Iterator[None]:
        """Probe calls within this context."""
        before, self._watch = self._watch, watch
        try:
            yield
        finally:
            self._watch = before

    @contextmanager
    def record(self, path: str | Path) -> Iterator[Recording]:
        """Measure steps: a trace for ui.perfetto.dev of what each rank does when, as :meth:`timeline` predicts it::

            with pm.record("measured.json") as recording:
                pm(x, y).backward()
            print(recording.step, recording.bubble)

        The report then says both, and how many rows the experts of each rank got in the last step. Every call is
        looked at, which takes some microseconds each. Under ``torchrun`` all ranks open it, and rank 0 writes.
        """
        recording, rank = Recording(), self._this_rank
        with self._watching(recording):
            yield recording
        mine = recording.measured()
        recording.close([mine] if rank is None or is_dry_run() else tell_all(mine))
        if recording.steps:
            self._measured = recording
        if not rank or is_dry_run():
            write_recording(path, recording)


def input_value(graph: Graph, name: str, where: str) -> Value:
    """The graph value of an argument or a target.

    Raises:
        Error: no input has this name.
    """
    given = (*graph.of_kind(InputKind.ARGUMENT), *graph.of_kind(InputKind.TARGET))
    known = {inp.name: inp.value for inp in given}
    if name not in known:
        raise Error(
            f"there is no input {name!r}",
            where=where,
            expected=f"one of {', '.join(known)}",
            got=name,
            remedy=did_you_mean(name, known),
        )
    return known[name]


def tile_of(graph: Graph, name: str, rank: int, halo: int = 0) -> tuple[slice, ...]:
    """The slices of a global input that a rank of a planned graph reads, with ``halo`` rows more of every dim that is
    sharded, but the first.

    Raises:
        Error: no input has this name; a halo that is no number of rows; a dim is sharded so that the rank reads several
            ranges of it.
    """
    if not isinstance(halo, int) or halo < 0:
        raise Error("a halo is a number of rows", where=f"pm.tile({name!r}, halo=...)", expected="0 or more", got=halo)
    value, mesh = input_value(graph, name, f"pm.tile({name!r})"), graph.mesh
    coords = mesh.coords(rank)
    assert value.spec is not None
    found = []
    for dim, (size, sharding) in enumerate(zip(value.shape, value.spec.dims, strict=True)):
        if is_strided(sharding) or any(mesh[axis].loop for axis in sharding.axes):
            raise Error(
                f"a rank reads several segments of dim {dim}",
                where=f"pm.tile({name!r})",
                expected="each dim split into one segment for each rank",
                got=value.spec.text(value.shape),
                remedy="give the global input to pm(...), which shards it",
            )
        start, length = sharding.span(size, mesh, coords)
        more = halo if dim and sharding.axes else 0
        found.append(slice(max(start - more, 0), min(start + length + more, size)))
    return tuple(found)
