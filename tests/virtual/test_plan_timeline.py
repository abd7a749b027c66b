"""``pm.timeline()`` and ``pm.record()``: what ranks do when, predicted and measured."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import shardfx as sx
from shardfx.ir.cost.machine import Level, Machine
from shardfx.ir.mesh import Link
from shardfx.ir.schedule.simulation import dependencies
from shardfx.ir.timing.rank_tasks import Purpose, RankTask
from shardfx.ir.timing.simulate import simulate_ranks

SVG = "{http://www.w3.org/2000/svg}"
X, Y = torch.randn(64, 8), torch.randint(0, 4, (64,))
T = sx.Loop
FAR = Machine("far", {"float32": 1e9}, 1e12, 1e9, (Level("wire", Link(1e6, 1e-4)),))
NEAR = Machine("near", {"float32": 1e9}, 1e12, 1e9, (Level("wire", Link(1e15, 0.0)),))


class Blocks(nn.Module):
    """Blocks that cost the same, and little before and behind them."""

    def __init__(self, count: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8)) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def planned(mesh: sx.Mesh, machine: Machine = NEAR, count: int = 4, **more: Any) -> sx.ParallelModule:
    hints = sx.Hints(args=(X,), loss=F.cross_entropy, targets=(Y,), machine=machine, **more)
    return sx.parallelize(Blocks(count), mesh, hints, virtual=True)


@cache
def staged(schedule: str = "1f1b", ranks: int = 2, microbatches: int = 4, chunks: int = 1) -> sx.ParallelModule:
    pipeline = sx.Pipeline(schedule=schedule, stages_per_rank=chunks)
    return planned(sx.Mesh(pp=ranks, mb=T(microbatches)), count=ranks * chunks * 2, pipeline=pipeline)


# ---- clocks


def rows_of(schedule: sx.schedules.Schedule, seconds: dict[str, float], comm: float) -> list[list[RankTask]]:
    """What ranks do for a schedule: they receive, work, send."""
    needs = dependencies(schedule)
    tags = {action: tag for tag, action in enumerate(schedule)}
    rows: list[list[RankTask]] = [[] for _ in schedule.ranks]
    for rank, row in enumerate(schedule.rows):
        for action in row:
            purpose, microbatch = Purpose(action.kind, action.stage), action.microbatch
            for made in needs[action]:
                if (origin := schedule.rank_of(made.stage)) != rank:
                    rows[rank].append(RankTask("wait", Purpose("R"), message=(origin, rank, tags[made])))
            rows[rank].append(RankTask("compute", purpose, seconds[action.kind], microbatch))
            users = [user for user, made in needs.items() if action in made]
            for place in sorted({schedule.rank_of(user.stage) for user in users} - {rank}):
                message = rank, place, tags[action]
                rows[rank].append(RankTask("start", purpose, comm, link=f"to place {place}", message=message))
    return rows


@pytest.mark.parametrize(
    ("name", "stages", "ranks", "microbatches"), [("1f1b", 3, 3, 7), ("interleaved", 8, 4, 8), ("zb-v", 4, 2, 5)]
)
def test_clocks_are_those_of_the_schedule_alone(name: str, stages: int, ranks: int, microbatches: int) -> None:
    comm = 0.25
    schedule, costs = (
        sx.schedules.make_schedule(name, stages=stages, microbatches=microbatches, ranks=ranks),
        {"F": 1, "B": 2, "I": 1, "W": 1},
    )
    simulated = sx.schedules.simulate(schedule, costs, comm)
    courses = simulate_ranks(rows_of(schedule, costs, comm))
    spans = {action: span for course in courses for action, span in course.spans.items()}
    assert spans == {action: pytest.approx(span) for action, span in simulated.spans.items()}
    assert tuple(tuple(course.spans) for course in courses) == schedule.rows


def test_what_computes_meanwhile_hides_communication() -> None:
    call, other = fx.Graph().placeholder("a"), fx.Graph().placeholder("b")
    purpose = Purpose("B", 0)
    row = [
        RankTask("compute", purpose, 1.0),
        RankTask("start", purpose, 3.0, 0, call, "dp"),
        RankTask("start", purpose, 1.0, 0, other, "dp"),  # over the same link, behind it
        RankTask("compute", purpose, 2.0),
        RankTask("wait", purpose, 0, 0, call),
        RankTask("wait", purpose, 0, 0, other),
        RankTask("compute", purpose, 0.5),
    ]
    (course,) = simulate_ranks([row])
    assert course.exposed == 2.0
    assert tuple(course.spans[sx.schedules.Action("B", 0, 0)]) == (0.0, 5.5)
    (apart,) = simulate_ranks([[replace(each, link="tp") if each is row[2] else each for each in row]])
    assert apart.exposed == 1.0


# ---- plans with stages


@pytest.mark.long
def test_ranks_do_what_the_schedule_says() -> None:
    name, ranks, microbatches, chunks = "interleaved", 2, 4, 2
    pm = staged(name, ranks, microbatches, chunks)
    timeline = pm.timeline()
    rows = tuple(tuple(action for action in row if action.kind != "U") for row in timeline.schedule.rows)
    assert pm.schedule is not None
    assert (
        rows
        == pm.schedule.rows
        == sx.schedules.make_schedule(name, stages=ranks * chunks, microbatches=microbatches, ranks=ranks).rows
    )
    for row in timeline.schedule.rows:
        spans = [timeline.spans[action] for action in row]
        assert all(before.end <= after.start for before, after in pairwise(spans))


# ---- plans without


@pytest.mark.long
def test_a_plan_without_stages_has_a_timeline() -> None:
    specs = {"args.0": "dp, -", "layers.*.0.weight": "tp, -"}
    pm = planned(sx.Mesh(dp=2, tp=2), specs=specs, optimizer=lambda p: torch.optim.AdamW(p))
    timeline = pm.timeline()
    assert pm.schedule is None
    assert str(timeline.schedule) == "F0.0 B0.0 U0"
    assert timeline.bubble == pytest.approx(0)
    assert len(timeline.memory) == 4
    (course,) = timeline.courses
    assert list(course.links) == ["dp", "tp"]
    for transfers in course.links.values():
        assert all(before.span.end <= after.span.start for before, after in pairwise(transfers))


@pytest.mark.long
@pytest.mark.parametrize(("machine", "stages"), [(None, False), (FAR, True)], ids=["planned for", "far, stages"])
def test_report_and_timeline_agree_on_exposed_communication(machine: Machine | None, stages: bool) -> None:
    pm = (
        staged()
        if stages
        else planned(sx.Mesh(dp=2, tp=2), FAR, specs={"args.0": "dp, -", "layers.*.0.weight": "tp, -"})
    )
    timeline, time = pm.timeline(machine), pm.report(machine).time
    assert (time.total, time.exposed, time.hidden) == (timeline.step, timeline.exposed, timeline.hidden)
    assert "nothing overlaps" not in str(pm.report(machine))
    (course, *others) = timeline.courses
    assert course.communication >= course.exposed >= 0
    assert sum(stall.exposed for stall in course.stalls) == pytest.approx(course.exposed)
    if not others:  # a step is what rank 0 computes, and what nothing hides of what it sends
        assert timeline.step == pytest.approx(time.compute + time.exposed)
        assert time.communication == pytest.approx(time.exposed + time.hidden)
        assert timeline.hidden > 0
    for line in timeline.text(0).splitlines():
        start, length, *_ = line.split()
        assert float(start) >= 0 and float(length) >= 0


# ---- files


def events(path: Path) -> tuple[dict[int, str], list[dict[str, Any]]]:
    """The tracks, and what is on them."""
    found = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    tracks = {each["tid"]: each["args"]["name"] for each in found if each["ph"] == "M"}
    return tracks, [each for each in found if each["ph"] == "X"]


@pytest.mark.long
def test_a_trace_and_a_picture_have_a_row_for_each_rank(tmp_path: Path) -> None:
    pm = planned(sx.Mesh(pp=2, dp=2, mb=T(2)), pipeline=sx.Pipeline(), specs={"args.0": "mb dp, -"})
    timeline = pm.timeline()
    assert timeline.memory == tuple(pm.memory(rank).peak for rank in range(4)) and timeline.places == (0, 0, 1, 1)
    tracks, done = events(timeline.trace(tmp_path / "predicted.json"))
    assert {track: tracks[track] for track in range(4)} == {rank: f"rank {rank}" for rank in range(4)}
    links = sorted(name for track, name in tracks.items() if track >= 4)
    assert [name for name in links if name.startswith("rank 0:")] == [
        *("rank 0: dp", "rank 0: from place 1", "rank 0: to place 1")
    ]
    assert len(links) == 12 and {each["tid"] for each in done} == set(tracks)
    assert min(each["ts"] for each in done) == 0
    named = {(each["tid"], each["name"]): each for each in done}
    assert {name for rank, name in named if rank in (0, 1)} >= {"F0.0", "F0.1", "B0.0", "B0.1"}
    assert {name for rank, name in named if rank in (2, 3)} >= {"F1.0", "F1.1", "B1.0", "B1.1"}
    assert (0, "F1.0") not in named
    span = timeline.spans[sx.schedules.Action("B", 1, 1)]
    assert named[3, "B1.1"]["ts"] == pytest.approx(span.start * 1e6)
    assert named[3, "B1.1"]["dur"] == pytest.approx(span.length * 1e6)
    texts = [each.text for each in ElementTree.parse(timeline.draw(tmp_path / "step.svg")).iter(f"{SVG}text")]
    assert [text for text in texts if text and text.startswith("rank ")] == [f"rank {rank}" for rank in range(4)]
    assert {"forward", "backward", "bubble"} <= set(texts)


def _stage_iterations(names: Iterable[str]) -> list[str]:
    return [name for name in names if name[0] != "U"]


@pytest.mark.long
@pytest.mark.parametrize(
    "make", [staged, lambda: planned(sx.Mesh(dp=2), grad_accumulation=3)], ids=["stages", "microbatches"]
)
def test_measured_steps_are_traced(make: Callable[[], sx.ParallelModule], tmp_path: Path) -> None:
    pm, path = make(), tmp_path / "measured.json"
    with pm.record(path) as recording:
        for _ in range(3):
            pm(X, Y).backward()
    pm(X, Y)  # which is not measured
    assert len(recording.steps) == 3
    timeline = pm.timeline()
    tracks, done = events(path)
    assert list(tracks.values()) == ["rank 0", "rank 1"]
    for rank in (0, 1):
        row = [str(action) for action in timeline.schedule.rows[timeline.places[rank]]]
        names = [each["name"] for each in done if each["tid"] == rank]
        assert _stage_iterations(names) == _stage_iterations(row) * 3
        ends = [(each["ts"], each["ts"] + each["dur"]) for each in done if each["tid"] == rank]
        assert all(before[1] <= after[0] + 1 for before, after in pairwise(ends))
    for step in recording.steps:
        assert 0 <= step.bubble < 1
        assert all(step.span.start <= span.start <= span.end <= step.span.end for _, span in step.rows[1])
    assert 0 < recording.step < 30


@pytest.mark.long
def test_the_report_says_what_each_stage_has() -> None:
    pm = staged()
    first, last = pm.report().stages
    assert (first.modules, last.modules) == (("layers.0 .. 1",), ("layers.2 .. 3",))
    assert first.parameters == last.parameters == 2 * (8 * 32 + 32 + 32 * 8 + 8)
    assert first.nbytes == 4 * first.parameters
    assert first.sent == last.sent == 16 * 8 * 4  # a micro-batch's activations, and their gradients
    assert first.ranks == (0,)
    text = str(pm.report())
    assert "F0.0 F0.1 B0.0 F0.2 B0.1 F0.3 B0.2 B0.3" in text
    assert pm.report().memory.stored["parameters"] == first.nbytes  # of rank 0 alone
    assert {row.axes for row in pm.report().communication.rows} == {("pp",)}
