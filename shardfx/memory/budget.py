"""Memory budget of a rank: the choices that it decides, and whether the plan fits.

Two of them are made here: with ``Hints(reduce="auto")`` whether gradients of micro-batches are reduced once or in each
iteration, and with ``Pipeline(schedule="auto")`` how many micro-batches are in flight (by bisection).
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import replace
from functools import cache

from shardfx.compile import Compiled
from shardfx.ir.errors import Error
from shardfx.ir.graph import Graph, OutputKind
from shardfx.ir.ops import comm
from shardfx.ir.program.loops.loop_nest import loop_axes
from shardfx.ir.schedule import check_schedule
from shardfx.ir.text.printer import size_text
from shardfx.memory.candidates import Candidate, MemoryPredictor, PlanSearch, what_fits
from shardfx.memory.recompute_search import fitting_recompute
from shardfx.memory.stage_split import fitting_stages
from shardfx.module.execution_target import ExecutionTarget
from shardfx.passes.stages.make_schedule import AUTO

MOST = 5


def within_budget(compiled: Compiled, place: ExecutionTarget) -> Compiled:
    """The plan with what its hints leave open chosen so that it fits into the memory budget.

    Raises:
        Error: nothing fits.
    """
    predictor = MemoryPredictor(place)
    for choose in (fastest_reduction, fitting_stages, fitting_recompute, fitting_schedule):
        compiled = choose(PlanSearch(compiled, predictor))
    check_budget(PlanSearch(compiled, predictor))
    return compiled


def check_budget(search: PlanSearch) -> None:
    """Raise where a plan needs more memory than ``Hints(memory=...)`` allows.

    Raises:
        Error: by how much, what holds it, and which hints would make it fit.
    """
    if search.hints.memory is None or search.fits(search.initial):
        return
    memory = search.initial.memory
    largest = ", ".join(f"{size_text(nbytes)} {name}" for name, nbytes in list(memory.by_category.items())[:MOST])
    stored = next((stored for stored in memory.at_peak if stored.where.module), None)
    stages = stages_of(search.compiled.after, memory.rank)
    raise Error(
        f"a rank holds {size_text(memory.peak - search.budget)} more than Hints(memory={search.hints.memory!r}) allows",
        where="; ".join(filter(None, [stages, f"the largest at the peak: {stored}" if stored is not None else ""])),
        expected=f"at most {size_text(search.budget)}",
        got=f"{size_text(memory.peak)}: {largest}",
        remedy=what_fits(search),
    )


def stages_of(graph: Graph, rank: int) -> str:
    """The stages of a rank, in words; empty where there are none."""
    if graph.pipeline is None:
        return ""
    here = graph.mesh.coords(rank)[graph.pipeline.axis]
    mine = [str(stage) for stage, home in enumerate(graph.pipeline.homes) if home == here]
    return f"rank {rank}, of stage{'s' * (len(mine) > 1)} {', '.join(mine)}"


WAYS = {"last": "once, behind the last iteration", "each": "in each iteration"}


def fastest_reduction(search: PlanSearch) -> Compiled:
    """The plan in which gradients of iterations are reduced when that is cheapest; itself, where nothing is to be
    chosen."""
    hints, compiled, budget = search.hints, search.compiled, search.budget
    has_choice = hints.reduce == "auto" and hints.zero and loop_axes(compiled.after.mesh) and compiled.has_gradients
    if not has_choice or not budget:
        return compiled
    # the faster of those that fit; where none does, the one that holds less
    ways = [search.plan(reduce=way) for way in WAYS]
    best, other = sorted(ways, key=lambda made: (max(made.peak - budget, 0), made.seconds))
    said, of_other = (
        f"{WAYS[made.changed['reduce']]}: {made.seconds * 1e3:.3g} ms a step, {size_text(made.peak)}"
        for made in (best, other)
    )
    fits = "which is faster" if search.fits(other) else f"for a rank may hold {size_text(budget)}"
    why = f"gradients of iterations are reduced {said}; {fits} ({of_other})"
    graph = best.plan.after
    graph.notes.append(why)
    gradients = {output.value for output in graph.outputs if output.kind is OutputKind.GRADIENT}
    for node in reversed(graph.nodes):
        if node.op in (comm.all_reduce, comm.reduce_scatter) and gradients & set(node.outs):
            gradients.update(node.operands)
            node.why = f"{node.why}; {why}" if node.why else why
    return best.plan


def fitting_schedule(search: PlanSearch) -> Compiled:
    """The plan whose schedule keeps as many iterations live as fit; itself, where nothing is to be chosen, or all fit.

    Raises:
        Error: one iteration at a time is too much already.
    """
    pipeline, planned, budget = search.hints.pipeline, search.compiled.after.pipeline, search.budget
    if pipeline is None or planned is None or pipeline.schedule != AUTO or pipeline.max_in_flight or not budget:
        return search.compiled
    fastest = search.initial
    if search.fits(fastest):
        return search.compiled
    stages, iterations = len(planned.homes), len(planned.schedule.microbatches)
    most = max(check_schedule(planned.schedule, stages=stages, microbatches=iterations).peaks)
    counts = range(pipeline.stages_per_rank, most)

    @cache
    def of(count: int) -> Candidate:
        return search.plan(pipeline=replace(pipeline, max_in_flight=count))

    fitting = bisect_right(counts, budget, key=lambda count: of(count).peak)
    if not fitting:
        least = min([fastest, *search.tried], key=lambda made: made.peak)
        raise Error(
            "no schedule fits into what a rank may hold",
            where="Pipeline(schedule='auto')",
            expected=f"at most {size_text(budget)}",
            got=f"{size_text(least.peak)} at least, on rank {fastest.memory.rank}, however few iterations are live",
            remedy="more ranks along the axis of stages, more iterations, Hints(recompute=...), or Hints(zero=...)",
        )
    best = of(counts[fitting - 1])
    best.plan.after.notes.append(
        f"schedule: at most {counts[fitting - 1]} iterations live on a rank, which holds {size_text(best.peak)}, for "
        f"it may hold {size_text(budget)} (the fastest has {most} live: {size_text(fastest.peak)})"
    )
    return best.plan
