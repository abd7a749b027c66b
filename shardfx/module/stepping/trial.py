"""Whether an optimizer steps each element alone: found out by running it on a small tensor and on its two halves."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

STEPS = 3


@dataclass(frozen=True, eq=False)
class Trial:
    """How far apart a tensor and its halves are after a few steps, 0 for rounding alone; or why nobody knows."""

    apart: float = 0.0
    failed: str = ""


_known: dict[Hashable, Trial] = {}
_last: WeakKeyDictionary[torch.optim.Optimizer, dict[int, tuple[Hashable, Trial]]] = WeakKeyDictionary()
"""Of each optimizer, by the number of the group, what was found for options of which kind."""


def tried(optimizer: torch.optim.Optimizer, number: int, device: torch.device) -> Trial:
    """What steps of such an optimizer, with the options of one of its groups, do to pieces on a device. Numbers that a
    schedule changes later are not tried anew, but for whether they are 0."""
    group = optimizer.param_groups[number]
    options = {**optimizer.defaults, **{name: value for name, value in group.items() if name != "params"}}
    kind = device.type, *((name, _kind(value)) for name, value in options.items())
    known = _last.setdefault(optimizer, {})
    if number not in known or known[number][0] != kind:
        key = type(optimizer), device.type, repr(sorted(options.items(), key=lambda item: str(item[0])))
        if key not in _known:
            with torch.random.fork_rng([device] if device.type == "cuda" else []):
                _known[key] = _try(type(optimizer), options, device)
        known[number] = kind, _known[key]
    return known[number][1]


def _kind(value: object) -> Hashable:
    """What is the same for numbers that are of one kind."""
    if isinstance(value, float):
        return float, value == 0
    if isinstance(value, (tuple, list)):
        return tuple(map(_kind, value))
    return torch.Tensor if isinstance(value, torch.Tensor) else repr(value)


def _try(kind: type[torch.optim.Optimizer], options: Mapping[str, Any], device: torch.device) -> Trial:
    generator = torch.Generator().manual_seed(0)
    start, *grads = (torch.randn(8, 6, dtype=torch.float64, generator=generator).to(device) for _ in range(STEPS + 1))
    found = []
    for parts in (1, 2):
        held = [nn.Parameter(piece.clone()) for piece in start.chunk(parts)]
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the optimizer itself gives them where it steps
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
