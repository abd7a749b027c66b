"""Pictures: equal blocks are drawn once."""

from __future__ import annotations

from collections import Counter

import pytest

from shardfx.ir.graph import Graph, InputKind, OutputKind
from shardfx.visualize.detail import show
from tests.unit.sketch import DIM, ROWS, Sketch, aten, decoder
from tests.unit.test_visualize import drawn, texts


@pytest.mark.parametrize("layers", [2, 7])
def test_equal_blocks_are_folded_with_their_count(layers: int) -> None:
    graph = decoder(layers)
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


def test_unequal_blocks_are_not_folded() -> None:
    assert not any(box.count > 1 for box in show(decoder(4, equal=False)).boxes())


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
