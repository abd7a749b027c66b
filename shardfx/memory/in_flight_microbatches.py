"""``Pipeline(schedule="auto")`` under a budget: the fastest schedule whose live iterations fit into what a rank may
hold.

What a rank holds at each moment is replayed from its program: parameters, gradients and states of its stages, what each
live iteration keeps, and what an iteration makes in passing. The more iterations may be live, the shorter is the step,
and the more is held; the greatest number that fits is sought by halves.
"""

from __future__ import annotations

from dataclasses import replace

from shardfx.compile import default_passes, plan_graph
from shardfx.compiled import Compiled
from shardfx.ir.errors import Error
from shardfx.ir.schedule import check_schedule
from shardfx.ir.text.printer import size_text
from shardfx.passes.loops.make_schedule import AUTO

from .budget import Foresight, budget_of


def scheduled(compiled: Compiled, foresight: Foresight) -> Compiled:
    """The plan whose schedule keeps as many iterations live as fit; itself, where nothing is to be chosen, or all fit.

    Raises:
        Error: one iteration at a time is too much already.
    """
    pipeline, planned, budget = compiled.hints.pipeline, compiled.after.pipeline, budget_of(compiled.hints)
    if pipeline is None or planned is None or pipeline.schedule != AUTO or pipeline.max_in_flight or budget is None:
        return compiled
    fastest = foresight.of(compiled)
    if fastest.peak <= budget:
        return compiled
    stages, iterations = len(planned.homes), len(planned.schedule.microbatches)
    few = pipeline.stages_per_rank
    many = max(check_schedule(planned.schedule, stages=stages, microbatches=iterations).peaks)
    best: tuple[Compiled, int] | None = None
    least, low, high = fastest.peak, few, many - 1
    while low <= high:
        live = (low + high) // 2
        plan = _with_live(compiled, live)
        peak = foresight.of(plan).peak
        least = min(least, peak)
        if peak <= budget:
            best, low = (plan, peak), live + 1
        else:
            high = live - 1
    if best is None:
        raise Error(
            "no schedule fits into what a rank may hold",
            where="Pipeline(schedule='auto')",
            expected=f"at most {size_text(budget)}",
            got=f"{size_text(least)} at least, on rank {fastest.rank}, however few iterations are live",
            remedy="more ranks along the axis of stages, more iterations, Hints(recompute=...), or Hints(zero=...)",
        )
    plan, peak = best
    plan.after.notes.append(
        f"schedule: at most {low - 1} iterations live on a rank, which holds {size_text(peak)}, for it may hold "
        f"{size_text(budget)} (the fastest has {many} live: {size_text(fastest.peak)})"
    )
    return plan


def _with_live(compiled: Compiled, live: int) -> Compiled:
    """The same plan with so many iterations live at most."""
    assert compiled.hints.pipeline is not None
    hints = replace(compiled.hints, pipeline=replace(compiled.hints.pipeline, max_in_flight=live))
    passes = default_passes(hints)
    graph, context = plan_graph(compiled.captured, hints, compiled.context.rules, passes)
    return Compiled(hints, compiled.captured, graph, context, passes)
