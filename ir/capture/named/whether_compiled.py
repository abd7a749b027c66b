"""Code that asks whether it is compiled: that it did is noted, and it may be told that it is not.

The functions of torch that are asked stay themselves, for a process keeps what it once looked up: code that imported
one, and ``torch.compile``, which knows them by identity. For a while they have another code.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch

Answer = Callable[[bool], bool]
"""What code is told that asks, of what is so."""


def _compiling() -> bool:
    return _shardfx_compiling()  # type: ignore[name-defined, no-any-return] # noqa: F821 (among torch's own names)


def _exporting() -> bool:
    return _shardfx_exporting()  # type: ignore[name-defined, no-any-return] # noqa: F821


ASKED: dict[str, tuple[Any, Any]] = {
    "_shardfx_compiling": (torch.compiler.is_compiling, _compiling),
    "_shardfx_exporting": (torch.compiler.is_exporting, _exporting),
}
"""What is asked, and what has the code that it gets; by the name under which that finds the answer."""
PASSED_ON = frozenset(function.__name__ for function, _ in ASKED.values())
"""The names of torch's functions that ask these for others."""


@contextmanager
def answering(answer: Answer) -> Iterator[None]:
    """Within, code that asks whether it is compiled or exported gets this answer; torch's own is told the truth."""
    codes = {function: function.__code__ for function, _ in ASKED.values()}
    for name, (function, other) in ASKED.items():
        truth = FunctionType(function.__code__, function.__globals__)
        function.__globals__[name] = _answers(truth, answer)
        function.__code__ = other.__code__
    try:
        yield
    finally:
        for name, (function, _) in ASKED.items():
            function.__code__ = codes[function]
            del function.__globals__[name]


def _answers(truth: Callable[[], bool], answer: Answer) -> Callable[[], bool]:
    def answers() -> bool:
        frame = sys._getframe(2)
        while frame.f_code.co_name in PASSED_ON and frame.f_back is not None:
            frame = frame.f_back
        of_torch = frame.f_globals.get("__name__", "").partition(".")[0] == "torch"
        return truth() if of_torch else answer(truth())

    return answers
