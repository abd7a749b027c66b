"""Schedules as data: text, completeness, deadlocks, known schedules and their papers' figures."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardfx as sx
from shardfx.ir.schedule.dependencies import dependencies
from shardfx.passes.stages import SCHEDULES

SMALL = """
F0.0 F0.1 B0.0 B0.1
F1.0 B1.0 F1.1 B1.1
"""
ACTIONS = st.builds(sx.schedules.Action, st.sampled_from("FBIW"), st.integers(0, 20), st.integers(0, 300)) | st.builds(
    sx.schedules.Action, st.just("U"), st.integers(0, 20), st.just(0)
)


def checked(name: str, ranks: int, microbatches: int, chunks: int | None = None) -> sx.schedules.ScheduleReport:
    stages = ranks * (chunks or SCHEDULES[name].fewest)
    schedule = sx.schedules.make_schedule(name, stages=stages, microbatches=microbatches, ranks=ranks)
    return sx.schedules.check_schedule(schedule, stages=stages, microbatches=microbatches)


def drawn(seed: int) -> tuple[sx.schedules.Schedule, int, int]:
    """A random known schedule, with its stages and micro-batches."""
    draw = random.Random(seed)
    name, ranks = draw.choice([*SCHEDULES]), draw.randint(1, 6)
    maker = SCHEDULES[name]
    stages = ranks * draw.randint(maker.fewest, maker.most or 3)
    microbatches = maker.microbatches(ranks) + draw.randint(0, 7)
    return sx.schedules.make_schedule(name, stages=stages, microbatches=microbatches, ranks=ranks), stages, microbatches


@pytest.mark.long
@given(st.lists(st.lists(ACTIONS, min_size=1, max_size=9), min_size=1, max_size=5))
def test_the_text_of_a_schedule_is_that_schedule(rows: list[list[sx.schedules.Action]]) -> None:
    schedule = sx.schedules.Schedule(tuple(map(tuple, rows)))
    assert sx.schedules.Schedule.parse(str(schedule)) == schedule
    assert str(schedule).splitlines() == [" ".join(map(str, row)) for row in rows]


def test_rows_stages_and_iterations() -> None:
    schedule = sx.schedules.Schedule.parse(SMALL).with_updates()
    assert schedule.rows[1] == (("F", 1, 0), ("B", 1, 0), ("F", 1, 1), ("B", 1, 1), ("U", 1, 0))
    assert (schedule.stages, schedule.microbatches, schedule.rank_of(1)) == (range(2), range(2), 1)
    assert str(schedule).splitlines()[0] == "F0.0 F0.1 B0.0 B0.1 U0"
    report = sx.schedules.check_schedule(schedule, stages=2, microbatches=2)
    assert report.live == ((1, 2, 2, 1, 0), (1, 1, 1, 1, 0))
    assert str(report) == "live micro-batches 2, 1 at most on ranks 0 .. 1; step 9, bubble 33.3%"


def test_ranks_have_stages_in_loops_or_folds() -> None:
    loop = sx.schedules.make_schedule("interleaved", stages=6, ranks=3, microbatches=3)
    fold = sx.schedules.make_schedule("zb-v", stages=6, microbatches=3)
    assert [loop.rank_of(stage) for stage in loop.stages] == [0, 1, 2, 0, 1, 2]
    assert [fold.rank_of(stage) for stage in fold.stages] == [0, 1, 2, 2, 1, 0]
    assert fold.stages_of(1) == (1, 4)


@pytest.mark.parametrize("ranks", [1, 2, 4, 5])
@pytest.mark.parametrize("more", [0, 3])
def test_live_iterations_are_those_of_the_papers(ranks: int, more: int) -> None:
    microbatches = 2 * ranks + more
    full: dict[str, Callable[[int], int]] = {
        "gpipe": lambda rank: microbatches,
        "1f1b": lambda rank: ranks - rank,
        "breadth-first": lambda rank: microbatches,
        "zb-h1": lambda rank: ranks,
        "zb-h2": lambda rank: 2 * ranks - 1,
        "zb-v": lambda rank: 2 * ranks,
        "dualpipev": lambda rank: 2 * ranks + 1,
    }
    for name, most in full.items():
        assert checked(name, ranks, microbatches).peaks == tuple(map(most, range(ranks))), name
    assert checked("1f1b", 4, 8).peaks == (4, 3, 2, 1) and checked("gpipe", 4, 8).peaks == (8, 8, 8, 8)
    for chunks in (2, 3):
        most = tuple(2 * (ranks - rank - 1) + (chunks - 1) * ranks + 1 for rank in range(ranks))
        assert checked("interleaved", ranks, 2 * ranks, chunks).peaks == most


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("microbatches", [12, 13, 17])
def test_bubbles_are_those_of_the_papers(ranks: int, microbatches: int) -> None:
    for name in ("gpipe", "1f1b"):
        assert checked(name, ranks, microbatches).bubble == pytest.approx((ranks - 1) / (microbatches + ranks - 1))
    for name in ("interleaved", "breadth-first"):
        for chunks in (2, 3):
            bubble = (ranks - 1) / (chunks * microbatches + ranks - 1)
            assert checked(name, ranks, microbatches, chunks).bubble == pytest.approx(bubble)
    # A forward and each half of a backward take 1; the first rank waits for (ranks - 1) x (F + I - W), and for nothing.
    assert checked("zb-h1", ranks, microbatches).waits == tuple(range(ranks - 1, -1, -1))
    assert checked("zb-h1", ranks, microbatches).bubble == pytest.approx((ranks - 1) / (3 * microbatches + ranks - 1))
    for name, parts in (("zb-h2", 3), ("zb-v", 6)):
        simulation = checked(name, ranks, microbatches)
        assert simulation.period == parts * microbatches and set(simulation.waits) == {0}
    # At most (ranks - 1) x (F & B + B - 3 W): there a forward beside a backward is one thing, here they follow.
    assert max(checked("dualpipev", ranks, microbatches).waits) == ranks - 1 <= (ranks - 1) * (3 + 2 - 3)


@pytest.mark.long
def test_random_schedules_are_complete_and_free_of_deadlocks() -> None:
    for seed in range(500):
        schedule, stages, microbatches = drawn(seed)
        order = sx.schedules.check_schedule(schedule, stages=stages, microbatches=microbatches).order
        assert sorted(order) == sorted(schedule)
        place = {action: i for i, action in enumerate(order)}
        wanted = dependencies(schedule)
        assert all(place[made] < place[action] for action in schedule for made in wanted[action]), f"seed {seed}"


def test_rows_in_random_order_are_deadlocks_or_run() -> None:
    """What is said to be a deadlock is one, and nothing else."""
    counts = {True: 0, False: 0}
    for seed in range(200):
        draw = random.Random(seed)
        schedule = sx.schedules.make_schedule(
            draw.choice(["1f1b", "zb-h1"]), stages=draw.randint(1, 3), microbatches=draw.randint(1, 2)
        )
        rows = [list(row) for row in schedule.rows]
        for row in rows:
            i, j = draw.randrange(len(row)), draw.randrange(len(row))
            row[i], row[j] = row[j], row[i]
        changed = sx.schedules.Schedule(tuple(map(tuple, rows)))
        done, rest = set[str](), [[*map(str, row)] for row in rows]
        while moving := [row for row in rest if row and not waits_for(row[0], len(rows), rest) - done]:
            done.add(moving[0].pop(0))
        try:
            sx.schedules.check_schedule(changed, stages=len(rows), microbatches=len(schedule.microbatches))
            stuck = False
        except sx.Error:
            stuck = True
        assert stuck == any(rest), str(changed)
        counts[stuck] += 1
    assert min(counts.values()) > 20


def waits_for(action: str, stages: int, rows: list[list[str]]) -> set[str]:
    """The dependencies, said once more, of schedules whose backwards are all whole or all in halves."""
    kind, (stage, microbatch) = action[0], map(int, action[1:].split("."))
    if kind == "W":
        return {f"I{stage}.{microbatch}"}
    if kind == "F":
        return {f"F{stage - 1}.{microbatch}"} if stage else set()
    return {f"F{stage}.{microbatch}"} | ({f"{kind}{stage + 1}.{microbatch}"} if stage + 1 < stages else set())


WRONG = {
    "F0.0 F0.1 B0.0\nF1.0 B1.0 F1.1 B1.1": ("B0.1 is missing", "rank 0, the row  F0.0 F0.1 B0.0"),
    "F0.0 B0.0 F0.1 B0.1": ("F1.0 is missing", "no rank has that stage"),
    "F0.0 F0.1 B0.0 B0.1 F1.0 B1.0 F1.1\nB1.1": ("B1.1 stands on another rank", "rank 1, action 0 (B1.1)"),
    "F0.0 F0.1 F0.0 B0.0 B0.1\nF1.0 B1.0 F1.1 B1.1": ("F0.0 stands twice", "rank 0, action 2 (F0.0)"),
    "F0.0 F0.1 B0.0 B0.1\nF1.0 B1.0 F1.1 B1.1 F2.0": ("F2.0 is of a stage or micro-batch", "rank 1, action 4 (F2.0)"),
    "F0.0 F0.2 B0.0 B0.1\nF1.0 B1.0 F1.1 B1.1": ("F0.2 is of a stage or micro-batch", "rank 0, action 1 (F0.2)"),
    "F0.0 F0.1 B0.0 I0.0 W0.0 B0.1\nF1.0 B1.0 F1.1 B1.1": ("whole and in halves: B0.0 and I0.0", "action 3 (I0.0)"),
    "F0.0 F0.1 I0.0 B0.1\nF1.0 B1.0 F1.1 B1.1": ("W0.0 is missing", "add W0.0"),
    "F0.0 F0.1 B0.0 B0.1 U0\nF1.0 B1.0 F1.1 B1.1": ("U1 is missing", "U of each stage, or of none"),
    "F0.0 F0.1 B0.0 U0 B0.1\nF1.0 B1.0 F1.1 B1.1 U1": ("U0 stands before B0.1", "rank 0, action 3 (U0)"),
    "F0.0 B0.0 F0.1 B0.1\nF1.0 F1.1 B1.0 B1.1": (
        "a deadlock: ranks 0, 1 wait for one another",
        "rank 0, action 1 (B0.0) of the row  F0.0 B0.0 F0.1 B0.1  waits for B1.0",
    ),
    "F0.0 F0.1 B0.0 B0.1\nF1.0 B1.0 B1.1 F1.1": ("B1.1 stands before F1.1", "rank 1, action 2 (B1.1)"),
}


@pytest.mark.parametrize("text", WRONG)
def test_wrong_schedules_are_errors_that_name_rank_and_action(text: str) -> None:
    with pytest.raises(sx.Error) as error:
        sx.schedules.check_schedule(sx.schedules.Schedule.parse(text), stages=2, microbatches=2)
    assert all(words in str(error.value) for words in WRONG[text]), error.value
    assert all(f"  {part}:" in str(error.value) for part in ("where", "expected", "got", "remedy")), error.value


def make(name: str = "1f1b", **options: Any) -> sx.schedules.Schedule:
    return sx.schedules.make_schedule(name, **{"stages": 4, "microbatches": 8, **options})


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda: sx.schedules.Schedule.parse("F0.0\nF1.0 G1.0"), "'G1.0' is no action\n  where:    row 1, word 1"),
        (lambda: sx.schedules.Schedule.parse("F0"), "'F0' is no action"),
        (lambda: sx.schedules.Schedule.parse(None), "this is no text of a schedule"),  # type: ignore[arg-type]
        (lambda: sx.schedules.check_schedule(SMALL, stages=2, microbatches=2), "this is no schedule"),  # type: ignore[arg-type]
        (lambda: sx.schedules.Schedule.parse("U0.1"), "'U0.1' is no action"),
        (lambda: sx.schedules.Schedule.parse("\n\n"), "a schedule has a row for each rank"),
        (lambda: sx.schedules.Schedule(((),)), "a schedule has a row for each rank"),
        (lambda: sx.schedules.Schedule((("F0.0",),)), "got:      'F0.0'"),  # type: ignore[arg-type]
        (lambda: sx.schedules.Schedule(((sx.schedules.Action("X", 0),),)), "this is no action\n  where:    row 0"),
        (lambda: sx.schedules.Schedule(((sx.schedules.Action("F", -1),),)), "got:      Action('F', -1, 0)"),
        (lambda: sx.schedules.Schedule(((sx.schedules.Action("U", 0, 1),),)), "this is no action"),
        (lambda: sx.schedules.Schedule.parse("F0.0 B0.0").rank_of(1), "no rank has an action of stage 1"),
        (partial(make, "2f2b"), "no schedule is called '2f2b'"),
        (partial(make, stages=0), "this is no number of stages"),
        (partial(make, microbatches=0), "this is no number of micro-batches"),
        (partial(make, ranks=0), "this is no number of ranks"),
        (partial(make, ranks=3), "1f1b has 1 stage on each rank"),
        (partial(make, ranks=2), "or interleaved or breadth-first or zb-v"),
        (partial(make, "zb-v", stages=12, ranks=4), "take 8 stages, or interleaved or breadth"),
        (partial(make, "interleaved", ranks=4), "take 8 stages, or gpipe or 1f1b"),
        (partial(make, "dualpipev", stages=8, microbatches=7), "dualpipev needs more micro-batches"),
        (partial(make, costs={"G": 1}), "got:      'G'"),
    ],
)
def test_mistakes_are_errors(wrong: Callable[[], object], words: str) -> None:
    with pytest.raises(sx.Error) as error:
        wrong()
    assert words in str(error.value), error.value
    assert all(f"  {part}:" in str(error.value) for part in ("where", "expected", "got", "remedy")), error.value


def test_one_missing_action_of_a_known_schedule_is_named() -> None:
    schedule, stages, microbatches = drawn(7)
    for rank, row in enumerate(schedule.rows):
        for i, action in enumerate(row):
            rows = (*schedule.rows[:rank], (*row[:i], *row[i + 1 :]), *schedule.rows[rank + 1 :])
            with pytest.raises(sx.Error, match=rf"^{action} is missing"):
                sx.schedules.check_schedule(replace(schedule, rows=rows), stages=stages, microbatches=microbatches)
