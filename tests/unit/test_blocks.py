"""Repeated blocks are traced once: the graph is the same as if all of them had been."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardfx.ir.capture.repeats import find_runs
from shardfx.ir.capture.tape import Repeat
from shardfx.ir.capture.trace import capture
from shardfx.ir.mesh import Mesh

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
        if variant == "all tied":
            for block in self.blocks:
                block.up.weight = self.blocks[0].up.weight

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


def runs_of(model: nn.Module) -> list[Repeat]:
    def forward(model: nn.Module, tensors: Sequence[Tensor]) -> Tensor:
        out = model(tensors[0])
        return loss(out, tensors[1]) + sum(each.detach().sum() for each in (out if isinstance(out, tuple) else [out]))

    aliases: dict[int, str] = {}
    names = {n: aliases.setdefault(id(p), n) for n, p in model.named_parameters(remove_duplicate=False)}
    return list(find_runs(model, [torch.rand(4, 5, 6), torch.rand(4, 5, 3)], forward, names).runs)


@pytest.mark.parametrize(("variant", "training"), [("", True), ("", False), ("dropout", True), ("between", True)])
def test_the_graph_is_the_same(variant: str, training: bool) -> None:
    assert runs_of(Stack(variant)) == [Repeat("blocks", 1, DEPTH - 2)]
    short = capture(Stack(variant), Mesh(dp=2), **given(training))  # type: ignore[arg-type]
    whole = capture(Stack(variant), Mesh(dp=2), **given(training), fold=False)  # type: ignore[arg-type]
    assert str(short.graph) == str(whole.graph)


@pytest.mark.parametrize("variant", ["all tied", "tied", "one differs", "skip", "returned"])
def test_blocks_that_differ_are_no_run(variant: str) -> None:
    assert runs_of(Stack(variant)) == []


def test_of_lists_within_lists_the_outer_one_is_shortened() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(DEPTH)))
    given = {"args": (torch.rand(2, 4),), "loss": F.mse_loss, "targets": (torch.rand(2, 4),)}
    assert str(capture(model, Mesh(dp=2), **given).graph) == str(capture(model, Mesh(dp=2), **given, fold=False).graph)


def test_why_blocks_were_not_left_out_is_said() -> None:
    def forward(model: nn.Module, tensors: Sequence[Tensor]) -> Tensor:
        raise ValueError("no such thing")

    found = find_runs(Stack(), [torch.rand(4, 5, 6)], forward, {})
    assert not found.runs and "ValueError: no such thing" in found.note
