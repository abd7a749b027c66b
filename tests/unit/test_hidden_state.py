"""Hidden state of a model beside its buffers is as in eager code, also where it was planned on meta, or an error that
names it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import shardfx as sx

MESH = sx.Mesh(dp=2)
Code = Callable[[Any, Tensor], Tensor]


class Net(nn.Module):
    """A layer, what was kept, and code that does something with both."""

    def __init__(self, code: Code, kept: object) -> None:
        super().__init__()
        self.fc, self.kept, self.seen = nn.Linear(4, 4), kept, False
        self.register_buffer("centre", torch.ones(4))
        self.register_buffer("later", None)
        self.code = code

    def forward(self, x: Tensor) -> Tensor:
        return self.code(self, x)


def mean_of_first(net: Any, x: Tensor) -> Tensor:
    net.kept = x.mean() if net.kept is None else net.kept
    return net.fc(x) - net.kept


def by_key(net: Any, x: Tensor) -> Tensor:
    if len(x) not in net.kept:
        net.kept[len(x)] = x.detach().abs().max()
    return net.fc(x) / net.kept[len(x)]


def buffer_once(net: Any, x: Tensor) -> Tensor:
    if not net.seen:
        net.centre.copy_(x.detach().mean(0))
        net.seen = True
    return net.fc(x - net.centre)


def of_a_buffer_that_is_written(net: Any, x: Tensor) -> Tensor:
    net.kept = net.centre * 2 if net.kept is None else net.kept
    net.centre.mul_(1.5)
    return net.fc(x) * net.kept


def other_gradient(net: Any, x: Tensor) -> Tensor:
    y = net.fc(x)
    z = y.detach() if net.seen else y
    net.seen = True
    return y * z


def appended(net: Any, x: Tensor) -> Tensor:
    net.kept.append(net.fc(x).detach())
    return net.fc(x) + sum(net.kept)


def flag_in_an_array(net: Any, x: Tensor) -> Tensor:
    y = net.fc(x) * (2.0 if net.kept[0] else 1.0)
    net.kept[0] = 1
    return y


def advanced(net: Any, x: Tensor) -> Tensor:
    return net.fc(x) * float(next(net.kept))


def empty_buffer(net: Any, x: Tensor) -> Tensor:
    net.later = x.detach().mean(0) if net.later is None else net.later
    return net.fc(x) - net.later


CARRIED: dict[str, tuple[Code, Callable[[], object], str]] = {
    "the mean of the first batch": (mean_of_first, lambda: None, "cpu"),
    "something of the first batch by its size": (by_key, dict, "meta"),
    "whether a buffer was filled": (buffer_once, lambda: None, "meta"),
    "what a buffer was": (of_a_buffer_that_is_written, lambda: None, "cpu"),
    "whether it has a gradient": (other_gradient, lambda: None, "cpu"),
    "a list of what there was": (appended, list, "meta"),
    "an iterator": (advanced, itertools.count, "cpu"),
    "a buffer that was none": (empty_buffer, lambda: None, "meta"),
}
"""What is kept, how it begins, and where the model is planned."""


def mean_of(out: Tensor) -> Tensor:
    return (out * out).mean()


@pytest.mark.long
@pytest.mark.parametrize("case", CARRIED)
def test_hidden_state_is_as_in_eager_code(case: str) -> None:
    code, kept, planned_on = CARRIED[case]
    torch.manual_seed(0)
    model = Net(code, kept()).double()
    ours = Net(code, kept()).double().to(planned_on)
    pm = sx.parallelize(
        ours, MESH, sx.Hints(args=(torch.rand(8, 4).double(),), loss=mean_of, specs={"args.0": "dp, -"})
    )
    pm.load_full_state_dict(model.state_dict(), strict=False)
    for _ in range(4):
        x = torch.rand(8, 4).double()
        loss, expected = pm(x), mean_of(model(x))
        loss.backward(), expected.backward()
        torch.testing.assert_close(loss, expected)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(pm.full_grads()[name], parameter.grad)
    state = pm.full_state_dict()
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(state[name] if name in state else getattr(pm, name), buffer)


def test_hidden_state_that_cannot_be_traced_is_named() -> None:
    model, x = Net(flag_in_an_array, np.zeros(1)), torch.rand(8, 4)
    with pytest.raises(sx.Error, match="Dynamo cannot trace"):
        sx.parallelize(model, MESH, sx.Hints(args=(x,), loss=mean_of))
    assert vars(model)["seen"] is False and model.later is None


# ---- what may be kept


def losses_of_this_call(net: Any, x: Tensor) -> Tensor:
    net.kept.clear()
    net.kept.append(net.fc(x).pow(2).mean())
    return net.fc(x) + sum(net.kept)


class Frozen(dict[str, float]):
    """A config that refuses changes."""

    def update(self, *given: Any, **more: Any) -> None:
        raise RuntimeError("a config is final")

    pop = clear = update


def of_a_config(net: Any, x: Tensor) -> Tensor:
    return net.fc(x) * net.kept["factor"]


KEPT: dict[str, tuple[Code, Callable[[], object]]] = {
    "losses of this call": (losses_of_this_call, list),
    "a config that refuses changes": (of_a_config, lambda: Frozen(factor=2.0)),
}


@pytest.mark.long
@pytest.mark.parametrize("case", KEPT)
def test_state_that_is_equal_at_each_call_is_allowed(case: str) -> None:
    """In all specializations."""
    code, kept = KEPT[case]
    model, ours = Net(code, kept()), Net(code, kept())
    ours.load_state_dict(model.state_dict())
    pm = sx.parallelize(ours, MESH, sx.Hints(args=(torch.rand(8, 4),), loss=mean_of))
    for rows in (8, 4, 8):
        x = torch.rand(rows, 4)
        assert torch.allclose(pm(x), mean_of(model(x)))
    pm.eval(), model.eval()
    with torch.no_grad():
        assert torch.allclose(pm(x), mean_of(model(x)))


# ---- from one call signature to another


def of_training(net: Any, x: Tensor) -> Tensor:
    if net.training:
        net.kept = x.detach().mean(0)
    return net.fc(x) if net.kept is None else net.fc(x) - net.kept


@pytest.mark.long
def test_hidden_state_of_one_specialization_is_that_of_another() -> None:
    model, ours = Net(of_training, None), Net(of_training, None)
    ours.load_state_dict(model.state_dict())
    pm = sx.parallelize(ours, MESH, sx.Hints(args=(torch.rand(8, 4),), loss=mean_of))
    for mode in (True, False, True):
        x = torch.rand(8, 4)
        pm.train(mode), model.train(mode)
        torch.testing.assert_close(pm(x), mean_of(model(x)))
