"""Other call signatures of a model in stages run on what training stores, where it stores it."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardfx as sx
from tests.reference import check_step


class Turning(nn.Module):
    """In evaluation the embedding is the head too, and a buffer of the first stage scales what the last one makes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(24, 8), nn.Linear(8, 24)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.register_buffer("scale", torch.rand(8))

    def forward(self, x: Tensor) -> Tensor:
        y = self.embed(x) * self.scale
        for layer in self.layers:
            y = torch.tanh(layer(y))
        out = self.head(y)
        return out if self.training else out + (y * self.scale) @ self.embed.weight.t()


def loss(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out.flatten(0, 1), y.flatten())


@pytest.mark.long
@pytest.mark.parametrize(
    ("ranks", "chunks", "schedule"),
    [(2, 1, "1f1b"), (2, 2, "interleaved"), pytest.param(4, 1, "zb-h1", marks=pytest.mark.slow)],
)
@pytest.mark.one_in(2)
def test_evaluation_sends_weights_from_where_training_holds_them(ranks: int, chunks: int, schedule: str) -> None:
    torch.manual_seed(0)
    model, x, y = Turning().double(), torch.randint(24, (8, 5)), torch.randint(24, (8, 5))
    pipeline = sx.Pipeline(stages_per_rank=chunks, schedule=schedule)
    hints = sx.Hints(args=(x,), loss=loss, targets=(y,), pipeline=pipeline)
    pm = sx.parallelize(copy.deepcopy(model), sx.Mesh(pp=ranks, mb=sx.Loop(4)), hints, virtual=True)
    pm(x, y).backward()
    assert pm.planned.input("embed.weight").at == pm.planned.input("scale").at == (0,)
    pm.eval(), model.eval()
    with torch.no_grad():
        assert (pm(x) - model(x)).abs().max() < 1e-12
        assert (pm(x[:6]) - model(x[:6])).abs().max() < 1e-12
    more = torch.randint(24, (12, 5)), torch.randint(24, (12, 5))
    pm.zero_grad()
    check_step(pm, model, loss, more[:1], more[1:])
