"""Why the step of an optimizer is no part of a program, in words."""

from __future__ import annotations

from dataclasses import replace

from shardfx.ir.capture.update.made_groups import WHERE, Group
from shardfx.ir.errors import Error

OUTSIDE = (
    "or leave optimizer= out of the hints, and step it outside, of pm.parameters() (with its closure, if it has one)"
)


def refusal(group: Group, error: Exception) -> Error:
    """That a step cannot be traced, for it raised; an error of ours says itself why."""
    if isinstance(error, Error):
        return error
    text = f"{type(error).__name__}: {error}".split("\n")[0][:300]
    return Error(
        f"the step of {group.kind} cannot be traced",
        where=f"{WHERE}  {_line(group, error)}",
        expected="a step that computes with tensors, and decides nothing by a number that it reads out of one",
        got=text,
        remedy=f"use torch.where, torch.minimum, ... in it, and no .item(), float(...) or if on a tensor; {OUTSIDE}",
    )


def not_alone(group: Group, got: str, remedy: str = "keep what changes from step to step in self.state[p]") -> Error:
    """That a step is not one of each parameter by itself."""
    return Error(
        f"the step of {group.kind} is none of one parameter alone, with states that are tensors",
        where=f"{WHERE}  {group.where}",
        expected="a step that for each parameter depends on its gradient, its states and lr",
        got=got,
        remedy=f"{remedy}; {OUTSIDE}",
    )


def _line(group: Group, error: Exception) -> str:
    """The last line of the optimizer's own file that raised."""
    own, trace, line = group.where, error.__traceback__, 0
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == own.file:
            line = trace.tb_lineno
        trace = trace.tb_next
    return str(replace(own, line=line or own.line))
