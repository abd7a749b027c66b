"""Interleaved iterations beside pipelines, and compiled: exact and proven, or an error that says what to do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardfx as sx
from tests.reference import check_step

HINTS = {"*.up.weight": "tp, -", "*.down.weight": "-, tp"}
SIDE = sx.Loop(2, interleave=True)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


def planned(mesh: sx.Mesh, rows: str, **hints: Any) -> tuple[nn.Module, sx.ParallelModule, Tensor, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(4))).double()
    x, y = torch.randn(2, 8, 4, 8, dtype=torch.float64)
    given = sx.Hints(args=(x,), loss=F.mse_loss, targets=(y,), specs=HINTS | {"args.0": rows}, **hints)
    return model, sx.parallelize(model, mesh, given, virtual=True), x, y


def check(model: nn.Module, pm: sx.ParallelModule, x: Tensor, y: Tensor) -> None:
    check_step(pm, model, F.mse_loss, (x,), (y,), bound=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("rows", ["mb c, -, -", pytest.param("mb, c, -", marks=pytest.mark.slow)])
def test_iterations_within_those_of_a_pipeline(rows: str) -> None:
    check(*planned(sx.Mesh(mb=sx.Loop(4), c=SIDE, pp=2, tp=2), rows, pipeline=sx.Pipeline()))


@pytest.mark.long
def test_iterations_of_a_pipeline_are_in_its_schedule() -> None:
    check(*planned(sx.Mesh(mb=sx.Loop(4, interleave=True), pp=2, tp=2), "mb, -, -", pipeline=sx.Pipeline()))


@pytest.mark.slow
def test_compiled() -> None:
    model, pm, x, y = planned(sx.Mesh(mb=SIDE, tp=2), "mb, -, -")
    pm.compile(backend="eager")
    check(model, pm, x, y)
