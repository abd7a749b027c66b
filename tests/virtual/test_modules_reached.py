"""What code reads of Python's modules that it reaches when it runs counts as what it reads of its own."""

from __future__ import annotations

import builtins
import importlib
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardfx as sx
from shardfx.ir.capture.python_state.python_state import PythonState

from .test_calls import batch, near, parallel

X, Y = batch()
NAME = "options_of_a_test"
SCALE_HERE = 1.0


def imported(self: Any, x: torch.Tensor) -> Any:
    import options_of_a_test as options  # type: ignore[import-not-found]

    return options.SCALE


def imported_from(self: Any, x: torch.Tensor) -> Any:
    from options_of_a_test import SCALE  # type: ignore[import-not-found]

    return SCALE


def of_modules(self: Any, x: torch.Tensor) -> Any:
    return sys.modules["options_of_a_test"].SCALE


def by_a_name_made(self: Any, x: torch.Tensor) -> Any:
    return getattr(sys.modules["options_of_a_test"], "".join(("SCA", "LE")))


def by_vars(self: Any, x: torch.Tensor) -> Any:
    return vars(importlib.import_module("options_of_a_test"))["".join(("SCA", "LE"))]


def by_import(self: Any, x: torch.Tensor) -> Any:
    return __import__("options_of_a_test").TABLE["scale"]


def built_in(self: Any, x: torch.Tensor) -> Any:
    return SCALE_OF_ALL  # type: ignore[name-defined]  # noqa: F821


def by_globals(self: Any, x: torch.Tensor) -> Any:
    return by_globals.__globals__["_".join(("SCALE", "HERE"))]


def by_frame(self: Any, x: torch.Tensor) -> Any:
    return sys._getframe(0).f_globals["_".join(("SCALE", "HERE"))]


def evaluated(self: Any, x: torch.Tensor) -> Any:
    return eval("_".join(("SCALE", "HERE")))


WAYS = [
    imported,
    imported_from,
    of_modules,
    by_a_name_made,
    by_vars,
    by_import,
    built_in,
    by_globals,
    by_frame,
    evaluated,
]


@pytest.fixture
def options(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    made = ModuleType(NAME)
    made.__file__ = f"/nowhere/{NAME}.py"
    vars(made).update(SCALE=1.0, TABLE={"scale": 1.0})
    monkeypatch.setitem(sys.modules, NAME, made)
    monkeypatch.setattr(builtins, "SCALE_OF_ALL", 1.0, raising=False)
    return made


def change(options: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    vars(options).update(SCALE=3.0, TABLE={"scale": 3.0})
    monkeypatch.setattr(builtins, "SCALE_OF_ALL", 3.0)
    monkeypatch.setitem(globals(), "SCALE_HERE", 3.0)


@pytest.mark.long
@pytest.mark.parametrize("way", WAYS)
def test_what_a_module_has_that_code_reaches_when_it_runs(
    way: Any, options: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Scaled(nn.Linear):
        read = way

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * self.read(x)

    around = PythonState(Scaled(8, 4))
    assert around.state()[0] == 0
    change(options, monkeypatch)
    state, changed = around.state()
    assert state == 1 and any("SCALE" in name or "TABLE" in name for name in changed)


def test_such_a_value_is_that_of_the_call(options: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    class Scaled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * of_modules(self, x)

    model = Scaled(8, 4).double()
    pm: sx.ParallelModule = parallel(model)
    assert near(pm(X, Y), F.cross_entropy(model(X), Y))
    change(options, monkeypatch)
    assert near(pm(X, Y), F.cross_entropy(model(X), Y))


def test_modules_of_a_model_are_none_of_pythons() -> None:
    class Counts(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * len([*self.modules()])

    around = PythonState(Counts(8, 4))
    before = around.state()
    globals()["X"], kept = 3, X
    try:
        assert around.state() == before
    finally:
        globals()["X"] = kept
