"""Attention with masks, groups, dropout and few heads: ranks compute what one device computes, and it is proven."""

from __future__ import annotations

import subprocess
import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardfx as sx
from tests.captures import captured_once
from tests.reference import check_step

DIM, HEADS = 16, 4


class Attention(nn.Module):
    """Cross attention from ``x`` to ``y``, with what masks there are."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.groups = 2 if kind in ("groups", "few heads") else HEADS
        self.heads = 2 if kind == "few heads" else HEADS
        self.q = nn.Linear(DIM, self.heads * 4, bias=False)
        self.k, self.v = (nn.Linear(DIM, self.groups * 4, bias=False) for _ in range(2))
        self.out = nn.Linear(self.heads * 4, DIM)
        self.bias = nn.Parameter(torch.randn(HEADS, 6, 5)) if kind == "bias" else None

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = (f(y).unflatten(-1, (self.groups, -1)).transpose(1, 2) for f in (self.k, self.v))
        mask = (y[..., 0] > -1)[:, None, None] if self.kind == "bool" else self.bias
        options: dict[str, Any] = {"is_causal": self.kind == "causal", "enable_gqa": self.groups != self.heads}
        if self.kind == "dropout":
            options["dropout_p"] = 0.3
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **options)
        return self.out(out.transpose(1, 2).flatten(2))


def loss(out: Tensor) -> Tensor:
    return (out**2).sum()


def inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(4, 6, DIM, dtype=dtype), torch.randn(4, 5, DIM, dtype=dtype)


WEIGHTS = {"q.weight": "tp, -", "k.weight": "tp, -", "v.weight": "tp, -", "out.weight": "-, tp"}
DATA = {"args.0": "dp, -, -", "args.1": "dp, -, -"}
CASES = [
    *((kind, sx.Mesh(dp=2, tp=2), {**DATA, **WEIGHTS}) for kind in ("plain", "causal", "bool", "bias", "groups")),
    ("plain", sx.Mesh(cp=3), {"args.0": "-, cp, -"}),  # queries are sharded, keys are whole
    ("bias", sx.Mesh(cp=3), {"args.0": "-, cp, -"}),
    ("bool", sx.Mesh(cp=3), {"args.0": "-, cp, -"}),
    ("few heads", sx.Mesh(tp=4), WEIGHTS),  # two ranks hold none
]


@pytest.mark.long
@pytest.mark.one_in(10)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(("kind", "mesh", "specs"), CASES)
def test_gradients_are_those_of_one_device(kind: str, mesh: sx.Mesh, specs: dict[str, str], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = Attention(kind).to(dtype)
    alone = deepcopy(model)
    with captured_once("attention"):
        pm = sx.parallelize(model, mesh, sx.Hints(args=inputs(dtype), loss=loss, specs=specs))
    check_step(pm, alone, loss, inputs(dtype), bound=1e-10 if dtype == torch.float64 else 1e-3)


ALONE = """
import sys, torch
sys.path.insert(0, {folder!r})
import rank0
state = torch.load({folder!r} + "/rank0.pt", weights_only=True)
with torch.no_grad():
    print(float(rank0.forward(*[state[name] for name in rank0.INPUTS])[0]))
assert not [name for name in sys.modules if name.startswith("shardfx")]
"""


@pytest.mark.long
@pytest.mark.parametrize("kind", ["dropout", pytest.param("bool", marks=pytest.mark.slow)])
def test_a_saved_program_needs_torch_alone(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Attention(kind).double()
    pm = sx.parallelize(model, sx.Mesh(dp=1), sx.Hints(args=inputs(torch.float64), loss=loss))
    pm.save_programs(tmp_path)
    assert "torch.ops.shardfx.attention" in (tmp_path / "rank0.py").read_text()
    run = subprocess.run(
        [sys.executable, "-c", ALONE.format(folder=str(tmp_path))], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    value = float(run.stdout)
    assert abs(value - loss(model(*inputs(torch.float64))).item()) < (1e-10 if kind == "bool" else torch.inf)


@pytest.mark.long
def test_attention_to_nothing_is_nothing() -> None:
    class ToNone(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            q = self.q(x)[:, None]
            return q + F.scaled_dot_product_attention(q, q[:, :, :0], q[:, :, :0])

    torch.manual_seed(0)
    model, x = ToNone(), torch.randn(4, 6, 8)
    hints = sx.Hints(args=(x,), loss=torch.sum, specs={"args.0": "dp, -, -", "q.weight": "tp, -"})
    pm = sx.parallelize(model, sx.Mesh(dp=2, tp=2), hints, virtual=True)
    torch.testing.assert_close(pm(x), model(x).sum())
    assert pm.verify()
