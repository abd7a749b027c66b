"""Runs a case: its ranks against one device."""

from __future__ import annotations

import linecache
import logging
import sys
import types
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

import shardfx as sx
import shardfx.compile
from shardfx.ir.capture.trace import Captured, capture
from shardfx.ir.mesh import Mesh

from .case import Case, Net

OURS = ("graph is wrong", "verif", "failed:")
"""Words of errors that are no caller's: a pass that broke the graph, or raised."""


LATE = ("must have come to this place", "too few rows to be done in micro-batches")
"""What may be refused of another call signature, which is planned when it is made first."""


@dataclass(frozen=True)
class Outcome:
    """``equal``, ``refused`` (a ``shardfx.Error`` when it is planned), or ``failed``; and how, in a few words.

    ``kind`` is the same for failures of one sort; ``alarm`` says why an equal case does not verify.
    """

    result: str
    kind: str = ""
    text: str = ""
    alarm: str = ""


class Captures:
    """Captured models: those who share a model differ in mesh and hints alone."""

    def __init__(self) -> None:
        self.net: Net | None = None
        self._known: dict[tuple[Any, ...], Captured] = {}

    def __call__(self, model: torch.nn.Module, mesh: Mesh, **given: Any) -> Captured:
        of_step = (given["clip"], given["optimizer"], given["batch_parts"], given["compute"])
        key = (self.net, model.training, given["loss"] is None, *of_step)
        if key not in self._known:
            if len(self._known) > 8:
                self._known.clear()
            self._known[key] = capture(model, mesh, **given)
        graph = self._known[key].graph.copy()
        graph.mesh = mesh
        return replace(self._known[key], graph=graph)


@contextmanager
def sharing() -> Iterator[Captures]:
    """Within, a model is captured once; random numbers, the default dtype and the log stay as they are."""
    captures, dtype, log = Captures(), torch.get_default_dtype(), logging.getLogger("shardfx")
    level = log.level
    shardfx.compile.capture = captures  # type: ignore[assignment]
    try:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            log.setLevel(logging.ERROR)  # that another mode is planned
            yield captures
    finally:
        shardfx.compile.capture = capture
        log.setLevel(level)
        torch.set_default_dtype(dtype)


def check(case: Case, captures: Captures, verify: bool = False) -> Outcome:
    """Run a case; ``captures`` is what :func:`sharing` gives."""
    captures.net = case.net
    name, source = f"<case {case.seed}>", case.script()
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)
    module = sys.modules["fuzz_case"] = types.ModuleType("fuzz_case")
    scope: dict[str, Any] = vars(module)
    exec(compile(source, name, "exec"), scope)
    given = scope["make"]()
    try:
        pm = scope["parallel"](*given)
    except sx.Error as error:
        if any(word in error.what for word in OURS):
            return failure(error)
        return Outcome("refused", error.what, str(error))
    except Exception as error:
        return failure(error)
    try:
        found = scope["differences"](given[0], pm, *given[1:])
    except sx.Error as error:
        if any(word in error.what for word in LATE):
            return Outcome("refused", error.what, str(error))
        return failure(error)
    except Exception as error:
        return failure(error)
    wrong = {what: error for what, error in found.items() if not error < scope["CLOSE"]}
    if wrong:
        what = next(iter(wrong))
        text = ", ".join(f"{what} by {error:.1e}" for what, error in wrong.items())
        return Outcome("failed", f"differs: {what.split()[0]}", text)
    return Outcome("equal", alarm=alarm(pm) if verify else "")


def alarm(pm: sx.ParallelModule) -> str:
    """Why a program that is right does not verify; empty where it does."""
    try:
        verdict = pm.verify()
    except Exception as error:  # of the verifier, on a program that runs
        return f"{type(error).__name__}: {error}"
    return "" if verdict else str(verdict)


def failure(error: Exception) -> Outcome:
    """An exception that should not be: the same kind where its type and the words before numbers are the same."""
    got = str(getattr(error, "got", "") or "").split("\n")[0]
    words = f"{type(error).__name__} {str(error).splitlines()[0] if str(error) else ''} {got[:40]}"
    kind = "".join(c for c in words if not c.isdigit())[:90]
    return Outcome("failed", kind, f"{type(error).__name__}: {error}")
