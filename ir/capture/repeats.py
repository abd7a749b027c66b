"""Repeated blocks of a model: found, and left out, so that capture costs by distinct block and not by depth.

The model runs once without numbers, and what it calls is written on a :class:`.tape.Tape`. A *repeat* is a stretch of
blocks of one list (``model.layers.3`` to ``model.layers.79``) whose parts of the tape are call by call the same:
parameters of the same place and kind, and whatever comes from the block before comes from the same call of it.
:func:`shorten` keeps five blocks of it; the tape of what is left must then be the first tape without the others.
:mod:`.unfold` puts them back into the graph.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from .tape import LEAST, Forward, Repeat, record

TRACED_WHOLE = "repeated blocks were traced one by one, which takes longer"


@dataclass(frozen=True)
class Shortened:
    """The model with as few blocks as are needed, and the runs that were shortened: none, if it is not sure. ``note``
    says why a model that has long lists is traced whole."""

    model: nn.Module
    runs: tuple[Repeat, ...] = ()
    note: str = ""


def find_runs(
    model: nn.Module, tensors: Sequence[torch.Tensor], forward: Forward, aliases: Mapping[str, str]
) -> Shortened:
    """Find the runs of a model, and leave out what they repeat.

    Args:
        aliases: for every parameter the first name of the same tensor; blocks that share one by two names are no run.
    """
    lists = numbered(model)
    if not lists:
        return Shortened(model)
    try:
        tape = record(model, tensors, forward, lists)
        runs = [run for path in lists for run in tape.runs(path) if _untied(run, aliases)]
        short = shorten(model, runs)
        if not runs:
            return Shortened(model)
        if record(short, tensors, forward, lists).calls == tape.without(runs):
            return Shortened(short, tuple(runs))
        why = "without some of its equal blocks the model calls other ops"
    except Exception as error:  # the whole model is captured then, which says what stands in the way of that
        why = f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}"
    return Shortened(model, note=f"{TRACED_WHOLE} ({why})")


def numbered(model: nn.Module) -> list[str]:
    """The paths of the lists that are long enough, of lists within lists the outer ones."""
    found: list[str] = []
    for path, module in model.named_modules():
        numbers = [name for name in module._modules if name.isdigit()]
        if path and len(numbers) >= LEAST and not any(path.startswith(outer + ".") for outer in found):
            found.append(path)
    return found


def _untied(run: Repeat, aliases: Mapping[str, str]) -> bool:
    names = [(name, first) for name, first in aliases.items() if name in run or first in run]
    return all(name == first for name, first in names)


def shorten(model: nn.Module, runs: Sequence[Repeat]) -> nn.Module:
    """A copy of the model without the blocks that the runs leave out; the others keep their names and tensors."""
    left_out = {run.block(index) for run in runs for index in run.left_out}

    def twin(module: nn.Module, path: str) -> nn.Module:
        if not any(name.startswith(path) for name in left_out):
            return module
        made = copy.copy(module)
        made.__dict__["_modules"] = {
            name: child if child is None else twin(child, f"{path}{name}.")
            for name, child in module._modules.items()
            if path + name not in left_out
        }
        return made

    return twin(model, "") if runs else model
