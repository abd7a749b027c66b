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


class Views(nn.Module):
    """Gives views of a buffer that it writes into later."""

    def __init__(self, view: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.view = nn.Linear(4, 4), view
        self.register_buffer("held", torch.arange(8.0).view(2, 4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        held = self.get_buffer("held")
        seen = self.view(held)
        held.mul_(2)[:, 1].add_(1)
        return self.layer(x), seen


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda held: held.t()[1:].detach(),
    "a copy": lambda held: held[0].clone(),
}


@pytest.mark.long
@pytest.mark.parametrize("view", VIEWS)
def test_results_that_are_views_of_what_is_written_later(view: str) -> None:
    model = Views(VIEWS[view])
    with torch.device("meta"):
        ours = Views(VIEWS[view])
    pm = sx.parallelize(ours, sx.Mesh(dp=2), sx.Hints((torch.ones(4, 4),), specs={"args.0": "dp, -"}), virtual=True)
    pm.load_full_state_dict(model.state_dict())
    for rows in (4, 4, 6):
        x = torch.rand(rows, 4)
        for one, other in zip(pm(x), model(x), strict=True):
            torch.testing.assert_close(one, other)
        torch.testing.assert_close(pm.full_state_dict()["held"], model.get_buffer("held"))


class Inner(nn.Module):
    """Two buffers, and what a function makes of them."""

    low: Tensor
    high: Tensor

    def __init__(self, how: Callable[[Inner, Tensor], Tensor]) -> None:
        super().__init__()
        self.register_buffer("low", torch.arange(4.0))
        self.register_buffer("high", torch.ones(4))
        self.weight = nn.Parameter(torch.ones(4), requires_grad=False)
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


def read_before(module: Inner, x: Tensor) -> Tensor:
    """Of what the gradient needs the old one."""
    made = x * module.low
    module.low = module.low.lerp(made.detach().mean(0), 0.1)
    return made


HELD = [follows, changes_places, turned, read_before]


@pytest.mark.long
@pytest.mark.parametrize("how", HELD)
def test_what_is_put_in_a_buffers_place_is_what_it_then_holds(how: Callable[..., Tensor]) -> None:
    torch.manual_seed(0)
    model, x = Kept(how).double(), torch.randn(4, 4, dtype=torch.float64)
    alone, own = copy.deepcopy(model), {name: id(each) for name, each in model.inner.named_buffers()}
    hints = sx.Hints(args=(x,), loss=torch.sum, specs={"args.0": "dp, -"})
    pm = sx.parallelize(model, sx.Mesh(dp=2), hints, virtual=True)
    assert {name: id(each) for name, each in model.inner.named_buffers()} == own
    for _ in range(3):
        loss, found = alone(x).sum(), pm(x)
        assert abs(found.item() - loss.item()) < 1e-12
        for each, mine in ((alone, loss), (pm, found)):
            each.zero_grad()
            mine.backward()
        grads = pm.full_grads()
        assert all((grads[name] - p.grad).abs().max() < 1e-12 for name, p in alone.layer.named_parameters("layer"))
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


@pytest.mark.parametrize(
    ("how", "got"),
    [
        (grows, r"float64 \(8,\)"),
        (in_another_dtype, r"float32 \(4,\)"),
        (with_a_gradient, "with a gradient"),
    ],
)
def test_what_is_no_such_buffer_is_named(how: Callable[..., Tensor], got: str) -> None:
    model, x = Kept(how).double(), torch.randn(4, 4, dtype=torch.float64)
    own = dict(model.inner.named_buffers())
    with pytest.raises(sx.Error, match=rf"in a buffer's place(.|\n)*inner\.low(.|\n)*{got}"):
        sx.parallelize(model, sx.Mesh(dp=2), sx.Hints(args=(x,), loss=torch.sum))
    assert all(each is own[name] for name, each in model.inner.named_buffers())


def another_weight(module: Inner, x: Tensor) -> Tensor:
    made = x * module.weight
    module.weight = nn.Parameter(module.weight.detach() * 0.9)
    return made


def clamped(module: Inner, x: Tensor) -> Tensor:
    with torch.no_grad():
        module.weight.clamp_(-0.5, 0.5)
    return x * module.weight


def changed_behind(module: Inner, x: Tensor) -> Tensor:
    made = x * module.low
    module.low.mul_(0.9)
    return made


def under_one_name(module: Inner, x: Tensor) -> Tensor:
    module.low = module.low * 0.9
    return x * module.low


def test_a_buffer_with_two_names_is_replaced_under_both_or_none() -> None:
    """They were one buffer in the program, and two in the model from then on."""
    model, x = Kept(under_one_name).double(), torch.randn(4, 4, dtype=torch.float64)
    model.inner.high = model.inner.low
    with pytest.raises(sx.Error, match=r"a buffer that has other names too(.|\n)*inner\.low"):
        sx.parallelize(model, sx.Mesh(dp=2), sx.Hints(args=(x,), loss=torch.sum))


@pytest.mark.parametrize(
    ("how", "said"),
    [
        (
            another_weight,
            r"^the model puts something else in a parameter's place(.|\n)*inner\.weight(.|\n)*another one",
        ),
        (clamped, r"changes one of its parameters in place(.|\n)*inner\.weight"),
        (changed_behind, r"on one device as well(.|\n)*modified by an inplace operation"),
    ],
)
def test_what_changes_on_the_way_is_named_and_left(how: Callable[..., Tensor], said: str) -> None:
    model, x = Kept(how).double(), torch.randn(4, 4, dtype=torch.float64)
    before = {name: each.clone() for name, each in model.state_dict().items()}
    with pytest.raises(sx.Error, match=said):
        sx.parallelize(model, sx.Mesh(dp=2), sx.Hints(args=(x,), loss=torch.sum))
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())
