"""Simulated schedules: times by costs and transfers, the picture, the trace, the command."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

import shardfx as sx
from shardfx.cli import main
from shardfx.visualize.schedule_chart import tint
from shardfx.visualize.svg import ticks

SVG = "{http://www.w3.org/2000/svg}"
TWO = sx.schedules.Schedule.parse("F0.0 F0.1 B0.0 B0.1 U0\nF1.0 B1.0 F1.1 B1.1 U1")


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


def test_what_costs_nothing_takes_no_time() -> None:
    timeline = sx.schedules.simulate(TWO, {"F": 0, "B": 0, "U": 0})
    assert timeline.step == 0 and timeline.bubble == 0 and len(timeline.order) == 10


@pytest.mark.parametrize(
    ("costs", "comm", "words"),
    [
        (
            {"F": 1, "B": 2},
            0,
            "no costs of a schedule's actions\n  where:    costs\n  expected: a number for U (update)",
        ),
        ({"F": 1, "B": 2, "U": 0, "G": 1}, 0, "expected: some of F, B, I, W, U\n  got:      'G'"),
        ({"F": 1, "B": float("nan"), "U": 0}, 0, "these are no costs of a schedule's actions\n  where:    costs['B']"),
        ({"F": (1, 2, 3), "B": 2, "U": 0}, 0, "a number, or 2 of them, one for each stage"),
        ((1, 2), 0, "expected: a mapping such as"),
        ({"F": 1, "B": 2, "U": 0}, -1, "where:    comm\n  expected: the time of a transfer"),
        ({"F": 1, "B": 2, "U": 0}, "1", "where:    comm\n  expected: the time of a transfer"),
    ],
)
def test_what_are_no_costs(costs: dict[str, float], comm: float, words: str) -> None:
    with pytest.raises(sx.Error) as error:
        sx.schedules.simulate(TWO, costs, comm)
    assert words in str(error.value)


def test_what_is_not_complete_is_not_simulated() -> None:
    with pytest.raises(sx.Error, match=r"B1\.0 is missing"):
        sx.schedules.simulate(sx.schedules.Schedule.parse("F0.0 B0.0\nF1.0"))
    with pytest.raises(sx.Error, match="stands twice"):
        sx.schedules.simulate(sx.schedules.Schedule.parse("F0.0 F0.0 B0.0"))


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


def test_times_below_the_picture_are_round() -> None:
    assert [*ticks(33)] == [0, 5, 10, 15, 20, 25, 30]
    assert [*ticks(0.25)] == [0, 0.05, 0.1, 0.15, 0.2, 0.25]
    assert [*ticks(1)] == [0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1]
    assert [*ticks(0)] == [0]


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
    assert main(["schedule", "2f2b", "--stages", "4", "--microbatches", "8"]) == 2
    assert "no schedule is called '2f2b'" in capsys.readouterr().err
