"""Optimizers on pieces: one that looks at a whole tensor (Adafactor, Muon, LAMB) computes something else on its pieces.

Whether an optimizer does is found out by running it, on a small tensor and on the two halves of it, with the options
of each group and on the device of the pieces. One that cannot be tried is warned of, once.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from shardfx.ir.errors import Error, ShardfxWarning

from .program_optimizer import ProgramOptimizer

_pieces = WeakIdKeyDictionary()
STEPS = 3


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
    reject_stepped(optimizer)
    kind = type(optimizer).__name__
    for group in optimizer.param_groups:
        piece = next((p for p in group["params"] if p in _pieces), None)
        if piece is None:
            continue
        found = tried(optimizer, group, piece.device)
        if found.apart:
            raise Error(
                f"{kind} looks at whole tensors, and {_pieces[piece]!r} is in pieces here",
                where=f"{kind}.step()",
                expected="an optimizer that works on each element alone, such as AdamW",
                got=f"after {STEPS} steps a tensor and its halves are {found.apart:.2g} apart",
                remedy="run under torchrun, where parameters are DTensors; or leave these parameters uncut",
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


@dataclass(frozen=True, eq=False)
class Trial:
    """How far apart a tensor and its halves are after a few steps, 0 for rounding alone; or why nobody knows."""

    apart: float = 0.0
    failed: str = ""


_known: dict[Hashable, Trial] = {}
_told: list[Trial] = []


def tried(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], device: torch.device) -> Trial:
    """What steps of such an optimizer, with the options of one of its groups, do to pieces on a device."""
    options = {**optimizer.defaults, **{name: value for name, value in group.items() if name != "params"}}
    key = type(optimizer), device.type, repr(sorted(options.items(), key=lambda item: str(item[0])))
    if key not in _known:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            _known[key] = _try(type(optimizer), options, device)
    return _known[key]


def _try(kind: type[torch.optim.Optimizer], options: Mapping[str, Any], device: torch.device) -> Trial:
    generator = torch.Generator().manual_seed(0)
    start, *grads = (torch.randn(8, 6, dtype=torch.float64, generator=generator).to(device) for _ in range(STEPS + 1))
    found = []
    for parts in (1, 2):
        held = [nn.Parameter(piece.clone()) for piece in start.chunk(parts)]
        try:
            _step(kind, options, held, grads)
        except Exception as error:  # of somebody's optimizer, which may want what is not known here
            return Trial(failed=f"{type(error).__name__}: {error}".splitlines()[0][:200])
        found.append(torch.cat([parameter.detach() for parameter in held]))
    apart = float((found[0] - found[1]).abs().max())
    return Trial(apart if apart > 1e-9 else 0.0)


def _step(
    kind: type[torch.optim.Optimizer],
    options: Mapping[str, Any],
    held: Sequence[nn.Parameter],
    grads: Sequence[torch.Tensor],
) -> None:
    """A step for each gradient, with a closure where one is needed."""
    takes = inspect.signature(kind.__init__).parameters
    made = kind(held, **{name: value for name, value in options.items() if name in takes})
    made.param_groups[0].update(options)
    closure = inspect.signature(kind.step).parameters.get("closure")
    needed = closure is not None and closure.default is closure.empty
    for grad in grads:

        def gradient(grad: torch.Tensor = grad) -> float:
            for parameter, piece in zip(held, grad.chunk(len(held)), strict=True):
                parameter.grad = piece.clone()
            return float(grad.square().sum())

        gradient()
        made.step(*([gradient] if needed else []))
