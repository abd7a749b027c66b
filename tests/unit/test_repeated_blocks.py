"""Repeated blocks are traced once: the graph is the same as if all of them had been."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardfx as sx
from shardfx.ir.capture.repeated_blocks import find_repeats
from shardfx.ir.capture.trace import capture
from shardfx.ir.errors import Error
from shardfx.ir.graph import Graph
from shardfx.ir.mesh import Mesh
from shardfx.ir.repeat import Repeat
from shardfx.ir.text import parse_graph
from shardfx.ir.unfolding.unfold import unfold
from tests.captures import captured_once

DEPTH = 9


class Block(nn.Module):
    def __init__(self, dim: int, p: float = 0.0) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)
        self.drop = nn.Dropout(p)

    def forward(self, x: Tensor, shared: Tensor) -> Tensor:
        return x + self.drop(self.down(F.relu(self.up(self.norm(x) * shared))))


class Stack(nn.Module):
    """Equal blocks that all use one value with a gradient; ``variant`` is what breaks (or not) their equality."""

    def __init__(self, variant: str = "") -> None:
        super().__init__()
        self.variant = variant
        self.scale = nn.Parameter(torch.rand(6))
        self.blocks = nn.ModuleList(Block(6, 0.1 if variant == "dropout" else 0.0) for _ in range(DEPTH))
        self.head = nn.Linear(6, 3)
        if variant == "tied":
            self.blocks[5].up.weight = self.blocks[2].up.weight

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        shared = self.scale.sin()
        seen = []
        for i, block in enumerate(self.blocks):
            x = block(x, shared)
            if self.variant == "one differs" and i == 5:
                x = x * 2
            if self.variant == "between":
                x = x * 2
            seen.append(x)
        if self.variant == "skip":
            x = x + seen[4]
        return (self.head(x), seen[4]) if self.variant == "returned" else self.head(x)


def loss(out: Tensor | tuple[Tensor, Tensor], y: Tensor) -> Tensor:
    return F.mse_loss(out[0] if isinstance(out, tuple) else out, y)


def given(training: bool) -> dict[str, object]:
    torch.manual_seed(0)
    asked = {"loss": loss, "targets": (torch.rand(4, 5, 3),)} if training else {}
    return {"args": (torch.rand(4, 5, 6),)} | asked


def repeats_of(model: nn.Module) -> list[Repeat]:
    return list(capture(model, Mesh(dp=2), **given(True)).graph.repeats)  # type: ignore[arg-type]


LEFT_OUT = [Repeat("blocks", 2, DEPTH - 4)]
"""The last block is not like the one before it where all use a value with a gradient: it begins the sum."""


@pytest.mark.long
@pytest.mark.parametrize("variant", ["dropout", "between", "mixed precision"])
def test_folded_graph_equals_the_unfolded_one(variant: str) -> None:
    how = given(True) | ({"compute": sx.MixedPrecision(torch.bfloat16)} if variant == "mixed precision" else {})
    short = capture(Stack(variant), Mesh(dp=2), **how)  # type: ignore[arg-type]
    whole = capture(Stack(variant), Mesh(dp=2), **how, fold=False)  # type: ignore[arg-type]
    assert short.graph.repeats == tuple(LEFT_OUT) and not short.graph.notes
    assert len(short.graph.nodes) < len(whole.graph.nodes)
    assert str(parse_graph(str(short.graph))) == str(short.graph)
    for graph in (short.graph, parse_graph(str(short.graph))):
        unfold(graph)
        assert str(graph) == str(whole.graph)


@pytest.mark.parametrize("variant", ["tied", "one differs", "skip", "returned"])
def test_blocks_that_differ_are_not_folded(variant: str) -> None:
    assert repeats_of(Stack(variant)) == []


class Various(nn.Module):
    """Calls that work in place, on a view too, and that give several results."""

    def __init__(self, reshapes: bool = False) -> None:
        super().__init__()
        self.up, self.reshapes = nn.Linear(6, 12), reshapes
        self.register_buffer("mask", torch.rand(5, 1) > 0.5)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.up(x).chunk(2, -1)
        a = a.masked_fill(self.mask, 0.0)
        a[:, 0] += 1.0
        a.mul_(b)
        if self.reshapes:
            a = a.clone().unsqueeze_(0).squeeze(0)
        return x + a * b.topk(1, -1).values


@pytest.mark.long
@pytest.mark.parametrize("reshapes", [False, True])
def test_calls_of_every_kind_are_traced(reshapes: bool) -> None:
    model = nn.Sequential()
    model.blocks = nn.Sequential(*(Various(reshapes) for _ in range(DEPTH)))
    short, whole = (capture(model, Mesh(dp=2), **given(False), fold=fold).graph for fold in (True, False))  # type: ignore[arg-type]
    assert [str(each) for each in short.repeats] == ([] if reshapes else ["blocks 2..6"])
    assert (
        any("aten.unsqueeze_.default changes the shape of its operand in place" in n for n in short.notes) is reshapes
    )
    short.notes = []
    unfold(short)
    assert str(short) == str(whole)


def test_note_says_why_blocks_are_not_folded() -> None:
    def forward(model: nn.Module, tensors: Sequence[Tensor]) -> Tensor:
        raise ValueError("no such thing")

    found = find_repeats(Stack(), [torch.rand(4, 5, 6)], forward, {})
    assert not found.repeats and "ValueError: no such thing" in found.note


@captured_once("test_repeated_blocks")
def planned(specs: dict[str, str]) -> sx.ParallelModule:
    hints = sx.Hints(**given(True), specs=specs)  # type: ignore[arg-type]
    return sx.parallelize(Stack(), Mesh(dp=2, tp=2), hints, virtual=True)


MEGATRON = {
    "args.0": "dp, -, -",
    "targets.0": "dp, -, -",
    "blocks.*.up.weight": "tp, -",
    "blocks.*.down.weight": "-, tp",
}
SEQUENCE = {**MEGATRON, "blocks.*.norm": "-, tp, -"}


@pytest.mark.long
def test_plan_and_reasons_of_a_folded_graph_are_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    short = planned(SEQUENCE)
    monkeypatch.setattr("shardfx.compile.capture", partial(capture, fold=False))
    whole = planned(SEQUENCE)
    assert short._compiled.captured.graph.repeats and not whole._compiled.captured.graph.repeats
    assert not short.planned.notes
    assert str(short.captured) == str(whole.captured)
    assert str(short.planned) == str(whole.planned)
    assert short.plan == whole.plan
    assert [node.why for node in short.planned.nodes] == [node.why for node in whole.planned.nodes]
    for value in [*(given.name for given in short.planned.inputs), *(f"%{node.name}" for node in short.planned.nodes)]:
        assert str(short.explain(value)) == str(whole.explain(value))


@pytest.mark.long
@pytest.mark.parametrize(("name", "spec"), [("blocks.4.up.bias", "tp"), ("blocks.6.norm", "-, tp, -")])
def test_blocks_with_different_hints_are_unfolded(name: str, spec: str) -> None:
    (note,) = planned({**MEGATRON, name: spec}).planned.notes
    assert f"the hint {name!r} is not for all of the blocks blocks.1 to 6" in note


class LookedAt(sx.Pass):
    """Somebody's pass that wants to see all blocks."""

    name = "looked-at"
    before = "partition"

    def run(self, graph: Graph, context: object) -> bool:
        assert not graph.repeats
        assert {f"blocks.{i}.up.weight" for i in range(DEPTH)} <= {given.name for given in graph.inputs}
        return False


@pytest.mark.long
@captured_once("test_repeated_blocks")
def test_custom_pass_sees_all_blocks() -> None:
    hints = sx.Hints(**given(True), specs=MEGATRON, passes=[LookedAt()])  # type: ignore[arg-type]
    pm = sx.parallelize(Stack(), Mesh(dp=2, tp=2), hints, virtual=True)
    assert pm._compiled.captured.graph.repeats and not pm.planned.notes
    assert str(pm.planned) == str(planned(MEGATRON).planned)


def test_hint_without_a_match_lists_the_names_of_all_blocks() -> None:
    with pytest.raises(Error, match="matches nothing") as caught:
        planned({**MEGATRON, "block.4.up.weight": "tp, -"})
    assert "blocks.4.up.weight" in str(caught.value.remedy)
