"""Equal blocks planned once, or one by one: the plan of a deep model is the same text, with the same reasons."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import pytest
import torch

import shardfx as sx
from shardfx.ir.capture.trace import capture
from tests.plans import MESHES
from tests.reference import check_step
from tests.stepped import KINDS


class Block(torch.nn.Module):
    """A norm and a product, each with a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fc = torch.nn.LayerNorm(6), torch.nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.fc(self.norm(x)))


def chain() -> torch.nn.Module:
    """Seven blocks between two products."""
    torch.manual_seed(0)
    blocks = torch.nn.Sequential(*[Block() for _ in range(7)])
    return torch.nn.Sequential(torch.nn.Linear(4, 6), blocks, torch.nn.Linear(6, 2)).double()


def decayed(params: Any) -> torch.optim.Optimizer:
    """Two groups, each through all blocks."""
    decay, rest = ([p for p in params.named.values() if (p.ndim > 1) is wide] for wide in (True, False))
    return torch.optim.AdamW([{"params": decay}, {"params": rest, "weight_decay": 0.0}], lr=1e-2)


X, Y = torch.linspace(-1, 1, 32).reshape(8, 4).double(), torch.linspace(0, 1, 16).reshape(8, 2).double()
STEPPED: dict[str, dict[str, Any]] = {
    "two groups, zero 3": {"optimizer": decayed, "zero": 3, "clip_grad_norm": 0.1},
    "norms, another first step": {"optimizer": KINDS["Lamb"], "zero": 1},
}


def deep_step(mesh: str = "dp2tp2", **more: Any) -> sx.ParallelModule:
    specs = {"args.0": "dp, -", "targets.0": "dp, -"} | ({"1.*.fc.weight": "tp, -"} if "tp" in mesh else {})
    loss = torch.nn.functional.mse_loss
    hints = sx.Hints(args=(X,), targets=(Y,), loss=loss, specs=specs, zero_min_numel=0, **more)
    return sx.parallelize(chain(), MESHES[mesh], hints, virtual=True)


@pytest.mark.long
@pytest.mark.parametrize("how", STEPPED)
def test_the_update_of_equal_blocks_is_planned_once(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    short = deep_step(**STEPPED[how])
    monkeypatch.setattr("shardfx.compile.capture", partial(capture, fold=False))
    whole = deep_step(**STEPPED[how])
    graphs = short._compiled.captured, whole._compiled.captured
    assert graphs[0].graph.repeats and graphs[0].update == graphs[1].update
    assert str(short.captured) == str(whole.captured)
    plans = [re.sub(r"^note .*\n", "", str(pm.planned), flags=re.MULTILINE) for pm in (short, whole)]
    assert plans[0] == plans[1]
    assert not any("one by one" in note for note in short.planned.notes)


@pytest.mark.long
def test_gradient_norm_of_a_deep_model_is_one_transfer_per_group() -> None:
    """The sums of squares are coalesced, those over the same axes."""
    pm = deep_step(optimizer=KINDS["AdamW"], clip_grad_norm=0.1, zero=1)
    sums = [n for n in pm.planned.nodes if str(n.op) == "comm.all_reduce" and n.phase.value == "update"]
    assert len(sums) == len({tuple(node.kwargs["axes"]) for node in sums}) > 0


WHOLE = (torch.ops.aten._native_batch_norm_legit_functional.default, torch.ops.aten._native_batch_norm_legit.default)
"""Those that make their own statistics, of all that they are given."""


@pytest.mark.long
def test_ten_batch_norms_in_a_row_are_all_decomposed() -> None:
    """Each is in the way of the sharding of the batch, which the next one sees only when it is out of it."""
    torch.manual_seed(0)
    model, x = (
        torch.nn.Sequential(*[torch.nn.BatchNorm1d(2) for _ in range(10)]).double(),
        torch.randn(6, 2, dtype=torch.float64),
    )
    hints = sx.Hints(args=(x,), loss=lambda out: (out**3).sum(), specs={"args.0": "dp, -"})
    pm = sx.parallelize(model, sx.Mesh(dp=2), hints, virtual=True)
    assert not [node for node in pm.planned.nodes if node.op in WHOLE]
    check_step(pm, model, lambda out: (out**3).sum(), (x,), bound=1e-7)


def by_layer(params: Any) -> torch.optim.Optimizer:
    """Deeper blocks learn faster."""
    return torch.optim.SGD([{"params": [p], "lr": 0.1 / (i + 1)} for i, p in enumerate(params)], momentum=0.9)


@pytest.mark.long
def test_equal_blocks_that_are_stepped_differently_are_planned_one_by_one() -> None:
    pm = deep_step(mesh="dp2", optimizer=by_layer, clip_grad_norm=0.1, zero=1)
    assert any("one by one" in note and "stepped differently" in note for note in pm.planned.notes)
    pm.step(X, Y)
    assert not pm._compiled.captured.graph.repeats and pm.verify()
