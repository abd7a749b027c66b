"""Code that asks whether it is compiled: that it did is noted, and it may be told that it is not.

The functions of torch that are asked stay themselves, for a process keeps what it once looked up: code that imported
one, and ``torch.compile``, which knows them by identity. For a while they have another code.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch

Answer = Callable[[bool], bool]
"""What code is told that asks, of what is so."""


class Here(threading.local):
    """What is answered in this thread, the innermost last: a loss may capture a model while it is captured."""

    def __init__(self) -> None:
        self.answers: list[Answer] = []


def _compiling() -> bool:
    return _shardfx_compiling()  # type: ignore[name-defined, no-any-return] # noqa: F821 (among torch's own names)


def _exporting() -> bool:
    return _shardfx_exporting()  # type: ignore[name-defined, no-any-return] # noqa: F821


ASKED: dict[str, tuple[Any, Any, Any]] = {
    f"_shardfx_{other.__name__[1:]}": (function, function.__code__, other.__code__)
    for function, other in ((torch.compiler.is_compiling, _compiling), (torch.compiler.is_exporting, _exporting))
}
"""What is asked, its own code and the one that it gets for a while; by the name under which that finds the answer."""
PASSED_ON = frozenset(function.__name__ for function, *_ in ASKED.values())
"""The names of torch's functions that ask these for others."""
_here = Here()
_lock = threading.Lock()
_within = 0
"""How many are answered at the moment, in all threads."""


@contextmanager
def answering(answer: Answer) -> Iterator[None]:
    """Within, code that asks whether it is compiled or exported gets this answer; torch's own is told the truth."""
    _here.answers.append(answer)
    _enter(1)
    try:
        yield
    finally:
        _enter(-1)
        _here.answers.pop()


def _enter(by: int) -> None:
    global _within
    with _lock:
        _within += by
        for name, (function, own, other) in ASKED.items():
            if _within:
                function.__globals__.setdefault(name, _answers(FunctionType(own, function.__globals__)))
            function.__code__ = other if _within else own


def _answers(truth: Callable[[], bool]) -> Callable[[], bool]:
    def answers() -> bool:
        frame = sys._getframe(2)
        while frame.f_code.co_name in PASSED_ON and frame.f_back is not None:
            frame = frame.f_back
        of_torch = frame.f_globals.get("__name__", "").partition(".")[0] == "torch"
        return truth() if of_torch or not _here.answers else _here.answers[-1](truth())

    return answers
