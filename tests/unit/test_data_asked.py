"""Code that asks what a tensor holds, in whatever way, is told that it does, and what to do."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import shardfx as sx

ASKS: dict[str, Callable[[Tensor], object]] = {
    "a set": lambda n: len(set(n.tolist())) > 1,
    "an array": lambda n: n.cpu().numpy().sum() > 1,
}


class Asks(nn.Module):
    def __init__(self, ask: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.ask = ask

    def forward(self, x: Tensor, n: Tensor) -> Tensor:
        return x * 2 if self.ask(n) else x


@pytest.mark.parametrize("ask", ASKS)
def test_whatever_asks_the_data_is_said_to(ask: str) -> None:
    hints = sx.Hints(args=(torch.rand(4, 4), torch.tensor([1, 2, 0])))
    with pytest.raises(sx.Error, match="depend on the data") as caught:
        sx.parallelize(Asks(ASKS[ask]), sx.Mesh(dp=2), hints)
    assert "Hints(guard=True)" in str(caught.value.remedy)
