"""Schedules made from costs: the list scheduler, and ``auto``."""

from __future__ import annotations

import random

import pytest

import shardfx as sx
from shardfx.ir.schedule import COSTS
from shardfx.passes.stages import SCHEDULES, list_schedule


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("microbatches", [1, 6, 11])
def test_known_schedules_are_bounds_on_live_iterations(ranks: int, microbatches: int) -> None:
    homes, known = [(rank,) for rank in range(ranks)], {"stages": ranks, "microbatches": microbatches}
    ahead = [ranks - rank for rank in range(ranks)]
    assert list_schedule(homes, microbatches, COSTS, ahead, "BF") == sx.schedules.make_schedule("1f1b", **known)
    if microbatches >= 2 * ranks - 1:
        deep = list_schedule(homes, microbatches, COSTS, [2 * ranks - 1] * ranks)
        handmade = sx.schedules.make_schedule("zb-h2", **known)
        assert sx.schedules.simulate(deep).step == sx.schedules.simulate(handmade).step


@pytest.mark.long
def test_what_the_list_scheduler_makes_keeps_to_its_bound_and_is_no_deadlock() -> None:
    for seed in range(120):
        draw = random.Random(seed)
        ranks, chunks, microbatches = draw.randint(1, 4), draw.randint(1, 3), draw.randint(1, 6)
        order = [*range(ranks * chunks)]
        draw.shuffle(order)  # ranks may have any stages
        homes = [tuple(sorted(order[rank::ranks])) for rank in range(ranks)]
        costs = {kind: [draw.choice([0, 0.5, 1, 2.5]) for _ in order] for kind in "FBIW"}
        live = [draw.randint(chunks, chunks + 4) for _ in range(ranks)]
        schedule = list_schedule(homes, microbatches, costs, live, draw.choice(["BF", "FB", "IFW", "WIF", "FIW"]))
        report = sx.schedules.check_schedule(schedule, stages=len(order), microbatches=microbatches, costs=costs)
        assert all(peak <= most for peak, most in zip(report.peaks, live, strict=True)), f"seed {seed}"


@pytest.mark.long
def test_auto_is_never_longer_than_a_known_schedule() -> None:
    shorter = 0
    for seed in range(30):
        draw = random.Random(seed)
        ranks, chunks, microbatches = draw.randint(2, 4), draw.randint(1, 2), draw.randint(2, 9)
        stages, live = ranks * chunks, draw.choice([None, ranks * chunks])
        costs = {kind: [draw.choice([1, 1.5, 2]) for _ in range(stages)] for kind in "FIW"}
        costs["B"] = [i + w for i, w in zip(costs["I"], costs["W"], strict=True)]
        numbers = {"stages": stages, "ranks": ranks, "microbatches": microbatches}
        step = sx.schedules.simulate(
            sx.schedules.make_schedule("auto", **numbers, costs=costs, max_in_flight=live), costs
        ).step
        known = []
        for name, maker in SCHEDULES.items():
            if maker.takes(chunks) and microbatches >= maker.microbatches(ranks):
                report = sx.schedules.check_schedule(
                    sx.schedules.make_schedule(name, **numbers), stages=stages, microbatches=microbatches, costs=costs
                )
                known += [report.step] * (live is None or max(report.peaks) <= live)
        assert step <= min(known, default=step)
        shorter += step < min(known, default=step)
    assert shorter > 5


def test_auto_looks_at_what_costs_there_are() -> None:
    numbers = {"stages": 4, "microbatches": 8}
    assert {action.kind for action in sx.schedules.make_schedule("auto", **numbers, costs={"F": 1, "B": 2})} == {
        "F",
        "B",
    }
    assert {action.kind for action in sx.schedules.make_schedule("auto", **numbers)} == {"F", "I", "W"}
    few = sx.schedules.make_schedule("auto", **numbers, max_in_flight=2)
    assert sx.schedules.check_schedule(few, **numbers).peaks == (2, 2, 2, 2)


def test_auto_keeps_stages_where_they_are() -> None:
    """What another call signature is planned for finds weights where the first stores them."""
    for homes in ((0, 1, 2, 2, 1, 0), (0, 1, 2, 0, 1, 2), (2, 0, 1, 1, 0, 2)):
        made = sx.schedules.make_schedule("auto", stages=6, microbatches=4, ranks=3, homes=homes)
        assert tuple(map(made.rank_of, made.stages)) == homes
        sx.schedules.check_schedule(made, stages=6, microbatches=4)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"name": "1f1b", "stages": 4, "max_in_flight": 3}, "in flight than may be\n  where:    rank 0, action 3"),
        ({"name": "1f1b", "stages": 4, "max_in_flight": 0}, "this is no number of micro-batches in flight"),
        (
            {"name": "auto", "stages": 8, "ranks": 4, "max_in_flight": 1},
            "no schedule has so few micro-batches in flight",
        ),
        ({"name": "auto", "stages": 4, "costs": {"F": 1, "W": 1}}, "there are no costs of a backward"),
        ({"name": "auto", "stages": 4, "costs": {"B": 1}}, "a number for F (forward), which the schedule has"),
        ({"name": "auto", "stages": 4, "costs": {"F": (1, 2), "B": 1}}, "a number, or 4 of them"),
        ({"name": "auto", "stages": 4, "ranks": 3}, "auto has 1 or more stages on each rank"),
    ],
)
def test_mistakes_are_errors(options: dict[str, object], words: str) -> None:
    with pytest.raises(sx.Error) as error:
        sx.schedules.make_schedule(**{"microbatches": 8, **options})  # type: ignore[arg-type]
    assert words in str(error.value), error.value
