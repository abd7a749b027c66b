"""Pictures of graphs: what is drawn, how much of it, equal blocks once, and that the file is sound."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import shardfx as sx
from shardfx.ir.cost.traffic import by_axes
from shardfx.ir.graph import Graph
from shardfx.ir.ops.sends import is_comm
from shardfx.ir.text.printer import size_text
from shardfx.visualize import draw_folder, draw_memory
from shardfx.visualize.boxes import Box, BoxKind
from shardfx.visualize.detail import show
from shardfx.visualize.graph_picture import picture_svg
from shardfx.visualize.layout import lay_out
from shardfx.visualize.leaf_boxes import measure
from shardfx.visualize.style import width
from shardfx.visualize.svg import Rect
from tests.plans import MESHES, plan
from tests.zoo import make

SVG = "{http://www.w3.org/2000/svg}"


def drawn(graph: Graph, boxes: int = 300) -> ET.Element:
    return ET.fromstring(picture_svg(show(graph, boxes), "a title"))


def texts(root: ET.Element) -> list[str]:
    return ["".join(element.itertext()) for element in root.iter(f"{SVG}text")]


def tooltips(root: ET.Element) -> list[str]:
    return [title.text or "" for group in root.iter(f"{SVG}g") for title in group.findall(f"{SVG}title")]


def placed_texts(root: ET.Element, dx: float = 0, dy: float = 0) -> Iterator[tuple[float, float, float, str]]:
    """Left, right, base line and text of every text."""
    for element in root:
        if element.tag == f"{SVG}g":
            shift = re.match(r"translate\(([\d.-]+) ([\d.-]+)\)", element.get("transform", ""))
            moved = (dx + float(shift[1]), dy + float(shift[2])) if shift else (dx, dy)
            yield from placed_texts(element, *moved)
        elif element.tag == f"{SVG}text":
            text = "".join(element.itertext())
            size = float(element.get("font-size", 12))
            wide = width(text, size, mono=element.get("class") == "m", bold=True)
            left = (
                dx
                + float(element.get("x", 0))
                - wide * {"middle": 0.5, "end": 1}.get(element.get("text-anchor", ""), 0)
            )
            yield left, left + wide, dy + float(element.get("y", 0)), text


GRAPHS = ("mlp3", "gpt_separate", "unet")


@cache
def planned(name: str) -> Graph:
    """A case of the zoo, on dp=2 x tp=2."""
    return plan(make(name), MESHES["dp2tp2"]).planned


@pytest.mark.long
@pytest.mark.parametrize("name", GRAPHS)
def test_the_file_is_sound(name: str) -> None:
    graph = planned(name)
    root = drawn(graph)
    assert root.tag == f"{SVG}svg"
    _, _, wide, high = map(float, root.get("viewBox", "").split())
    for left, right, y, text in placed_texts(root):
        assert left >= 0, text
        assert right <= wide, text
        assert 0 < y < high, text
    assert picture_svg(show(graph), "t") == picture_svg(show(graph), "t")


@pytest.mark.long
@pytest.mark.parametrize("name", GRAPHS)
def test_boxes_lie_inside_of_their_modules_and_apart(name: str) -> None:
    graph = planned(name)
    picture = show(graph)
    made = lay_out(picture, lambda box: measure(box, graph.mesh))
    rects = {spot.box: spot.rect for lane in made.lanes for spot in lane.spots}
    assert len(rects) == picture.size

    def check(boxes: list[Box], around: Rect) -> None:
        for i, box in enumerate(boxes):
            rect = rects[box]
            assert around.x <= rect.x
            assert around.y <= rect.y
            assert rect.right <= around.right + 0.5
            assert rect.bottom <= around.bottom + 0.5
            for other in boxes[:i]:
                o = rects[other]
                assert rect.right <= o.x or o.right <= rect.x or rect.bottom <= o.y or o.bottom <= rect.y
            check(box.children, rect)

    for lane, placed in zip(picture.lanes, made.lanes, strict=True):
        check(lane.boxes, placed.rect)


@pytest.mark.parametrize("name", GRAPHS)
def test_all_communication_is_in_the_totals(name: str) -> None:
    graph = planned(name)
    calls = Counter(graph.mesh.sort(node.kwargs["axes"]) for node in graph.nodes if is_comm(node))
    found = by_axes(graph.nodes, graph.mesh)
    assert {axes: len(each) for axes, each in found.items()} == dict(calls)
    written = texts(drawn(graph))
    for axes, each in found.items():
        assert f"over {' '.join(axes)} " in written
        assert f"{len(each):,} call" + "s" * (len(each) > 1) in written
        assert size_text(sum(one.total for one in each)) in written


def test_tooltips_say_where_and_why() -> None:
    found = tooltips(drawn(planned("mlp3")))
    assert any("why: " in tip and "models.py:" in tip and "F.relu(self.fc2(x))" in tip for tip in found)
    assert any(tip.startswith("comm.all_reduce") and "sent per rank" in tip for tip in found)
    assert any("from aten.mm" in tip and "f64[8{dp}, 48] +{tp}" in tip for tip in found), "that of a line"
    assert any("2 equal blocks" in tip for tip in tooltips(drawn(planned("gpt_separate"))))


def test_a_closed_module_says_what_is_in_it() -> None:
    picture = show(planned("gpt_separate"), 20)
    closed = next(box for box in picture.boxes() if box.kind is BoxKind.CLOSED and box.path == "layers")
    assert any(line.role == "comm" and "all-reduce" in line.text for line in closed.lines)
    assert any(tip.startswith("layers: ") and "aten.addmm" in tip for tip in tooltips(drawn(picture.graph, 20)))


@pytest.mark.parametrize("name", GRAPHS)
def test_there_are_never_more_boxes_than_asked_for(name: str) -> None:
    assert all(0 < show(planned(name), limit).size <= limit for limit in (200, 60, 20))


def test_draw_folder_numbers_the_passes(tmp_path: Path) -> None:
    graphs = dict.fromkeys(("before", "propagate", "bucket-comm", "after"), planned("mlp3"))
    paths = draw_folder(graphs, tmp_path / "pictures")
    assert [path.name for path in paths] == ["before.svg", "01-propagate.svg", "02-bucket-comm.svg", "after.svg"]
    assert all(path.read_text().startswith("<svg") for path in paths)


# ---- equal blocks


def test_equal_blocks_are_folded_with_their_count() -> None:
    assert not any(box.count > 1 for box in show(planned("unet")).boxes())
    graph = planned("gpt_separate")
    picture = show(graph)
    folded = [box for box in picture.boxes() if box.count > 1]
    assert [(box.count, box.title, box.chained) for box in folded] == [
        (2, "layers.0 … 1", True),
        (2, "layers.1 … 0", True),
    ]
    assert set(folded[0].members) == {"layers.0", "layers.1"}
    assert sum(picture.copies.values()) == len(graph.nodes)
    assert texts(drawn(graph)).count("\N{MULTIPLICATION SIGN} 2  in a row") == 2


class Chain(nn.Module):
    """Blocks of which those of the same letter are equal, and a sum of the model's after each."""

    def __init__(self, kinds: str, glue: bool) -> None:
        super().__init__()
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.Linear(8, 8, bias=False), {"a": nn.ReLU, "b": nn.Tanh}[kind]()) for kind in kinds)
        )
        self.glue = glue

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x) if self.glue else block(x)
        return x.sum(1)


