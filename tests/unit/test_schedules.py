"""Schedules: text, completeness, known ones and their papers' figures, those made from costs; times and pictures."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardfx as sx
from shardfx.cli import main
from shardfx.ir.schedule.simulation import dependencies
from shardfx.passes.stages import SCHEDULES, list_schedule
from shardfx.visualize.schedule_chart import tint

SMALL = """
F0.0 F0.1 B0.0 B0.1
F1.0 B1.0 F1.1 B1.1
"""
TWO = sx.schedules.Schedule.parse(SMALL).with_updates()
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
    schedule = TWO
    assert schedule.rows[1] == (("F", 1, 0), ("B", 1, 0), ("F", 1, 1), ("B", 1, 1), ("U", 1, 0))
    assert (schedule.stages, schedule.microbatches, schedule.rank_of(1)) == (range(2), range(2), 1)
    assert str(schedule).splitlines()[0] == "F0.0 F0.1 B0.0 B0.1 U0"
    report = sx.schedules.check_schedule(schedule, stages=2, microbatches=2)
    assert report.live == ((1, 2, 2, 1, 0), (1, 1, 1, 1, 0))
    assert str(report) == "live micro-batches 2, 1 at most on ranks 0 .. 1; step 9, bubble 33.3%"


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


WRONG = {
    "F0.0 F0.1 B0.0\nF1.0 B1.0 F1.1 B1.1": ("B0.1 is missing", "rank 0, the row  F0.0 F0.1 B0.0"),
    "F0.0 F0.1 B0.0 B0.1 F1.0 B1.0 F1.1\nB1.1": ("B1.1 stands on another rank", "rank 1, action 0 (B1.1)"),
    "F0.0 F0.1 F0.0 B0.0 B0.1\nF1.0 B1.0 F1.1 B1.1": ("F0.0 stands twice", "rank 0, action 2 (F0.0)"),
    "F0.0 F0.1 B0.0 B0.1\nF1.0 B1.0 F1.1 B1.1 F2.0": ("F2.0 is of a stage or micro-batch", "rank 1, action 4 (F2.0)"),
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
        (lambda: sx.schedules.Schedule.parse(None), "this is no text of a schedule"),  # type: ignore[arg-type]
        (lambda: sx.schedules.Schedule.parse("\n\n"), "a schedule has a row for each rank"),
        (lambda: sx.schedules.Schedule(((sx.schedules.Action("X", 0),),)), "this is no action\n  where:    row 0"),
        (lambda: sx.schedules.Schedule.parse("F0.0 B0.0").rank_of(1), "no rank has an action of stage 1"),
        (partial(make, "2f2b"), "no schedule is called '2f2b'"),
        (partial(make, stages=0), "this is no number of stages"),
        (partial(make, ranks=2), "or interleaved or breadth-first or zb-v"),
        (partial(make, "zb-v", stages=12, ranks=4), "take 8 stages, or interleaved or breadth"),
        (partial(make, "dualpipev", stages=8, microbatches=7), "dualpipev needs more micro-batches"),
        (partial(make, costs={"G": 1}), "got:      'G'"),
        (partial(make, max_in_flight=3), "in flight than may be\n  where:    rank 0, action 3"),
        (partial(make, max_in_flight=0), "this is no number of micro-batches in flight"),
        (partial(make, "auto", stages=8, ranks=4, max_in_flight=1), "no schedule has so few micro-batches in flight"),
        (partial(make, "auto", costs={"F": 1, "W": 1}), "there are no costs of a backward"),
        (partial(make, "auto", costs={"F": (1, 2), "B": 1}), "a number, or 4 of them"),
        (lambda: sx.schedules.simulate(TWO, {"F": 1, "B": 2}), "a number for U (update)"),
        (lambda: sx.schedules.simulate(TWO, {"F": 1, "B": float("nan"), "U": 0}), "where:    costs['B']"),
        (lambda: sx.schedules.simulate(TWO, (1, 2)), "expected: a mapping such as"),  # type: ignore[arg-type]
        (lambda: sx.schedules.simulate(TWO, comm=-1), "where:    comm\n  expected: the time of a transfer"),
        (lambda: sx.schedules.simulate(sx.schedules.Schedule.parse("F0.0 B0.0\nF1.0")), "B1.0 is missing"),
    ],
)
def test_mistakes_are_errors(wrong: Callable[[], object], words: str) -> None:
    with pytest.raises(sx.Error) as error:
        wrong()
    assert words in str(error.value), error.value
    assert all(f"  {part}:" in str(error.value) for part in ("where", "expected", "got", "remedy")), error.value


# ---- schedules made from costs


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


def test_auto_keeps_stages_where_they_are() -> None:
    """What another call signature is planned for finds weights where the first stores them."""
    for homes in ((0, 1, 2, 2, 1, 0), (0, 1, 2, 0, 1, 2), (2, 0, 1, 1, 0, 2)):
        made = sx.schedules.make_schedule("auto", stages=6, microbatches=4, ranks=3, homes=homes)
        assert tuple(map(made.rank_of, made.stages)) == homes
        sx.schedules.check_schedule(made, stages=6, microbatches=4)


# ---- simulated: times, the picture, the command

SVG = "{http://www.w3.org/2000/svg}"


def test_times_follow_from_costs_and_transfers() -> None:
    timeline = sx.schedules.simulate(TWO, {"F": (1, 3), "B": 2, "U": 0.5}, comm=0.25)
    spans = {str(action): tuple(span) for action, span in timeline.spans.items()}
    assert spans == {
        "F0.0": (0, 1),
        "F0.1": (1, 2),
        "F1.0": (1.25, 4.25),
        "B1.0": (4.25, 6.25),
        "F1.1": (6.25, 9.25),
        "B1.1": (9.25, 11.25),
        "B0.0": (6.5, 8.5),
        "B0.1": (11.5, 13.5),
        "U0": (13.5, 14),
        "U1": (11.25, 11.75),
    }
    assert timeline.step == 14 and timeline.busy == (6.5, 10.5) and timeline.waits == (7.5, 0)
    assert timeline.bubble == pytest.approx(1 - 17 / 28) and timeline.period == 14
    assert [str(action) for action in timeline.order][:4] == ["F0.0", "F0.1", "F1.0", "B1.0"]


def test_stages_on_one_rank_send_nothing() -> None:
    fold = sx.schedules.make_schedule("zb-v", stages=4, microbatches=1)
    spans = sx.schedules.simulate(fold, comm=10).spans
    assert spans[sx.schedules.Action("F", 2, 0)].start - spans[sx.schedules.Action("F", 1, 0)].end == 0
    assert spans[sx.schedules.Action("F", 1, 0)].start - spans[sx.schedules.Action("F", 0, 0)].end == 10


def test_the_picture_has_each_action_where_it_is(tmp_path: Path) -> None:
    timeline = sx.schedules.simulate(
        sx.schedules.make_schedule("zb-v", stages=4, microbatches=5).with_updates(), {**dict.fromkeys("FIWU", 1)}
    )
    root = ElementTree.parse(timeline.draw(tmp_path / "deep" / "zb-v.svg", "A V")).getroot()
    assert root.findtext(f"{SVG}title") == "A V"
    texts = ["".join(text.itertext()) for text in root.iter(f"{SVG}text")]
    assert {"rank 0", "rank 1", "A V", "forward", "backward for inputs", "update", "bubble"} <= {*texts}
    cells = {title.text.split(":")[0]: group for group in root.iter(f"{SVG}g") if (title := group.find(f"{SVG}title"))
             is not None and title.text and re.match(r"[FBIWU]\d", title.text)}  # fmt: skip
    assert {*cells} == {str(action) for action in timeline.schedule}
    width = {name: rect(group) for name, group in cells.items()}
    unit = width["F0.0"][1]
    for action, span in timeline.spans.items():
        assert width[str(action)][0] - width["F0.0"][0] == pytest.approx(span.start * unit, abs=0.01 * unit)
    fills = {name: group.find(f"{SVG}rect").attrib["fill"] for name, group in cells.items()}  # type: ignore[union-attr]
    assert len({fills[name] for name in ("F0.0", "F3.0", "I0.0", "W0.0", "U0")}) == 5
    assert fills["F0.0"] == fills["F1.0"] != fills["F3.0"] == fills["F2.0"] == tint(fills["F0.0"], 0.62)


def rect(group: ElementTree.Element) -> tuple[float, float]:
    """Where the box of a group begins, and how wide it is."""
    found = group.find(f"{SVG}rect")
    assert found is not None
    return float(found.attrib["x"]), float(found.attrib["width"])


def test_the_command_prints_rows_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = tmp_path / "a.svg", tmp_path / "a.json"
    options = ["--stages", "4", "--microbatches", "8", "--out", str(files[0]), "--trace", str(files[1])]
    assert main(["schedule", "1f1b", *options]) == 0
    out = capsys.readouterr().out
    rows = sx.schedules.make_schedule("1f1b", stages=4, microbatches=8)
    assert out.startswith(f"{rows}\n")
    ranks = re.findall(r"^\d +\d +(\d+) +24 +(\d+)", out, re.MULTILINE)
    assert ranks == [("4", "9"), ("3", "6"), ("2", "3"), ("1", "0")]
    assert "A step takes 33, of which 27.3% is bubble" in out
    assert all(file.stat().st_size for file in files)
    (tmp_path / "rows.txt").write_text(str(rows))
    own = ["--stages", "4", "--microbatches", "8", "--costs", "F=2, B=4.0", "--comm", "0.5"]
    assert main(["schedule", str(tmp_path / "rows.txt"), *own]) == 0
    assert "A step takes 74" in capsys.readouterr().out
    assert main(["schedule", str(tmp_path / "rows.txt"), *own, "--max-in-flight", "3"]) == 2
    assert "no --ranks and no --max-in-flight" in capsys.readouterr().err
    assert main(["schedule", "auto", *own[:4], "--max-in-flight", "3"]) == 0
    assert re.findall(r"^\d +\d +(\d+) +24 ", capsys.readouterr().out, re.MULTILINE) == ["3", "3", "3", "3"]
    assert main(["schedule", "1f1b", "--stages", "4", "--microbatches", "8", "--costs", "F:1"]) == 2
    assert "the costs cannot be read" in capsys.readouterr().err
