"""A changed program on one of many ranks is refuted with numbers, which are told apart from the model's."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardfx as sx
from shardfx.runtime.verify import numeric_check

aten = torch.ops.aten
CHANGED = 21


class Net(nn.Module):
    """Tokens through two linears."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed, self.norm, self.drop = nn.Embedding(48, 8), nn.LayerNorm(8), nn.Dropout(dropout)
        self.up, self.down = nn.Linear(8, 24), nn.Linear(24, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.drop(F.gelu(self.up(self.norm(self.embed(x))))))


@cache
def plan(dp: int = 8, tp: int = 3, dropout: float = 0.0, **hints: Any) -> sx.ParallelModule:
    torch.manual_seed(0)
    x, y = torch.randint(48, (2 * dp, 3)), torch.randn(2 * dp, 3, 8, dtype=torch.float64)
    specs = {"args.0": "dp, -", "up.weight": "tp, -", "embed.weight": "tp, -"}
    given = sx.Hints(args=(x,), loss=F.mse_loss, targets=(y,), specs=specs, **hints)
    return sx.parallelize(Net(dropout).double(), sx.Mesh(dp=dp, tp=tp), given, virtual=True)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.1)


NORM: dict[str, Any] = {"zero": 2, "zero_min_numel": 1, "optimizer": adamw, "clip_grad_norm": 1.0}


@pytest.mark.long
@pytest.mark.parametrize(
    "hints", [{}, {"zero": 3, "zero_min_numel": 1}, {"dropout": 0.5}, NORM], ids=["plain", "zero-3", "dropout", "clip"]
)
@pytest.mark.one_in(4)
def test_a_changed_program_of_many_ranks_is_refuted_with_numbers(hints: dict[str, Any]) -> None:
    pm = plan(**hints)
    changed = pm.rank_module(CHANGED)
    gelu = next(node for node in changed.graph.nodes if node.target is aten.gelu.default)
    gelu.target = aten.relu.default
    changed.recompile()
    verdict = pm.verify(modules={CHANGED: changed})
    assert verdict.status == "refuted" and verdict.fault is not None
    assert verdict.fault.node == gelu.name and verdict.fault.rank == CHANGED
    with pytest.raises(sx.Error, match="of the model"):
        pm.use({CHANGED: changed})


@pytest.mark.long
def test_a_changed_program_of_ranks_too_many_to_run_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    pm = plan()
    monkeypatch.setattr(numeric_check, "MOST_CALLS", 12 * len(pm.planned.nodes))
    changed = pm.rank_module(CHANGED)
    gelu = next(node for node in changed.graph.nodes if node.target is aten.gelu.default)
    gelu.target = aten.relu.default
    changed.recompile()
    verdict = pm.verify(modules={CHANGED: changed})
    assert verdict.status == "unknown" and verdict.fault is not None and "agrees" not in verdict.why
    assert verdict.fault.node == gelu.name and verdict.fault.rank == CHANGED


@pytest.mark.long
def test_numbers_that_are_nearly_the_same_are_told_apart() -> None:
    pm = plan()
    changed = pm.rank_module(CHANGED)
    gelu = next(node for node in changed.graph.nodes if node.target is aten.gelu.default)
    with changed.graph.inserting_after(gelu):
        twice = changed.graph.call_function(aten.mul.Tensor, (gelu, 1.000001))
    gelu.replace_all_uses_with(twice, lambda user: user is not twice)
    changed.recompile()
    verdict = pm.verify(modules={CHANGED: changed})
    assert verdict.status == "refuted" and verdict.fault is not None
    got, _, rest = verdict.fault.numbers.partition(" is ")[2].partition(", and ")
    assert float(got) != float(rest.split()[0])
