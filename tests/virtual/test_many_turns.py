"""Hundreds of turns: planned, written and proven at the cost of a few, and each of them looked at."""

from __future__ import annotations

from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardfx as sx
from shardfx.ir.program import lower

MANY = 256


class Language(nn.Module):
    def __init__(self, words: int = 40, width: int = 8) -> None:
        super().__init__()
        self.embed, self.norm, self.inner = nn.Embedding(words, width), nn.LayerNorm(width), nn.Linear(width, width)
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(torch.tanh(self.inner(self.embed(x)))))


def next_tokens(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out.flatten(0, 1), y.flatten(), ignore_index=-100)


@cache
def in_turns(count: int, rows: int = 2 * MANY) -> sx.ParallelModule:
    torch.manual_seed(0)
    x, y = torch.randint(40, (rows, 3)), torch.randint(40, (rows, 3))
    y[: rows // 3, 1:] = -100
    hints = sx.Hints(args=(x,), loss=next_tokens, targets=(y,), specs={"args.0": "dp, -"}, accumulate=count)
    return sx.parallelize(Language().double(), sx.Mesh(dp=2), hints, virtual=True)


@pytest.mark.parametrize("rows", [4 * MANY, 3 * MANY + 200], ids=["even", "uneven"])
def test_a_program_of_many_turns_is_written_as_often_as_one_of_few(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[object] = []
    made = lower.Lowering.__post_init__

    def counted(self: lower.Lowering) -> None:
        written.append(self)
        made(self)

    monkeypatch.setattr(lower.Lowering, "__post_init__", counted)
    counts, lengths = [], []
    for count in (4, MANY):
        pm = in_turns(count, rows)
        written.clear()
        lengths.append(len(pm.rank_program(1).graph.nodes))
        counts.append(len(written))
    assert counts[1] <= counts[0] + 3
    assert lengths[1] <= 1.2 * lengths[0]


def test_uneven_turns_are_those_of_one_device() -> None:
    rows = 3 * MANY + 200
    pm = in_turns(MANY, rows)
    assert "time.pick" in str(pm.rank_program(1))
    model = Language().double()
    model.load_state_dict(pm.full_state_dict())
    torch.manual_seed(1)
    x, y = torch.randint(40, (rows, 3)), torch.randint(40, (rows, 3))
    alone, made = next_tokens(model(x), y), pm(x, y)
    alone.backward()
    made.backward()
    assert abs(alone.item() - made.item()) < 1e-12
    grads = pm.full_grads()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert (grads[name] - parameter.grad).abs().max() < 1e-12
