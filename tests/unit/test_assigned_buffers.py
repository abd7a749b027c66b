"""Buffers that a forward replaces are written into; what cannot be so is named."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import shardfx as sx


class Kept(nn.Module):
    """A layer, and a module within that replaces its buffers."""

    def __init__(self, how: Callable[[Inner, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.inner = nn.Linear(4, 4), Inner(how)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(self.layer(x))
        return out


class Inner(nn.Module):
    """Two buffers, one that is to come, and what a function makes of them."""

    low: Tensor
    high: Tensor
    later: Tensor | None

    def __init__(self, how: Callable[[Inner, Tensor], Tensor]) -> None:
        super().__init__()
        self.register_buffer("low", torch.arange(4.0))
        self.register_buffer("high", torch.ones(4))
        self.register_buffer("later", None)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        return self.how(self, x)


def follows(module: Inner, x: Tensor) -> Tensor:
    module.low = 0.9 * module.low + 0.1 * x.detach().amin(0)
    module.low = module.low - 1
    return x * module.low


def changes_places(module: Inner, x: Tensor) -> Tensor:
    module.low, module.high = module.high, module.low
    return x + module.low


def turned(module: Inner, x: Tensor) -> Tensor:
    module.low = module.low.unflatten(0, (2, 2)).t().reshape(4)
    module.high = module.low[:1].expand(4)
    return x * module.high


def queued(module: Inner, x: Tensor) -> Tensor:
    before = x + module.low
    module.low = torch.cat([module.low[1:], x.detach().mean().reshape(1)])
    return before


def for_this_call(module: Inner, x: Tensor) -> Tensor:
    module.later = torch.arange(4.0)
    return x * module.later


@pytest.mark.parametrize("how", [follows, changes_places, turned, queued, for_this_call])
def test_what_is_put_in_a_buffers_place_is_what_it_then_holds(how: Callable[..., Tensor]) -> None:
    torch.manual_seed(0)
    model, x = Kept(how).double(), torch.randn(4, 4, dtype=torch.float64)
    alone, own = copy.deepcopy(model), {name: id(each) for name, each in model.inner.named_buffers()}
    hints = sx.Hints(args=(x,), loss=torch.sum, specs={"args.0": "dp, -"})
    pm = sx.parallelize(model, sx.Mesh(dp=2), hints, virtual=True)
    assert {name: id(each) for name, each in model.inner.named_buffers()} == own
    for _ in range(3):
        loss = alone(x).sum()
        assert abs(pm(x).item() - loss.item()) < 1e-12
    state = pm.full_state_dict()
    for name in ("inner.low", "inner.high"):
        assert torch.equal(state[name], alone.get_buffer(name)), name
    assert pm.verify()


def grows(module: Inner, x: Tensor) -> Tensor:
    module.low = torch.cat([module.low, x.detach()[0]])
    return x


def in_another_dtype(module: Inner, x: Tensor) -> Tensor:
    module.low = module.low.float()
    return x


def with_a_gradient(module: Inner, x: Tensor) -> Tensor:
    module.low = module.low + x.mean(0)
    return x * module.low


def taken_away(module: Inner, x: Tensor) -> Tensor:
    del module.low
    return x


@pytest.mark.parametrize(
    ("how", "got"),
    [
        (grows, r"float64 \(8,\)"),
        (in_another_dtype, r"float32 \(4,\)"),
        (with_a_gradient, "with a gradient"),
        (taken_away, "None, or no such buffer"),
    ],
)
@pytest.mark.parametrize("meta", [False, True], ids=["", "meta"])
def test_what_is_no_such_buffer_is_named(how: Callable[..., Tensor], got: str, meta: bool) -> None:
    model, x = Kept(how).double(), torch.randn(4, 4, dtype=torch.float64)
    given = model.to("meta") if meta else model
    own = dict(given.inner.named_buffers())
    with pytest.raises(sx.Error, match=rf"in a buffer's place(.|\n)*inner\.low(.|\n)*{got}"):
        sx.parallelize(given, sx.Mesh(dp=2), sx.Hints(args=(x.to("meta") if meta else x,), loss=torch.sum))
    assert all(each is own[name] for name, each in given.inner.named_buffers())


def remembers(module: Inner, x: Tensor) -> Tensor:
    if module.later is not None:
        return x + module.later
    module.later = x.detach()
    return x


def test_what_is_kept_where_nothing_was_is_named() -> None:
    x = torch.randn(4, 4, dtype=torch.float64)
    with pytest.raises(sx.Error, match=r"keeps something from call to call(.|\n)*inner\.later"):
        sx.parallelize(Kept(remembers).double(), sx.Mesh(dp=2), sx.Hints(args=(x,), loss=torch.sum))
