"""The plans that are damaged."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardfx as sx
from tests.captures import captured_once
from tests.zoo import make

X, Y = torch.randn(8, 6), torch.randint(0, 4, (8,))


class Net(nn.Module):
    """A constant, a buffer that is updated, two results."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = F.relu(self.norm(self.up(x)))
        return self.down(h) * torch.tensor([1.0, 2.0, 3.0, 4.0]), h.sum(1)


def loss(out: tuple[Tensor, Tensor], y: Tensor) -> Tensor:
    return F.cross_entropy(out[0], y) + out[1].mean()


def planned(*passes: sx.Pass, mesh: sx.Mesh | None = None) -> sx.ParallelModule:
    torch.manual_seed(0)
    hints = sx.Hints((X,), loss=loss, targets=(Y,), specs={"args.0": "dp, -"}, passes=passes)
    with captured_once("net"):
        return sx.parallelize(Net(), mesh or sx.Mesh(dp=2), hints, virtual=True)


@cache
def of_many_ranks() -> sx.ParallelModule:
    """64 ranks, with a bias of which each takes its slice."""
    case = make("mlp3")
    specs = {"args.0": "dp, -", "targets.0": "dp", **case.megatron_specs, "fc1.bias": "-"}
    x, y = case.args[0].repeat(8, 1), case.targets[0].repeat(8)
    hints = sx.Hints(args=(x,), loss=case.loss, targets=(y,), specs=specs)
    with captured_once(case.name):
        return sx.parallelize(case.model, sx.Mesh(dp=16, tp=4), hints, virtual=True)
