"""An axis that shards the index of what is added to a partial sum over the same axis: one reduction."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import shardfx as sx
from tests.reference import check_step

Added = Callable[[Tensor, Tensor, Tensor], Tensor]


class Adds(nn.Module):
    def __init__(self, added: Added) -> None:
        super().__init__()
        self.w, self.v = (nn.Parameter(torch.randn(8, 6, dtype=torch.float64)) for _ in range(2))
        self.register_buffer("places", torch.tensor([1, 0, 2, 1, 3, 0, 1, 1]))
        self.added = added

    def forward(self, x: Tensor) -> Tensor:
        return self.added(x @ self.w, self.places, self.v)


ADDED: dict[str, Added] = {
    "index_add": lambda y, to, v: torch.index_add(y, 0, to, v, alpha=2),
    "scatter_add": lambda y, to, v: torch.scatter_add(torch.cat([y, y]), 0, to[:, None].expand(8, 6), v),
    "index_put": lambda y, to, v: torch.index_put(y, (to,), v, accumulate=True),
}


@pytest.mark.long
@pytest.mark.parametrize("name", ADDED)
def test_what_is_added_to_a_partial_sum_is_reduced_once(name: str) -> None:
    torch.manual_seed(0)
    model, x = Adds(ADDED[name]), torch.randn(4, 8, dtype=torch.float64)
    hints = sx.Hints(args=(x,), specs={"args.0": "-, tp", "w": "tp, -", "v": "tp, -"}, loss=lambda y: (y**2).sum())
    pm = sx.parallelize(model, sx.Mesh(tp=2), hints)
    forward = [node for node in pm.planned.nodes if node.phase.name == "FORWARD" and str(node.op).startswith("comm.")]
    assert len(forward) == 1, pm.planned
    check_step(pm, model, lambda y: (y**2).sum(), (x,), bound=1e-12)
