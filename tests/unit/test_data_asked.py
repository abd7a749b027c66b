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


def called(guard: bool) -> None:
    """An encoder that is planned for one mask, and called with another."""
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), 1).eval()
    x, mask = torch.rand(2, 3, 4), torch.zeros(3, 3)
    pm = sx.parallelize(model, sx.Mesh(dp=2), sx.Hints(args=(x, mask), guard=guard), virtual=True)
    pm(x, nn.Transformer.generate_square_subsequent_mask(3))


@pytest.mark.long
@pytest.mark.parametrize("guard", [False, True])
def test_a_model_of_torchs_own_is_named_by_torchs_own_line(guard: bool) -> None:
    """Whether the mask is the causal one: nothing is asked in code of the user's."""
    with pytest.raises(sx.Error) as said:
        called(guard)
    assert said.value.what.startswith("these data lead" if guard else "the model's shapes or control flow depend")
    assert said.value.where is not None and "transformer.py" in said.value.where


def test_a_place_that_nobody_knows_is_not_said() -> None:
    assert "where" not in str(sx.Error("it is not right", where="", got="this"))
    assert sx.Error("it is not right", where="").where is None
