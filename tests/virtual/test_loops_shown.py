"""Iterations in pictures and in the report: drawn once, with how often; what each holds; what is sent in all of
them."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest
import torch

import shardfx as sx
from shardfx.ir.cost.traffic import TripCounts
from shardfx.visualize.boxes import Box
from shardfx.visualize.detail import show
from shardfx.visualize.graph_picture import picture_svg
from shardfx.visualize.style import TIMES
from tests.collective_counts import count_collectives
from tests.plans import plan
from tests.zoo import make


def planned(rows: int, count: int, **hints: object) -> sx.ParallelModule:
    case = make("mlp3")
    x, y = torch.zeros(rows, 32, dtype=torch.float64), torch.zeros(rows, dtype=torch.int64)
    given = sx.Hints(
        args=(x,), loss=case.loss, targets=(y,), specs={"args.0": "dp, -"}, grad_accumulation=count, **hints
    )  # type: ignore[arg-type]
    return sx.parallelize(case.model, sx.Mesh(dp=2), given, virtual=True)


def texts(pm: sx.ParallelModule) -> list[str]:
    root = ET.fromstring(picture_svg(show(pm.planned), "a title"))
    return ["".join(element.itertext()) for element in root.iter() if element.tag.endswith("text")]


@pytest.mark.long
def test_what_is_done_in_iterations_is_drawn_once_with_how_often() -> None:
    few, many = texts(planned(512, 4)), texts(planned(512, 256))
    assert [text for text in few if "iterations" in text] == [
        text.replace("256 iterations", "4 iterations") for text in many if "iterations" in text
    ]
    assert len(many) == len(few)
    assert sum(f"{TIMES} 256 iterations" in text for text in many) > 1
    assert any("accumulated over iterations; nothing is sent" in text for text in many)


def test_each_box_says_the_iterations_of_what_is_in_it() -> None:
    pm = plan(make("gpt_fused"), sx.Mesh(dp=2), grad_accumulation=2, zero=3, zero_min_numel=0)
    iterations = TripCounts.of(pm.planned)
    assert 0 < len(iterations.axes) < len(pm.planned.nodes)

    def look(box: Box, around: tuple[str, ...]) -> None:
        around = (*around, *box.loop_axes)
        assert len(set(around)) == len(around)
        for child in box.children:
            look(child, around)
        if not box.children and box.nodes:
            shared = set.intersection(*({*iterations.axes.get(node, ())} for node in box.nodes))
            assert {*around} == shared

    for lane in show(pm.planned).lanes:
        for box in lane.boxes:
            if box.nodes or box.children:
                look(box, ())


@pytest.mark.long
@pytest.mark.one_in(2)
@pytest.mark.parametrize(("zero", "reduce"), [(0, "last"), (0, "each"), (2, "each"), (3, "each")])
def test_what_is_sent_is_what_ranks_send(zero: int, reduce: str) -> None:
    case = make("gpt_fused")
    pm = plan(case, sx.Mesh(dp=2), grad_accumulation=2, zero=zero, zero_min_numel=0, reduce=reduce)
    report = pm.report().communication
    assert all("mb" not in row.axes for row in report.rows)
    with count_collectives() as counts:
        pm(*case.args, *case.targets).backward()
    assert report.calls == counts.calls and report.nbytes == pytest.approx(counts.nbytes)