def chain(kinds: str, glue: bool = False) -> Graph:
    hints = sx.Hints((torch.zeros(4, 8),), specs={"args.0": "dp, -"})
    return sx.parallelize(Chain(kinds, glue), sx.Mesh(dp=2), hints, virtual=True).planned


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ("aaab", [(3, "blocks.0 … 2")]),
        ("ababab", [(3, "blocks.0, 1 … 4, 5")]),
        ("abab", []),
        ("aabaabaab", [(3, "blocks.0, 1, 2 … 6, 7, 8"), (2, "0 … 1")]),
    ],
)
def test_repeated_patterns_are_folded(kinds: str, expected: list[tuple[int, str]]) -> None:
    assert [(box.count, box.title) for box in show(chain(kinds), 60).boxes() if box.count > 1] == expected


def test_what_a_model_does_between_its_blocks_is_folded_with_them() -> None:
    (folded,) = (box for box in show(chain("aaaa", glue=True)).boxes() if box.count > 1)
    assert folded.count == 4
    assert [str(node.op) for leaf in folded.leaves() for node in leaf.nodes].count("aten.add.Tensor") == 1


def test_views_are_part_of_the_op_that_uses_them() -> None:
    boxes = [box for box in show(planned("mlp3")).boxes() if box.title == "addmm"]
    assert [[str(node.op) for node in box.nodes] for box in boxes] == [["aten.t.default", "aten.addmm.default"]] * 2
    assert ["weight" in "".join(line.text for line in box.lines) for box in boxes] == [True] * 2


AHEAD = ["backward", *["forward"] * 40, *["backward"] * 60, *["update"] * 20]


def test_names_of_phases_stand_apart(tmp_path: Path) -> None:
    for phases, names in ((AHEAD, ["forward", "backward", "update"]), (["forward", *["backward"] * 99], ["backward"])):
        course = [{"parameters": 1}] * len(phases)
        svg = draw_memory(course, phases, 0, 1, (), tmp_path / "memory.svg", "Memory").read_text()
        assert re.findall(r">(forward|backward|update)<", svg) == names
