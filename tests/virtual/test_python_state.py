"""Python state that a model reads beside its inputs is that of the call, or an error."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardfx as sx

from .test_calls import batch, near, parallel

X, Y = batch()


class Options:
    """An object of no known kind, whose class has something, too."""

    power = 1.0

    def __init__(self) -> None:
        self.by = [1.0]
        self.inner = SimpleNamespace(act=torch.relu)

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner.act(x * self.by[0]) ** self.power


OPTIONS = Options()


def by_default(x: torch.Tensor, by: list[float] = [1.0]) -> torch.Tensor:  # noqa: B006
    return x * by[0]


class Reads(nn.Module):
    """Reads of everything that may change."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        self.linear, self.options = nn.Linear(8, 4), options
        self.table, self.waiting = [1.0] * 1000, deque([1.0])
        self.deep = {"a": {"b": {"c": {"d": {"e": {"f": 1.0}}}}}}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = OPTIONS.scaled(self.options.scaled(self.linear(x))) * (self.table[-1] * self.waiting[0])
        return by_default(y) * self.deep["a"]["b"]["c"]["d"]["e"]["f"]


def put(holder: Any, key: Any, value: Any) -> None:
    holder[key] = value


CHANGES: dict[str, Callable[[Any], Any]] = {
    "an object": lambda m: put(m.options.by, 0, 3.0),
    "a function": lambda m: setattr(m.options.inner, "act", torch.tanh),
    "a long list": lambda m: put(m.table, -1, 3.0),
    "a deque": lambda m: put(m.waiting, 0, 3.0),
    "a nested dict": lambda m: put(m.deep["a"]["b"]["c"]["d"]["e"], "f", 3.0),
    "a class": lambda m: setattr(Options, "power", 2.0),
    "a global object": lambda m: put(OPTIONS.by, 0, 3.0),
    "a default": lambda m: put(by_default.__defaults__[0], 0, 3.0),  # type: ignore[index]
}


@pytest.mark.long
def test_python_state_is_that_of_the_call() -> None:
    """A list of any length and depth, an object, a class, a default, another function."""
    model = Reads(Options()).double()
    pm = parallel(copy.deepcopy(model), max_specializations=20)
    assert near(pm(X, Y), F.cross_entropy(model(X), Y))
    try:
        for what, change in CHANGES.items():
            before = F.cross_entropy(model(X), Y)
            change(model)
            change(pm)
            assert near(pm(X, Y), F.cross_entropy(model(X), Y)) and not near(pm(X, Y), before), what
        assert near(copy.deepcopy(pm)(X, Y), pm(X, Y))
    finally:
        Options.power, OPTIONS.by[0] = 1.0, 1.0
        by_default.__defaults__[0][0] = 1.0  # type: ignore[index]


@pytest.mark.long
def test_configuration_is_not_copied() -> None:
    """Whoever made it may change it; it is not copied with the model."""
    options = Options()
    model = Reads(options).double()
    pm = parallel(model)
    assert pm.options is options
    options.by[0] = 3.0
    assert near(pm(X, Y), F.cross_entropy(model(X), Y))


COUNTED: list[int] = []


@pytest.mark.long
def test_hidden_state_outside_of_the_model() -> None:
    """A list of the script that each call makes longer, once; a generator that is no tensor's is an error."""
    generator = np.random.default_rng(0)

    class Counts(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            COUNTED.append(len(COUNTED))
            return super().forward(x)

    class Draws(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x if generator.random() < 2 else -x)

    pm = parallel(model := Counts(nn.Linear(8, 4)).double())
    begun = len(COUNTED)
    assert begun <= 2
    for calls in (1, 2):
        assert near(pm(X, Y), F.cross_entropy(nn.Sequential.forward(model, X), Y))
        assert COUNTED[begun:] == [*range(begun, begun + calls)]
    with pytest.raises(sx.Error, match="Dynamo cannot trace"):
        parallel(Draws(nn.Linear(8, 4)).double())
