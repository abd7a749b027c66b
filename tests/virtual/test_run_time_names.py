"""What code reaches by names that it makes when it runs, or in modules that are installed, counts as what it names."""

from __future__ import annotations

import contextlib
import copy
import functools
import operator
import os
import weakref
from collections.abc import Callable
from decimal import getcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardfx as sx
from shardfx.ir.capture.python_state.bytecode import reached
from shardfx.ir.capture.python_state.python_state import PythonState
from shardfx.ir.capture.python_state.state_snapshot import state_restored

from .test_calls import batch, near, parallel

X, Y = batch()


class Kind:
    scale = 1.0


class Slotted:
    __slots__ = ("scale",)

    def __init__(self) -> None:
        self.scale = 1.0


class Meta(type):
    held = (1.0,)

    @property
    def scale(cls) -> float:
        return cls.held[0]


class OfMeta(metaclass=Meta):
    pass


@functools.lru_cache
def remembered() -> float:
    return float(TABLE[0])


TABLE, GLOBAL_SCALE, PATH = [1.0], 1.0, operator.attrgetter("options.scale")
ACT = nn.Hardtanh(-1.0, 1.0)


class Reaches(nn.Module):
    """Multiplies by what it reaches in one of many ways."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.options, self.slotted = nn.Linear(8, 4), SimpleNamespace(scale=1.0), Slotted()
        self.kind = Kind()
        self.a_b, self.weak = [1.0], weakref.ref(self.kind)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x) * getattr(self, "_".join(("a", "b")))[0] * PATH(self)
        y = y * getattr(self.slotted, "".join(("sca", "le"))) * getattr(Kind, "sc" + "ale".lower()) * OfMeta.scale
        y = ACT(y) * globals()["_".join(("GLOBAL", "SCALE"))] * remembered() * self.weak().scale
        y = y * float(os.getenv("SCALE_OF_A_TEST", "1.0")) * (getcontext().prec / 28)
        return y * (2.0 if torch.backends.cudnn.benchmark else 1.0)


def cached_anew() -> None:
    TABLE[0] = 3.0
    remembered.cache_clear()


CHANGES: dict[str, Callable[[Any, pytest.MonkeyPatch], Any]] = {
    "getattr": lambda m, patch: m.a_b.__setitem__(0, 3.0),
    "attrgetter": lambda m, patch: setattr(m.options, "scale", 2.0),
    "a weak reference": lambda m, patch: setattr(m.kind, "scale", 3.0),
    "slots": lambda m, patch: setattr(m.slotted, "scale", 3.0),
    "a class": lambda m, patch: patch.setattr(Kind, "scale", 3.0),
    "a metaclass": lambda m, patch: patch.setattr(Meta, "held", (3.0,)),
    "a module without parameters": lambda m, patch: patch.setattr(ACT, "max_val", 0.1),
    "globals()": lambda m, patch: patch.setitem(globals(), "GLOBAL_SCALE", 3.0),
    "a cache": lambda m, patch: cached_anew(),
    "the environment": lambda m, patch: patch.setenv("SCALE_OF_A_TEST", "3.0"),
    "what a function answers": lambda m, patch: patch.setattr(getcontext(), "prec", 14),
    "an installed module": lambda m, patch: torch.backends.cudnn.set_flags(_benchmark=True),
}


@pytest.mark.long
@torch.backends.cudnn.flags(benchmark=False)  # behind which they are as they were
def test_what_is_reached_by_names_made_at_run_time(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = Reaches().double()
    pm = parallel(model)
    assert near(pm(X, Y), F.cross_entropy(model(X), Y))
    for what, change in CHANGES.items():
        state, before = pm._variants._surroundings.state()[0], model(X).detach()
        change(model, monkeypatch)
        assert pm._variants._surroundings.state()[0] > state and not near(model(X), before), what
    assert near(pm(X, Y), F.cross_entropy(model(X), Y))


def half(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(out, y) / 2


def whole(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(out, y)


def test_a_function_with_another_code_is_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """As an editor leaves it that loads code again."""
    pm = parallel(model := nn.Linear(8, 4).double(), loss=half)
    assert near(pm(X, Y), half(model(X), Y))
    monkeypatch.setattr(half, "__code__", whole.__code__)
    assert near(pm(X, Y), F.cross_entropy(model(X), Y))


def test_a_record_that_no_code_names_may_grow() -> None:
    """A text is a name, also where it is one of several."""

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.scale, self.record = nn.Linear(8, 4), [1.0], list[float]()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) * getattr(self, "scale")[0] * vars(self)["scale"][0]  # noqa: B009

    model = Named().double()
    pm = parallel(model)
    model.record.append(pm(X, Y).item())
    assert near(pm(X, Y), F.cross_entropy(model(X), Y)) and len(pm._variants.known) == 1


def test_what_code_reaches() -> None:
    def code(self: Any, names: list[str]) -> Any:
        return getattr(self, "a" if names else "b", 0), torch.get_num_threads(), torch.backends.cudnn.enabled

    def dynamic(self: Any, other: Any, names: list[str]) -> Any:
        return [*map(getattr, names)] if other else self.__dict__[names[0]]

    found = reached(code.__code__)
    assert ("torch", "get_num_threads") in found.called and ("torch", "backends", "cudnn", "enabled") in found.chains
    assert found.own and not found.others
    assert reached(dynamic.__code__).own and reached(dynamic.__code__).others
    assert not reached((lambda self: getattr(self, "a", None)).__code__).own


# ---- the model itself ---------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.options, self.power, self.act = SimpleNamespace(scale=1.0), 1.0, nn.ReLU()
        self.first, self.second, self.third = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.unread = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = x
        return self.third(self.act(self.second(self.first(x)))) * self.options.scale * self.power


OTHERS: dict[str, Callable[[Any], Any]] = {
    "another 'options'": lambda m: setattr(m, "options", SimpleNamespace(scale=3.0)),
    "another 'power'": lambda m: setattr(m, "power", 2.0),
    "another module 'act', a GELU": lambda m: setattr(m, "act", nn.GELU()),
    "no 'options'": lambda m: delattr(m, "options"),
    "a 'forward'": lambda m: setattr(m, "forward", lambda x: x),
    "another hook": lambda m: m.first.register_forward_hook(lambda module, given, out: out * 2),
    "other parameters of it are one": lambda m: setattr(m.first, "weight", m.second.weight),
    "a ParametrizedLinear, and was a Linear": lambda m: nn.utils.parametrizations.spectral_norm(m.first),
}


@pytest.mark.long
@pytest.mark.parametrize("what", OTHERS)
def test_a_model_that_was_changed_after_parallelize_is_an_error(what: str) -> None:
    model = Net().double()
    pm = parallel(model)
    assert near(pm(X, Y), F.cross_entropy(model(X), Y))
    model.unread, model.options, model.power = 5, copy.deepcopy(model.options), float("1.0")
    model.eval(), model.zero_grad(), model.load_state_dict(model.state_dict())
    assert near(pm(X, Y), F.cross_entropy(model(X), Y))
    OTHERS[what](model)
    with pytest.raises(sx.Error, match=rf"(?s)changed after parallelize.*{what}.*parallelize it again"):
        pm(X, Y)
    del model
    pm(X, Y)


# ---- what a forward keeps beside the model ------------------------------------------------------------------

CACHE: dict[int, torch.Tensor] = {}
LAST: torch.Tensor | None = None


@functools.lru_cache
def steps(size: int) -> torch.Tensor:
    return torch.arange(size, dtype=torch.float64)


class Keeps(nn.Module):
    """Fills caches, and leaves what it saw in an attribute, a dict, a variable and a class."""

    by_class: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Linear(8, 8) for _ in range(8)))
        self.own: dict[str, torch.Tensor] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        global LAST
        LAST = self.own["x"] = self.seen = Keeps.by_class = x
        if (size := x.shape[-1]) not in CACHE:
            CACHE[size] = torch.arange(size, dtype=x.dtype)
        return self.blocks(x) * CACHE[size] * steps(size)


@pytest.mark.long
def test_what_a_forward_keeps_is_left_as_it_was_found() -> None:
    """No fake tensor stays anywhere, also where a capture fails."""
    torch.manual_seed(0)
    model = Keeps().double()
    alone = copy.deepcopy(model)
    for fails in (True, False):
        hints = {"loss": lambda out, y: out} if fails else {}
        with pytest.raises(sx.Error) if fails else contextlib.nullcontext():
            pm = parallel(model, **hints)
        assert not CACHE and LAST is None and not model.own and not hasattr(model, "seen") and Keeps.by_class is None
        assert type(steps(8)) is torch.Tensor
    assert near(pm(X, Y), F.cross_entropy(alone(X), Y)) and near(pm(X[:6], Y[:6]), F.cross_entropy(alone(X[:6]), Y[:6]))
    assert [*CACHE] == [8] and type(CACHE[8]) is torch.Tensor
    with pytest.raises(sx.Error, match=r"(?s)no input, parameter or buffer.*CACHE.*empty it before parallelize"):
        parallel(model)
    CACHE.clear()


def test_hooks_that_code_puts_in_go_with_what_says_that_they_are_there() -> None:
    """Without its hooks, or with them twice, a model of transformers (DPT) collected other states."""
    model = nn.Linear(2, 2)
    with state_restored(PythonState(model, None)):
        model.register_forward_hook(lambda *given: None)
        model.ready = True
    assert not model._forward_hooks and not hasattr(model, "ready")


def test_a_cache_of_a_scripts_own_decorator_is_left_empty() -> None:
    """What it has to clear it by is an attribute of the function, not of its class."""
    kept: dict[int, torch.Tensor] = {}

    def angles(n: int) -> torch.Tensor:
        if n not in kept:
            kept[n] = torch.arange(n, dtype=torch.float64)
        return kept[n]

    cached: Any = angles
    cached.cache_clear, cached.cache_info = kept.clear, kept.__len__
    model = nn.Linear(8, 4, dtype=torch.float64)
    assert cached in PythonState(model, lambda out: (out * cached(4)).sum()).caches()
