"""Schedule construction: a schedule known by name, or ``auto``, the one with the shortest step under given costs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from shardfx.ir.errors import Error
from shardfx.ir.schedule.actions import Action, Schedule
from shardfx.ir.schedule.simulation import (
    COSTS,
    KEEPS,
    Costs,
    ScheduleReport,
    check_costs,
    check_number,
    check_schedule,
    cost_table,
    needs,
)

from .known_schedules import SCHEDULES, PipelineSize, ScheduleMaker

AUTO = "auto"
ANY = ScheduleMaker(lambda of, rank: (), most=None)
"""The pipelines that ``auto`` supports: all."""


def make_schedule(
    name: str,
    *,
    stages: int,
    microbatches: int,
    ranks: int | None = None,
    costs: Costs = COSTS,
    max_in_flight: int | None = None,
    homes: Sequence[int] | None = None,
) -> Schedule:
    """A schedule for so many stages, micro-batches and ranks.

    Args:
        name: ``gpipe``, ``1f1b``, ``interleaved``, ``breadth-first``, ``zb-h1``, ``zb-h2``, ``zb-v``, ``dualpipev``; or
            ``auto``: of those, and of what a list scheduler makes from the costs, the one with the shortest step.
        stages: how many there are, on all ranks together.
        microbatches: how many micro-batches there are.
        ranks: how many there are; None: as many as there are stages, or half of them where each rank must have two.
        costs: how long an action takes, by kind: a number for all stages, or one for each. For ``auto`` alone.
        max_in_flight: the maximum number of in-flight micro-batches of a rank, counted for each stage; None: no limit.
        homes: the rank of each stage, if fixed; None: as the schedule chooses. For ``auto`` alone.

    Raises:
        Error: the name is unknown; a number is not positive; the number of stages is no multiple of ranks, or does not
            suit the schedule; there are too few micro-batches; a cost has an unknown kind or is missing; more
            micro-batches are in flight than allowed.
    """
    if not isinstance(name, str) or name not in (*SCHEDULES, AUTO):
        raise Error(
            f"no schedule is called {name!r}",
            where="name",
            expected=f"one of {', '.join((*SCHEDULES, AUTO))}",
            got=repr(name),
            remedy="take one of these, write a text (a row for each rank: F0.0 B0.0), or a function that makes one",
        )
    check_number("stages", stages)
    check_number("microbatches", microbatches)
    for what, number in (("ranks", ranks), ("max_in_flight", max_in_flight)):
        if number is not None:
            check_number(what, number)
    check_costs(costs)
    maker = ANY if name == AUTO else SCHEDULES[name]
    of = _pipeline(name, maker, stages, microbatches, ranks or max(stages // maker.fewest, 1))
    if name == AUTO:
        return _shortest(of, costs, of.microbatches * of.chunks if max_in_flight is None else max_in_flight, homes)
    schedule = of.schedule(maker.row)
    if max_in_flight is not None:
        check_live(name, check_schedule(schedule, stages=stages, microbatches=microbatches), max_in_flight)
    return schedule


def _pipeline(name: str, maker: ScheduleMaker, stages: int, microbatches: int, ranks: int) -> PipelineSize:
    """The pipeline size, if the schedule supports it."""
    chunks, rest = divmod(stages, ranks)
    others = [other for other, each in SCHEDULES.items() if other != name and not rest and each.takes(chunks)]
    or_others = f", or {' or '.join(others)}" if others else ""
    where, least = f"make_schedule({name!r}, ...)", maker.microbatches(ranks)
    if rest or not maker.takes(chunks):
        wanted = f"{maker.fewest}" if maker.fewest == maker.most else f"{maker.fewest} or more"
        raise Error(
            f"{name} has {wanted} stage{'s' * (wanted != '1')} on each rank",
            where=where,
            expected=f"stages = {wanted} x ranks",
            got=f"stages={stages}, ranks={ranks}",
            remedy=f"take {min(max(chunks, maker.fewest), maker.most or chunks + 1) * ranks} stages{or_others}",
        )
    if microbatches < least:
        what, expected = f"{name} needs more micro-batches", f"at least {least} on {ranks} ranks"
        raise Error(
            what,
            where=where,
            expected=expected,
            got=f"microbatches={microbatches}",
            remedy=f"take {least} of them{or_others}",
        )
    return PipelineSize(ranks, chunks, microbatches)


def check_live(name: str, report: ScheduleReport, most: int) -> None:
    """Check the number of in-flight micro-batches on each rank.

    Raises:
        Error: more are, naming where.
    """
    peak = max(report.peaks)
    if peak > most:
        rank = report.peaks.index(peak)
        raise Error(
            f"{name} has more micro-batches in flight than may be",
            where=report.schedule.where(rank, report.live[rank].index(peak)),
            expected=f"max_in_flight={most} on a rank at most",
            got=peak,
            remedy=f"take max_in_flight={peak}, or schedule 'auto'",
        )


def _shortest(of: PipelineSize, costs: Costs, most: int, homes: Sequence[int] | None) -> Schedule:
    """The schedule with the shortest step among those within the limit of in-flight micro-batches."""
    if most < of.chunks:
        raise Error(
            "no schedule has so few micro-batches in flight",
            where="make_schedule('auto', ...)",
            expected=f"max_in_flight={of.chunks} or more: one for each stage of a rank",
            got=f"max_in_flight={most}",
            remedy=f"say max_in_flight={of.chunks}, or take fewer stages on a rank",
        )
    if not _has_halves(costs) and "B" not in costs:
        what, expected = "there are no costs of a backward", "a cost of B, or of I and W"
        remedy = 'add them: costs={"F": 1, "B": 2, "I": 1, "W": 1}'
        raise Error(what, where="costs", expected=expected, got=dict(costs), remedy=remedy)
    reports = [
        check_schedule(each, stages=of.ranks * of.chunks, microbatches=of.microbatches, costs=costs)
        for each in _candidates(of, costs, most, homes)
        if homes is None or [*map(each.rank_of, each.stages)] == [*homes]
    ]
    return min((each for each in reports if max(each.peaks) <= most), key=lambda each: each.step).schedule


def _candidates(of: PipelineSize, costs: Costs, most: int, homes: Sequence[int] | None) -> Iterator[Schedule]:
    """Known schedules whose kinds all have costs, and list schedules."""
    for maker in SCHEDULES.values():
        if maker.takes(of.chunks) and of.microbatches >= maker.microbatches(of.ranks):
            schedule = of.schedule(maker.row)
            if {action.kind for action in schedule} <= {*costs}:
                yield schedule
    full, halves = ("BF",) * ("B" in costs), ("IFW", "IWF") * _has_halves(costs)
    ways = [[stages_of(rank) for rank in range(of.ranks)] for stages_of in (of.loop, of.fold)[: 1 + (of.chunks == 2)]]
    if homes is not None:
        ways = [[tuple(stage for stage, home in enumerate(homes) if home == rank) for rank in range(of.ranks)]]
    for stages_of_ranks in ways:
        for kinds in (*full, *halves):
            yield list_schedule(stages_of_ranks, of.microbatches, costs, [most] * of.ranks, kinds)


def _has_halves(costs: Costs) -> bool:
    return "I" in costs and "W" in costs


def list_schedule(
    stages_of: Sequence[Sequence[int]], microbatches: int, costs: Costs, live: Sequence[int], kinds: str = "IFW"
) -> Schedule:
    """Let each rank, whenever it is free, begin what can begin first; of several, what comes first in ``kinds``.

    A forward begins only if the rank keeps a place free for each of its later stages: so the last ones can always go
    on, and ranks never wait for one another.

    Args:
        stages_of: the stages of each rank, in order.
        microbatches: how many micro-batches there are.
        costs: how long an action takes, by kind: a number for all stages, or one for each.
        live: for each rank how many micro-batches may be in flight, counted for each stage: at least as many as its
            stages.
        kinds: which kinds there are, what is to be done first standing first: full backwards (``BF``), or halves.
    """
    last, back = sum(map(len, stages_of)) - 1, "I" if "I" in kinds else "B"
    table = cost_table(costs, kinds, last + 1)
    rows: list[list[Action]] = [[] for _ in stages_of]
    kept, ends, begun = [0 for _ in stages_of], dict[Action, float](), Counter[tuple[str, int]]()

    def choices(rank: int) -> Iterator[_Choice]:
        free = ends[rows[rank][-1]] if rows[rank] else 0.0
        for later, stage in enumerate(reversed(stages_of[rank])):
            for order, kind in enumerate(kinds):
                action = Action(kind, stage, begun[kind, stage])
                full = kind == "F" and kept[rank] + later >= live[rank]
                if action.microbatch == microbatches or full:
                    continue
                wanted = needs(action, last, lambda at, microbatch: Action(back, at, microbatch))
                if all(each in ends for each in wanted):
                    yield max(free, *(ends[each] for each in wanted), 0.0), (order, -stage), action

    best = {rank: min(choices(rank), default=None) for rank in range(len(rows))}
    while any(best.values()):
        rank, (start, _, action) = min(((r, each) for r, each in best.items() if each), key=lambda item: item[1][0])
        rows[rank].append(action)
        ends[action] = start + table[action.kind][action.stage]
        begun[action.kind, action.stage] += 1
        kept[rank] += KEEPS[action.kind]
        near = {action.stage - 1, action.stage, action.stage + 1}
        changed = (r for r, mine in enumerate(stages_of) if r == rank or near & {*mine})
        best.update({r: min(choices(r), default=None) for r in changed})
    return Schedule(tuple(map(tuple, rows)))


_Choice = tuple[float, tuple[int, int], Action]
"""A candidate for a rank's next action: its earliest start, its priority, and the action."""
