"""How arguments of a program's nodes are written in Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx


def raised_at(error: BaseException, file: str) -> int | None:
    """The line of a generated program that an exception came through."""
    trace, line = error.__traceback__, None
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == file:
            line = trace.tb_lineno
        trace = trace.tb_next
    return line


def argument_text(arg: Any, name: Callable[[Any], str]) -> str:
    """An argument of a node as it stands in a program's source; ``name`` gives a name to what cannot be written."""
    if isinstance(arg, fx.Node):
        return arg.name
    if isinstance(arg, (list, tuple)):
        body = ", ".join(argument_text(a, name) for a in arg)
        return f"[{body}]" if isinstance(arg, list) else f"({body},)"
    return repr(arg) if isinstance(arg, (int, float, bool, str, type(None))) else name(arg)
