"""What asks where in a dim its elements stand, where the dim is a compound and a rank holds several segments of it."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardfx as sx
from tests.reference import check_step

MESH = sx.Mesh(dp=2, tp=2)


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


class Positions(nn.Module):
    """Position ids and ranges of numbers beside rows that come from two sharded dims."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Embedding(24, 5, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        ids, numbers = torch.arange(24), torch.arange(0.1, 2.5, 0.1, dtype=torch.float64)
        return (x.flatten(0, 1) * numbers[:, None] + self.places(ids)).sin()


class Table(nn.Module):
    """A table of which the rows come from two dims, and the gradient of how often each is looked up."""

    def __init__(self, by_count: bool) -> None:
        super().__init__()
        self.table, self.by_count = nn.Parameter(randn(4, 6, 5)), by_count

    def forward(self, ids: Tensor) -> Tensor:
        rows = self.table.flatten(0, 1)
        return F.embedding(ids, rows, padding_idx=9, scale_grad_by_freq=self.by_count).sin()


class Picked(nn.Module):
    """Columns that come from two dims, of which some are picked."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(randn(5))

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        return (x * self.scale[:, None, None]).flatten(1, 2).gather(1, index)


class Classes(nn.Module):
    """Logits whose classes come from two dims."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(randn(5))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.scale[:, None, None]).flatten(1, 2)


def squares(out: Tensor) -> Tensor:
    return (out**2).sum()


def class_loss(out: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(out, target, ignore_index=3)


IDS = torch.tensor([0, 23, 9, 5, 17, 5, 12, 5, 23, 18])
TARGET = torch.tensor([23, 3, 8, 14, 0])
CASES: dict[str, tuple[Any, tuple[Tensor, ...], dict[str, str]]] = {
    "positions": (Positions, (randn(4, 6, 5),), {"args.0": "dp, tp, -"}),
    "table": (lambda: Table(False), (IDS,), {"table": "dp, tp, -"}),
    "table, sharded within": (lambda: Table(False), (IDS,), {"table": "-, tp, -"}),
    "table, by count": (lambda: Table(True), (IDS,), {"table": "dp, tp, -"}),
    "table, by count, plain": (lambda: Table(True), (IDS,), {"table": "dp tp, -, -"}),
    "picked": (Picked, (randn(5, 4, 6), IDS.view(5, 2)), {"args.0": "-, dp, tp"}),
    "classes": (Classes, (randn(5, 4, 6),), {"args.0": "-, dp, tp"}),
    "classes, sharded within": (Classes, (randn(5, 4, 6),), {"args.0": "-, -, tp"}),
}


@pytest.mark.long
@pytest.mark.one_in(9)
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_one_device(name: str) -> None:
    torch.manual_seed(0)
    make, args, specs = CASES[name]
    model = make()
    loss, targets = (class_loss, (TARGET,)) if name.startswith("classes") else (squares, ())
    alone = deepcopy(model)
    pm = sx.parallelize(model, MESH, sx.Hints(args=args, loss=loss, targets=targets, specs=specs), virtual=True)
    assert (
        any(sharding.parts for value in pm.planned.values() if value.spec for sharding in value.spec.dims)
        or "plain" in name
    )
    check_step(pm, alone, loss, args, targets)  # type: ignore[arg-type]
