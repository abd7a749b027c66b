"""Memory budget of a rank: whether a plan fits, what would make it fit, and the choices that a budget decides.

Two of them are made here: with ``Hints(reduce="auto")`` whether gradients of micro-batches are reduced once or in each
iteration, and with ``Pipeline(schedule="auto")`` how many micro-batches are in flight (by bisection).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from shardfx.compile import default_rank_passes, no_collection, offloads, replanned
from shardfx.compiled import Compiled
from shardfx.hints import Hints, bytes_of
from shardfx.ir.cost.fake_calls import FakeCalls
from shardfx.ir.cost.machine import Machine
from shardfx.ir.cost.replay import replay
from shardfx.ir.errors import Error
from shardfx.ir.graph import Graph, OutputKind
from shardfx.ir.ops import comm
from shardfx.ir.program.loops.loop_nest import loop_axes
from shardfx.ir.schedule import check_schedule
from shardfx.ir.text.printer import size_text
from shardfx.memory.rank_memory import RankMemory
from shardfx.module.execution_target import ExecutionTarget
from shardfx.module.programs import program_of, usual_kinds
from shardfx.passes.rank import RankContext
from shardfx.passes.sharding.seeds import data_axes
from shardfx.passes.stages.make_schedule import AUTO

MOST = 5


@dataclass(frozen=True)
class Candidate:
    """A candidate plan, the memory of its rank with the highest peak, and the peak of each place on the stage axis."""

    plan: Compiled
    memory: RankMemory
    peaks: tuple[int, ...]

    @property
    def peak(self) -> int:
        """The highest peak of a rank, in bytes."""
        return self.memory.peak

    @property
    def seconds(self) -> float:
        """The predicted seconds of a step."""
        machine = Machine.of(self.plan.hints.machine)
        return self.memory.footprint.cost.seconds(machine, self.plan.after.mesh)


class MemoryPredictor:
    """Replays plans of one model on a target: each plan once, and equal calls of several plans once."""

    def __init__(self, place: ExecutionTarget) -> None:
        self.place = place
        self._fakes = FakeCalls()
        self._known: dict[int, Candidate] = {}

    def of(self, compiled: Compiled) -> Candidate:
        """A plan with its memory: of the first rank of each place along the axis of stages."""
        if id(compiled) not in self._known:
            every = [*self._of_stages(compiled)]
            most = max(every, key=lambda memory: memory.peak)
            self._known[id(compiled)] = Candidate(compiled, most, tuple(memory.peak for memory in every))
        return self._known[id(compiled)]

    def under(self, compiled: Compiled, **changed: Any) -> Candidate:
        """The same model, planned with some hints changed."""
        return self.of(replanned(compiled, replace(compiled.hints, **changed)))

    def _of_stages(self, compiled: Compiled) -> Iterator[RankMemory]:
        place = self.place
        passes = default_rank_passes(compiled.hints, place.device.type)
        context = RankContext(compiled.after, place.device.type)
        for rank in first_ranks(compiled.after):
            with no_collection():
                program = program_of(context, rank, usual_kinds(compiled), compiled.context.rules, passes)
                yield RankMemory(program, replay(program, place.transport, self._fakes))


def first_ranks(graph: Graph) -> list[int]:
    """The first rank at each place along the axis of stages; of no stages, the first."""
    axis = graph.pipeline.axis if graph.pipeline is not None else ""
    coords = (graph.mesh.coords(rank) for rank in range(graph.mesh.size))
    return [rank for rank, at in enumerate(coords) if not any(place for name, place in at.items() if name != axis)]


def stages_of(graph: Graph, rank: int) -> str:
    """The stages of a rank, in words; empty where there are none."""
    if graph.pipeline is None:
        return ""
    here = graph.mesh.coords(rank)[graph.pipeline.axis]
    mine = [str(stage) for stage, home in enumerate(graph.pipeline.homes) if home == here]
    return f"rank {rank}, of stage{'s' * (len(mine) > 1)} {', '.join(mine)}"


def budget_of(hints: Hints) -> int | None:
    """The memory budget of a rank in bytes, as far as it is known."""
    if hints.memory is not None:
        return bytes_of(hints.memory)
    return int(Machine.of(hints.machine).memory) if hints.machine is not None else None


def check_budget(compiled: Compiled, predictor: MemoryPredictor) -> None:
    """Raise where a plan needs more memory than ``Hints(memory=...)`` allows.

    Raises:
        Error: by how much, what holds it, and which hints would make it fit.
    """
    hints = compiled.hints
    if hints.memory is None:
        return
    budget, memory = bytes_of(hints.memory), predictor.of(compiled).memory
    if memory.peak <= budget:
        return
    largest = ", ".join(f"{size_text(nbytes)} {name}" for name, nbytes in list(memory.by_category.items())[:MOST])
    stored = next((stored for stored in memory.at_peak if stored.where.module), None)
    stages = stages_of(compiled.after, memory.rank)
    raise Error(
        f"a rank holds {size_text(memory.peak - budget)} more than Hints(memory={hints.memory!r}) allows",
        where="; ".join(filter(None, [stages, f"the largest at the peak: {stored}" if stored is not None else ""])),
        expected=f"at most {size_text(budget)}",
        got=f"{size_text(memory.peak)}: {largest}",
        remedy=what_fits(compiled, predictor, budget),
    )


def what_fits(compiled: Compiled, predictor: MemoryPredictor, budget: int) -> str:
    """The first of the features that make a plan fit; or what the best of them comes to."""
    tried: dict[str, int] = {}
    for more in _features(compiled):
        said = "Hints(" + ", ".join(f"{name}={value!r}" for name, value in more.items()) + ")"
        tried[said] = predictor.under(compiled, **more).peak
        if tried[said] <= budget:
            return f"{said} holds {size_text(tried[said])}"
    if not tried:
        return "shard parameters or the batch over more ranks"
    best = min(tried, key=tried.__getitem__)
    return f"shard parameters or the batch over more ranks; {best} needs {size_text(tried[best])}, which is too much"


def _features(compiled: Compiled) -> Iterator[dict[str, Any]]:
    """The memory features that may be added to the hints, the cheapest first."""
    hints, graph = compiled.hints, compiled.before
    if not any(output.kind is OutputKind.GRADIENT for output in graph.outputs):
        return
    data = data_axes(compiled.after)
    axes = tuple(axis.name for axis in graph.mesh.axes if axis.name in data and not axis.loop)
    stored: list[dict[str, Any]] = [{}]
    if axes and not hints.zero:
        axis: dict[str, Any] = {} if axes == ("dp",) else {"zero_axis": axes if len(axes) > 1 else axes[0]}
        stored += [{"zero": level, **axis} for level in (1, 3)]
    again: list[dict[str, Any]] = [{}]
    if hints.recompute in (None, "auto"):
        again += [{"recompute": pattern} for pattern in repeated_modules(compiled)]
    yield from ({**less, **more} for less in stored for more in again if less or more)
    there = {what for each in offloads(hints) for what in each.whats}
    lacking = [what for what in ("optimizer", "activations", "parameters") if what not in there]
    if compiled.captured.update is None and "optimizer" in lacking:
        lacking.remove("optimizer")
    waits = [what for what in lacking if what != "parameters"]
    for away in dict.fromkeys(tuple(words) for words in (waits, lacking) if words):  # parameters travel most often
        offload = {"offload": (*hints.offload, *away)}
        yield offload
        yield {**stored[-1], **again[-1], **offload}


def repeated_modules(compiled: Compiled) -> list[str]:
    """The pattern of the modules that stand in the longest list, such as ``layers.*``, if there is one."""
    found: dict[str, set[str]] = {}
    for node in compiled.before.nodes:
        match = re.match(r"(.*?)\.?(?<![^.])(\d+)(?=\.|$)", node.where.module)
        if match is not None and match[1]:
            found.setdefault(f"{match[1]}.*", set()).add(match[2])
    lists = [pattern for pattern, numbers in found.items() if len(numbers) > 1]
    return sorted(lists, key=lambda pattern: -len(found[pattern]))[:1]


WAYS = {"last": "once, behind the last iteration", "each": "in each iteration"}


def with_fastest_reduction(compiled: Compiled, predictor: MemoryPredictor) -> Compiled:
    """The plan in which gradients of iterations are reduced when that is cheapest; itself, where nothing is to be
    chosen."""
    hints, mesh = compiled.hints, compiled.after.mesh
    budget = budget_of(hints)
    asked = hints.reduce == "auto"
    if not asked or not loop_axes(mesh) or not hints.zero or not compiled.has_gradients or budget is None:
        return compiled
    made = {way: predictor.under(compiled, reduce=way) for way in WAYS}
    said = {
        way: f"{WAYS[way]}: {each.seconds * 1e3:.3g} ms a step, {size_text(each.peak)}" for way, each in made.items()
    }
    # the faster of those that fit; where none does, the one that holds less
    way = min(made, key=lambda way: (max(made[way].peak - budget, 0), made[way].seconds))
    best, (other,) = made[way], made.keys() - {way}
    fits = "which is faster" if made[other].peak <= budget else f"for a rank may hold {size_text(budget)}"
    why = f"gradients of iterations are reduced {said[way]}; {fits} ({said[other]})"
    graph = best.plan.after
    graph.notes.append(why)
    gradients = {output.value for output in graph.outputs if output.kind is OutputKind.GRADIENT}
    for node in reversed(graph.nodes):
        if node.op in (comm.all_reduce, comm.reduce_scatter) and gradients & set(node.outs):
            gradients.update(node.operands)
            node.why = f"{node.why}; {why}" if node.why else why
    return best.plan


def with_fitting_schedule(compiled: Compiled, predictor: MemoryPredictor) -> Compiled:
    """The plan whose schedule keeps as many iterations live as fit; itself, where nothing is to be chosen, or all fit.

    Raises:
        Error: one iteration at a time is too much already.
    """
    pipeline, planned, budget = compiled.hints.pipeline, compiled.after.pipeline, budget_of(compiled.hints)
    if pipeline is None or planned is None or pipeline.schedule != AUTO or pipeline.max_in_flight or budget is None:
        return compiled
    fastest = predictor.of(compiled)
    if fastest.peak <= budget:
        return compiled
    stages, iterations = len(planned.homes), len(planned.schedule.microbatches)
    few = pipeline.stages_per_rank
    many = max(check_schedule(planned.schedule, stages=stages, microbatches=iterations).peaks)
    best: Candidate | None = None
    least, low, high = fastest.peak, few, many - 1
    while low <= high:
        live = (low + high) // 2
        made = predictor.under(compiled, pipeline=replace(pipeline, max_in_flight=live))
        least = min(least, made.peak)
        best, low, high = (made, live + 1, high) if made.peak <= budget else (best, low, live - 1)
    if best is None:
        raise Error(
            "no schedule fits into what a rank may hold",
            where="Pipeline(schedule='auto')",
            expected=f"at most {size_text(budget)}",
            got=f"{size_text(least)} at least, on rank {fastest.memory.rank}, however few iterations are live",
            remedy="more ranks along the axis of stages, more iterations, Hints(recompute=...), or Hints(zero=...)",
        )
    best.plan.after.notes.append(
        f"schedule: at most {low - 1} iterations live on a rank, which holds {size_text(best.peak)}, for it may hold "
        f"{size_text(budget)} (the fastest has {many} live: {size_text(fastest.peak)})"
    )
    return best.plan
