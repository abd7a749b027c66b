"""``x.data`` in a model's code is ``x.detach()``, also where real tensors go along; and nothing of an example stays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardfx as sx
from tests.reference import check_step


class OwnSoftmax(torch.autograd.Function):
    """With a gradient of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.softmax(-1)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return torch.ops.aten._softmax_backward_data.default(grad, y, -1, y.dtype)


def clamped(x: Tensor) -> Tensor:
    y = x.clone()
    y.data.clamp_(min=0)
    return y * x


def replaced(x: Tensor) -> Tensor:
    y = x.clone()
    y.data = x * 2
    return y


def written(x: Tensor) -> Tensor:
    y = x.exp()
    y.data.mul_(2)
    return y * x


USES: dict[str, Callable[[Tensor], Tensor]] = {
    "a statistic": lambda x: x * x.data.min(),
    "a factor": lambda x: x * x.T.data.T,
    "a mask": lambda x: x.masked_fill(x.data > 0, 0.0),
    "written into": clamped,
    "a function's own": OwnSoftmax.apply,
}


class Uses(nn.Module):
    """A layer, and a function of what it gives."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4, dtype=torch.float64)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.layer(x))


def parallel(model: nn.Module, guard: bool = False) -> sx.ParallelModule:
    x = torch.ones(4, 4, dtype=torch.float64)
    hints = sx.Hints(args=(x,), loss=torch.sum, specs={"args.0": "dp, -"}, guard=guard)
    return sx.parallelize(model, sx.Mesh(dp=2), hints, virtual=True)


@pytest.mark.long
@pytest.mark.parametrize("guard", [False, True])
@pytest.mark.parametrize("name", USES)
def test_it_equals_one_device(name: str, guard: bool) -> None:
    torch.manual_seed(0)
    model, x = Uses(USES[name]), torch.randn(4, 4, dtype=torch.float64)
    pm = parallel(model, guard)
    check_step(pm, model, torch.sum, (x,), bound=1e-12)


def test_what_replaces_or_hides_a_value_is_an_error() -> None:
    with pytest.raises(sx.Error, match="replaces what a tensor holds") as raised:
        parallel(Uses(replaced))
    assert "y.data = x * 2" in str(raised.value.where)
    with pytest.raises(sx.Error, match="modified by an inplace operation"):
        parallel(Uses(written))
