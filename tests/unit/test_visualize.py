"""Pictures of graphs: what is drawn, how much of it, equal blocks once, and that the file is sound."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardfx.ir.cost.traffic import by_axes
from shardfx.ir.graph import Graph, InputKind, OutputKind
from shardfx.ir.ops.sends import is_comm
from shardfx.ir.text.printer import size_text
from shardfx.visualize import draw_folder, draw_memory
from shardfx.visualize.boxes import Box, BoxKind
from shardfx.visualize.detail import show
from shardfx.visualize.graph_picture import picture_svg
from shardfx.visualize.layout import lay_out
from shardfx.visualize.leaf_boxes import measure
from shardfx.visualize.style import AXIS_COLOURS, width
from shardfx.visualize.svg import Rect
from tests.unit.sketch import DIM, ROWS, Sketch, aten, decoder, mlp

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


GRAPHS = {
    "after": mlp,
    "decoder": lambda: decoder(3, pointwise=4),
    "unequal": lambda: decoder(5, pointwise=2, equal=False),
}


@pytest.mark.long
@pytest.mark.parametrize("name", GRAPHS)
def test_the_file_is_sound(name: str) -> None:
    graph = GRAPHS[name]()
    root = drawn(graph)
    assert root.tag == f"{SVG}svg"
    _, _, wide, high = map(float, root.get("viewBox", "").split())
    for left, right, y, text in placed_texts(root):
        assert left >= 0, text
        assert right <= wide, text
        assert 0 < y < high, text
    assert picture_svg(show(graph), "t") == picture_svg(show(graph), "t")


@pytest.mark.parametrize("name", GRAPHS)
def test_boxes_lie_inside_of_their_modules_and_apart(name: str) -> None:
    graph = GRAPHS[name]()
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
    graph = GRAPHS[name]()
    calls = Counter(graph.mesh.sort(node.kwargs["axes"]) for node in graph.nodes if is_comm(node))
    found = by_axes(graph.nodes, graph.mesh)
    assert {axes: len(each) for axes, each in found.items()} == dict(calls)
    written = texts(drawn(graph))
    for axes, each in found.items():
        assert f"over {' '.join(axes)} " in written
        assert f"{len(each):,} call" + "s" * (len(each) > 1) in written
        assert size_text(sum(one.total for one in each)) in written


def test_tooltips_say_where_and_why() -> None:
    found = tooltips(drawn(mlp()))
    assert any("why: hint on 'up.weight'" in tip and "model.py:7" in tip and "y = mm(x)" in tip for tip in found)
    assert any(tip.startswith("comm.all_reduce") and "sent per rank" in tip for tip in found)
    assert any("from aten.mm" in tip and "f32[32{dp}, 64] +{tp}" in tip for tip in found), "that of a line"
    assert any("2 equal blocks" in tip for tip in tooltips(drawn(decoder(2))))


@pytest.mark.long
def test_a_closed_module_says_what_is_in_it() -> None:
    picture = show(decoder(40, equal=False), 120)
    closed = next(box for box in picture.boxes() if box.kind is BoxKind.CLOSED and box.path == "layers.3")
    assert any(line.role == "comm" and "all-reduce" in line.text for line in closed.lines)
    assert any(tip.startswith("layers.3: ") and "aten.mm" in tip for tip in tooltips(drawn(picture.graph, 120)))


def test_placements_are_written_in_the_colours_of_their_axes() -> None:
    root = drawn(mlp())
    spans = {(span.text, span.get("fill")) for span in root.iter(f"{SVG}tspan")}
    spans |= {(text.text or (text[0].text if len(text) else ""), text.get("fill")) for text in root.iter(f"{SVG}text")}
    dp, tp = AXIS_COLOURS[:2]
    assert {("dp", dp), ("tp", tp), ("256", tp), ("+", tp)} <= spans
    assert "32{dp}, 256{tp}" in texts(root)
    assert "32{dp}, 64 +{tp}" in texts(root)


@pytest.mark.parametrize("limit", [300, 60])
def test_there_are_never_more_boxes_than_asked_for(limit: int) -> None:
    assert 0 < show(decoder(40, pointwise=4, equal=False), limit).size <= limit


def test_views_are_part_of_the_op_that_uses_them() -> None:
    s = Sketch(dp=2)
    x = s.input(InputKind.ARGUMENT, "args.0", (ROWS, DIM), "dp, -")
    w = s.parameter("w", (DIM, DIM), "-, -")
    for _ in range(30):
        t = s.op(aten.t.default, (w,), (DIM, DIM), "-, -", "")
        x = s.op(aten.mm.default, (x, t), (ROWS, DIM), "dp, -", "")
    s.output(OutputKind.RESULT, "results.0", x)
    ops = [box for box in show(s.graph).boxes() if box.kind is BoxKind.OP]
    assert [len(box.nodes) for box in ops] == [2] * 30
    assert all([line.text for line in box.lines] == ["w"] for box in ops)
    assert {box.title for box in ops} == {"mm"}


def test_draw_folder_numbers_the_passes(tmp_path: Path) -> None:
    graphs = {"before": mlp(), "propagate": mlp(), "bucket-comm": mlp(), "after": mlp()}
    paths = draw_folder(graphs, tmp_path / "pictures")
    assert [path.name for path in paths] == ["before.svg", "01-propagate.svg", "02-bucket-comm.svg", "after.svg"]
    assert all(path.read_text().startswith("<svg") for path in paths)


def test_equal_blocks_are_folded_with_their_count() -> None:
    assert not any(box.count > 1 for box in show(decoder(4, equal=False)).boxes())
    graph, layers = decoder(7), 7
    picture = show(graph)
    folded = [box for box in picture.boxes() if box.count > 1]
    assert [(box.count, box.title, box.chained) for box in folded] == [
        (layers, f"layers.0 … {layers - 1}", True),
        (layers, f"layers.{layers - 1} … 0", True),
    ]
    assert set(folded[0].members) == {f"layers.{i}" for i in range(layers)}
    assert sum(picture.copies.values()) == len(graph.nodes)
    root = drawn(graph)
    assert texts(root).count(f"\N{MULTIPLICATION SIGN} {layers}  in a row") == 2


def pattern(kinds: str, glue: bool = False) -> Graph:
    """Blocks of which those of the same letter are equal, and an op of the model after each."""
    s = Sketch(dp=2)
    x = s.input(InputKind.ARGUMENT, "args.0", (ROWS, DIM), "dp, -")
    for i, kind in enumerate(kinds):
        y = x
        for _ in range(3):
            op = {"a": aten.relu.default, "b": aten.tanh.default}[kind]
            y = s.op(op, (y,), (ROWS, DIM), "dp, -", f"model.blocks.{i}.inner")
            y = s.op(aten.mm.default, (y, y), (ROWS, DIM), "dp, -", f"model.blocks.{i}")
        x = s.op(aten.add.Tensor, (x, y), (ROWS, DIM), "dp, -", "model") if glue else y
    s.output(OutputKind.RESULT, "results.0", s.op(aten.sum.default, (x,), (), "+ dp", "model"))
    return s.graph


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ("aaaa", [(4, "model.blocks.0 … 3")]),
        ("aaab", [(3, "model.blocks.0 … 2")]),
        ("ababab", [(3, "model.blocks.0, 1 … 4, 5")]),
        ("abab", []),
        ("aabaabaab", [(3, "model.blocks.0, 1, 2 … 6, 7, 8"), (2, "0 … 1")]),
    ],
)
def test_repeated_patterns_are_folded(kinds: str, expected: list[tuple[int, str]]) -> None:
    folded = [(box.count, box.title) for box in show(pattern(kinds), 60).boxes() if box.count > 1]
    assert folded == expected


def test_what_a_model_does_between_its_blocks_is_folded_with_them() -> None:
    (folded,) = (box for box in show(pattern("aaaa", glue=True)).boxes() if box.count > 1)
    assert folded.count == 4
    ops = Counter(str(node.op) for leaf in folded.leaves() for node in leaf.nodes)
    assert ops["aten.add.Tensor"] == 1


AHEAD = ["backward", *["forward"] * 40, *["backward"] * 60, *["update"] * 20]


def test_names_of_phases_stand_apart(tmp_path: Path) -> None:
    for phases, names in ((AHEAD, ["forward", "backward", "update"]), (["forward", *["backward"] * 99], ["backward"])):
        course = [{"parameters": 1}] * len(phases)
        svg = draw_memory(course, phases, 0, 1, (), tmp_path / "memory.svg", "Memory").read_text()
        assert re.findall(r">(forward|backward|update)<", svg) == names
