"""Attention with masks, groups and few heads: ranks compute what one device computes, and it is proven."""

from __future__ import annotations

import subprocess
import sys
from contextlib import nullcontext
from copy import deepcopy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardfx as sx
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
        causal, grouped = self.kind == "causal", self.groups != self.heads
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=grouped)
        return self.out(out.transpose(1, 2).flatten(2))


def loss(out: Tensor) -> Tensor:
    return (out**2).sum()


def inputs() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(4, 6, DIM).double(), torch.randn(4, 5, DIM).double()


WEIGHTS = {"q.weight": "tp, -", "k.weight": "tp, -", "v.weight": "tp, -", "out.weight": "-, tp"}
DATA = {"args.0": "dp, -, -", "args.1": "dp, -, -"}
CASES = [
    ("bias", sx.Mesh(dp=2, tp=2), {**DATA, **WEIGHTS}),
    ("groups", sx.Mesh(dp=2, tp=2), {**DATA, **WEIGHTS}),
    ("causal", sx.Mesh(cp=3), {"args.0": "-, cp, -"}),  # queries are sharded, keys are not
    ("bool", sx.Mesh(cp=3), {"args.0": "-, cp, -"}),
    ("few heads", sx.Mesh(tp=4), WEIGHTS),  # two ranks hold none
]


@pytest.mark.long
@pytest.mark.parametrize(("kind", "mesh", "specs"), CASES)
def test_sharded_attention_equals_one_device(kind: str, mesh: sx.Mesh, specs: dict[str, str]) -> None:
    torch.manual_seed(0)
    model = Attention(kind).double()
    alone = deepcopy(model)
    pm = sx.parallelize(model, mesh, sx.Hints(args=inputs(), loss=loss, specs=specs))
    check_step(pm, alone, loss, inputs(), bound=1e-10)


def test_grouped_attention_at_scale_is_executed_small() -> None:
    """Its rule is not assumed, also where there are as many samples as heads of some groups."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    class Attend(nn.Module):
        forward = staticmethod(attend)

    q, k = (torch.empty(64, heads, 4096, 128, device="meta", requires_grad=True) for heads in (64, 8))
    specs = {"args.0": "dp, tp, -, -", "args.1": "dp, tp, -, -", "args.2": "dp, tp, -, -"}
    pm = sx.parallelize(Attend(), sx.Mesh(dp=64, tp=8), sx.Hints(args=(q, k, k.clone()), loss=loss, specs=specs))
    verdict = pm.verify()
    assert verdict
    assert not [each for each in verdict.assumptions if "attention" in each]


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
def test_saved_program_with_attention_needs_torch_alone(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Attention("bool").double()
    pm = sx.parallelize(model, sx.Mesh(dp=1), sx.Hints(args=inputs(), loss=loss))
    pm.save_programs(tmp_path)
    assert "torch.ops.shardfx.attention" in (tmp_path / "rank0.py").read_text()
    run = subprocess.run(
        [sys.executable, "-c", ALONE.format(folder=str(tmp_path))], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    assert abs(float(run.stdout) - loss(model(*inputs())).item()) < 1e-10


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


class UnderAutocast(nn.Module):
    """Attention of bfloat16 values by queries and keys that are float32 again (or all are), which autocast casts."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.qkv = kind, nn.Linear(8, 16)
        self.bias = nn.Parameter(torch.randn(4, 6, 6)) if kind in ("bias", "written") else None

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16) if self.kind == "in forward" else nullcontext():
            q, k, v = (each.unflatten(-1, (-1, 2)).transpose(1, 2) for each in self.qkv(x).split([8, 4, 4], -1))
            q, k = q * x[..., None, :, :1], k.float()
            k, v = (each.repeat_interleave(2, 1) for each in (k, v))
            apart = torch.arange(6)[:, None] - torch.arange(6)
            masks = {"bias": self.bias, "bool": x[:, None, None, :, 0] > -1, "window": (apart >= 0) & (apart < 3)}
            if self.kind == "written":
                return (q @ k.mT / 2**0.5 + self.bias).softmax(-1) @ v.float()
            return F.scaled_dot_product_attention(q, k, v, masks.get(self.kind), is_causal=self.kind == "causal")


@pytest.mark.long
@pytest.mark.parametrize("kind", ["causal", "bias", "bool", "window", "written", "in forward"])
def test_attention_casts_its_operands_under_autocast(kind: str) -> None:
    torch.manual_seed(0)
    x, model = torch.randn(4, 6, 8), UnderAutocast(kind)
    alone = deepcopy(model)
    hints = sx.Hints(args=(x,), loss=lambda out: out.float().square().mean(), specs={"args.0": "dp, -, -"})
    around = nullcontext() if kind == "in forward" else torch.autocast("cpu", torch.bfloat16)
    with around:
        pm = sx.parallelize(model, sx.Mesh(dp=2), hints, virtual=True)
        ours, out = pm(x), alone(x)
    theirs = out.float().square().mean()
    ours.backward(), theirs.backward()
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-3)
    for name, p in alone.named_parameters():
        torch.testing.assert_close(pm.full_grads()[name], p.grad, rtol=0.05, atol=2e-3)
