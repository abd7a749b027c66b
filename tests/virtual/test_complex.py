"""Complex numbers whose products and sums are made in pieces: a product of them is no product of their parts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import shardfx as sx
from tests.reference import rel_err

OF: dict[str, Callable[[Tensor], Tensor]] = {
    "product, real": lambda z: z.prod(1).real,
    "product, parts": lambda z: torch.view_as_real(z.prod(1)).flip(-1),
    "product, size": lambda z: z.prod(1).reshape(2, -1).conj().abs(),
    "sum, real": lambda z: z.sum(1).real * 2,
    "mean, parts": lambda z: torch.view_as_complex(torch.view_as_real(z.mean(1)).flip(-1)).abs(),
}


class Turned(nn.Module):
    def __init__(self, of: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.of = of

    def forward(self, x: Tensor) -> Tensor:
        return self.of(torch.complex(x, 2 - x))


@pytest.mark.parametrize("name", OF)
def test_what_is_made_of_complex_numbers_in_pieces(name: str) -> None:
    model, x = Turned(OF[name]), torch.rand(4, 8, dtype=torch.float64) + 0.5
    pm = sx.parallelize(model, sx.Mesh(tp=2), sx.Hints((x,), specs={"args.0": "-, tp"}))
    assert rel_err(pm(x), model(x)) < 1e-12 and pm.verify()
