"""attention-layout: what elementwise kernels give fused attention lies row by row."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardfx as sx
from shardfx.ir.cost.replay import values
from shardfx.ir.program.lower import lower
from shardfx.module.programs import TRAIN
from shardfx.passes.rank import AttentionLayout, RankContext, run_rank_passes
from tests.reference import check_step


class Attention(nn.Module):
    """Self-attention [batch, rows, 8] with rotary positions and a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8, bias=False) for _ in range(4))
        self.register_buffer("mask", torch.ones(6, 6, dtype=torch.bool).tril())
        self.register_buffer("angles", torch.rand(6, 2))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (2, 4)).transpose(1, 2) for f in (self.q, self.k, self.v))
        out = F.scaled_dot_product_attention(self.rotated(q), self.rotated(k), v, self.mask)
        return x + self.o(out.transpose(1, 2).flatten(2))

    def rotated(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, dim=-1)
        cos, sin = self.angles.cos(), self.angles.sin()
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


@pytest.mark.long
@pytest.mark.parametrize(("mesh", "specs"), [(sx.Mesh(dp=1), {}), (sx.Mesh(dp=2), {"args.0": "dp, -, -"})], ids=str)
def test_queries_and_keys_lie_row_by_row_and_gradients_are_right(mesh: sx.Mesh, specs: dict[str, str]) -> None:
    torch.manual_seed(0)
    model, x = Attention().double(), torch.rand(2, 6, 8, dtype=torch.float64)
    pm = sx.parallelize(model, mesh, sx.Hints(args=(x,), loss=torch.sum, specs=specs), virtual=True)
    program = lower(pm.planned, 0, pm._rule_book, TRAIN, torch.device("cpu"))
    laid = run_rank_passes(program, [AttentionLayout()], RankContext(pm.planned))
    lies, calls = values(laid), [n for n in laid.graph.nodes if "attention" in str(n.target)]
    assert len(calls) == 2
    for call, first in zip(calls, (0, 1), strict=True):  # in the backward the gradient is in front
        assert all(lies[each.name].transpose(1, 2).is_contiguous() for each in call.args[first : first + 3])
    pm.compile(backend="aot_eager")
    check_step(pm, model, torch.sum, (x,))
