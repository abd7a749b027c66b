"""Repeated blocks of a model: found, and left out, so that capture costs by distinct block and not by depth.

The model runs once without numbers, and what it calls is written on a :class:`.tape.Tape`. A *repeat* is a stretch of
blocks of one list (``model.layers.3`` to ``model.layers.79``) whose parts of the tape are call by call the same:
parameters of the same place and kind, and whatever comes from the block before comes from the same call of it.
:func:`shorten` keeps four blocks around those that are left out; the tape of what is left must then be the first tape
without the others. :mod:`shardfx.ir.unfolding.unfold` puts them back into the graph, when it is planned.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from shardfx.ir.repeat import AROUND, Repeat

from .shells import Outcomes
from .tape import LEAST, Forward, record

TRACED_WHOLE = "repeated blocks were traced one by one, which takes longer"


@dataclass(frozen=True)
class Shortened:
    """The model with as few blocks as are needed, and what was left out: nothing, if it is not sure. ``note`` says why
    a model that has long lists is traced whole."""

    model: nn.Module
    repeats: tuple[Repeat, ...] = ()
    note: str = ""
    outcomes: Outcomes | None = None
    """What its calls gave, where it was run."""


def find_repeats(
    model: nn.Module, tensors: Sequence[torch.Tensor], forward: Forward, aliases: Mapping[str, str]
) -> Shortened:
    """Find the equal blocks of a model, and leave out what can be put back.

    Args:
        aliases: for every parameter the first name of the same tensor; blocks that share one by
            two names are not equal.
    """
    lists = numbered(model)
    if not lists:
        return Shortened(model)
    try:
        outcomes = Outcomes((*model.parameters(), *model.buffers(), *tensors))
        tape = record(model, tensors, forward, lists, outcomes)
        repeats = [r for path in lists if (r := tape.repeat(path)) is not None and _untied(r, aliases)]
        if not repeats:
            return Shortened(model, outcomes=outcomes)
        short = shorten(model, repeats)
        if record(short, tensors, forward, lists, outcomes).calls == tape.without(repeats):
            return Shortened(short, tuple(repeats), outcomes=outcomes)
        why = "without some of its equal blocks the model calls other ops"
    except Exception as error:  # the whole model is captured then, which says what stands in the way of that
        why = f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}"
    return Shortened(model, note=f"{TRACED_WHOLE} ({why})")


def numbered(model: nn.Module) -> list[str]:
    """The paths of the lists that are long enough, of lists within lists the outer ones."""
    found: list[str] = []
    for path, module in model.named_modules():
        numbers = [int(name) for name in module._modules if name.isdigit()]
        enough = len(numbers) >= 2 * AROUND + LEAST and numbers == sorted(numbers)
        if path and enough and not any(path.startswith(outer + ".") for outer in found):
            found.append(path)
    return found


def _untied(repeat: Repeat, aliases: Mapping[str, str]) -> bool:
    """Whether no tensor of the blocks that are alike has two names."""
    alike = range(repeat.first - 1, repeat.last + 2)
    return not any(
        name != first and (repeat.within(name) in alike or repeat.within(first) in alike)
        for name, first in aliases.items()
    )


def shorten(model: nn.Module, repeats: Sequence[Repeat]) -> nn.Module:
    """A copy of the model without the blocks that are left out; the others keep their names and tensors."""
    left_out = {repeat.block(index) for repeat in repeats for index in repeat.left_out}

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

    return twin(model, "")
