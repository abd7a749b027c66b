"""Make a schedule: one that is known by its name, or ``auto``, the one with the shortest step under given costs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shardfx.ir.errors import Error
from shardfx.ir.schedule.actions import Schedule
from shardfx.ir.schedule.simulation import COSTS, Costs, ScheduleReport, check_costs, check_number, check_schedule

from .known_schedules import SCHEDULES, PipelineSize, ScheduleMaker
from .list_schedule import list_schedule

AUTO = "auto"


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
        max_in_flight: how many micro-batches may be in flight on a rank, each counted for each of its stages; None: any
            number.
        homes: the rank of each stage, where that is settled; None: as the schedule likes. For ``auto`` alone.

    Raises:
        Error: there is no such schedule; a number is none from 1; stages are no multiple of ranks, or another one than
            the schedule is for; there are fewer micro-batches than it needs; a cost is of an unknown kind or is
            missing; more micro-batches are live than may be.
    """
    if not isinstance(name, str) or name not in (*SCHEDULES, AUTO):
        known = ", ".join((*SCHEDULES, AUTO))
        raise Error(
            f"no schedule is called {name!r}",
            where="name",
            expected=f"one of {known}",
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


ANY = ScheduleMaker(lambda of, rank: (), most=None)
"""What ``auto`` takes: pipelines of any kind."""


def _pipeline(name: str, maker: ScheduleMaker, stages: int, microbatches: int, ranks: int) -> PipelineSize:
    """The pipeline of these numbers, if the schedule is for it."""
    chunks, rest = divmod(stages, ranks)
    others = [other for other, each in SCHEDULES.items() if other != name and not rest and each.takes(chunks)]
    or_others = f", or {' or '.join(others)}" if others else ""
    where = f"make_schedule({name!r}, ...)"
    if rest or not maker.takes(chunks):
        wanted = f"{maker.fewest}" if maker.fewest == maker.most else f"{maker.fewest} or more"
        raise Error(
            f"{name} has {wanted} stage{'s' * (wanted != '1')} on each rank",
            where=where,
            expected=f"stages = {wanted} x ranks",
            got=f"stages={stages}, ranks={ranks}",
            remedy=f"take {min(max(chunks, maker.fewest), maker.most or chunks + 1) * ranks} stages{or_others}",
        )
    least = maker.microbatches(ranks)
    if microbatches < least:
        raise Error(
            f"{name} needs more micro-batches",
            where=where,
            expected=f"at least {least} micro-batches on {ranks} ranks",
            got=f"microbatches={microbatches}",
            remedy=f"take {least} microbatches{or_others}",
        )
    return PipelineSize(ranks, chunks, microbatches)


def check_live(name: str, report: ScheduleReport, most: int) -> None:
    """See that no more micro-batches are live on a rank than may be.

    Raises:
        Error: more are, naming where.
    """
    peak = max(report.peaks)
    if peak > most:
        rank = report.peaks.index(peak)
        index = report.live[rank].index(peak)
        raise Error(
            f"{name} has more micro-batches live than may be",
            where=report.schedule.where(rank, index),
            expected=f"max_in_flight={most} micro-batches on a rank at most",
            got=f"{peak} microbatches",
            remedy=f"take max_in_flight={peak}, or schedule 'auto'",
        )


def _shortest(of: PipelineSize, costs: Costs, most: int, homes: Sequence[int] | None) -> Schedule:
    """The schedule with the shortest step of those that have no more micro-batches live."""
    if most < of.chunks:
        raise Error(
            "no schedule has so few micro-batches live",
            where="make_schedule('auto', ...)",
            expected=f"max_in_flight={of.chunks} or more: one for each stage of a rank",
            got=f"max_in_flight={most}",
            remedy=f"say max_in_flight={of.chunks}, or take fewer stages on a rank",
        )
    if not _halves(costs) and "B" not in costs:
        raise Error(
            "there are no costs of a backward",
            where="costs",
            expected="a cost of B, or of I and W",
            got=dict(costs),
            remedy='add them: costs={"F": 1, "B": 2, "I": 1, "W": 1}',
        )
    stages = of.ranks * of.chunks
    reports = [
        check_schedule(each, stages=stages, microbatches=of.microbatches, costs=costs)
        for each in _candidates(of, costs, most, homes)
        if homes is None or [*map(each.rank_of, each.stages)] == [*homes]
    ]
    return min((each for each in reports if max(each.peaks) <= most), key=lambda each: each.step).schedule


def _candidates(of: PipelineSize, costs: Costs, most: int, homes: Sequence[int] | None) -> Iterator[Schedule]:
    """Known schedules of which all kinds have costs, and what the list scheduler makes."""
    for maker in SCHEDULES.values():
        if maker.takes(of.chunks) and of.microbatches >= maker.microbatches(of.ranks):
            schedule = of.schedule(maker.row)
            if {action.kind for action in schedule} <= {*costs}:
                yield schedule
    whole, halves = ("BF",) * ("B" in costs), ("IFW", "IWF") * _halves(costs)
    ways = [[stages_of(rank) for rank in range(of.ranks)] for stages_of in (of.loop, of.fold)[: 1 + (of.chunks == 2)]]
    if homes is not None:
        ways = [[tuple(stage for stage, home in enumerate(homes) if home == rank) for rank in range(of.ranks)]]
    for stages_of_ranks in ways:
        for kinds in (*whole, *halves):
            yield list_schedule(stages_of_ranks, of.microbatches, costs, [most] * of.ranks, kinds)


def _halves(costs: Costs) -> bool:
    return "I" in costs and "W" in costs
