"""Optimizers on pieces: one that looks at a whole tensor (Adafactor, Muon, LAMB) computes something else on its pieces.

Whether an optimizer does is found out by running it, on a small tensor and on the two halves of it, with the options
of each group and on the device of the pieces. One that cannot be tried is warned of, once.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from shardfx.ir.errors import Error, ShardfxWarning
from shardfx.module.stepping.trial import STEPS, Trial, tried

from .program_optimizer import ProgramOptimizer

_pieces = WeakIdKeyDictionary()


def watch_pieces(parameters: Mapping[str, Iterable[nn.Parameter]], stepped: Collection[str] = ()) -> None:
    """Have the first step of an optimizer of any of these parameters looked at, where they are pieces of one tensor, or
    ``stepped`` by the program (names)."""
    for name, pieces in parameters.items():
        held = list(pieces)
        _stepped.update(dict.fromkeys(held if name in stepped else (), True))
        if len(held) > 1:
            _pieces.update(dict.fromkeys(held, name))
    if (_pieces or stepped) and not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_before_step))


_hooks: list[Any] = []
_stepped = WeakIdKeyDictionary()
"""The parameters that a program steps."""


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if isinstance(optimizer, ProgramOptimizer):  # which says itself that it is a part of the program
        return
    reject_stepped(optimizer)
    kind = type(optimizer).__name__
    for number, group in enumerate(optimizer.param_groups):
        piece = next((p for p in group["params"] if p in _pieces), None)
        if piece is None:
            continue
        found = tried(optimizer, number, piece.device)
        if found.apart:
            raise Error(
                f"{kind} looks at whole tensors, and {_pieces[piece]!r} is in pieces here",
                where=f"{kind}.step()",
                expected="an optimizer that works on each element alone, such as AdamW",
                got=f"after {STEPS} steps a tensor and its halves are {found.apart:.2g} apart",
                remedy="Hints(optimizer=...), whose step is a part of the program and sees the whole; or leave these "
                "parameters uncut; or run under torchrun, where parameters are DTensors",
            )
        if found.failed and found not in _told:
            _told.append(found)
            text = f"{kind} could not be tried on pieces ({found.failed}), and {_pieces[piece]!r} is in pieces here: "
            warnings.warn(f"{text}if it looks at whole tensors, its steps are wrong", ShardfxWarning, stacklevel=3)


def reject_stepped(optimizer: torch.optim.Optimizer) -> None:
    """Raise where an optimizer steps parameters that a program steps.

    Raises:
        Error: it does.
    """
    for group in optimizer.param_groups:
        if not isinstance(optimizer, ProgramOptimizer) and any(p in _stepped for p in group["params"]):
            raise Error(
                f"{type(optimizer).__name__} steps parameters that have an optimizer in the program",
                where=f"{type(optimizer).__name__}.step()",
                expected="pm.step(x, y)",
                got="a second optimizer of the same parameters",
                remedy="leave it out; or leave Hints(optimizer=...) out, and go on as with any module",
            )


_told: list[Trial] = []
