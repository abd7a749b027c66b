"""Optimizers on pieces: one that looks at a whole tensor (Adafactor, Muon, LAMB) computes something else on its pieces.

Whether an optimizer does is found out by running it, on a small tensor and on the two halves of it.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from shardfx.ir.errors import Error

_pieces = WeakIdKeyDictionary()
_known: dict[tuple[type, str], str] = {}
STEPS = 3


def watch_pieces(parameters: Mapping[str, Iterable[nn.Parameter]]) -> None:
    """Have the first step of an optimizer of any of these parameters looked at, where they are pieces of one tensor."""
    for name, pieces in parameters.items():
        held = list(pieces)
        if len(held) > 1:
            _pieces.update(dict.fromkeys(held, name))
    if _pieces and not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_before_step))


_hooks: list[Any] = []


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    of_piece = next((p for group in optimizer.param_groups for p in group["params"] if p in _pieces), None)
    if of_piece is None:
        return
    why = looks_at_whole(optimizer)
    if why:
        raise Error(
            f"{type(optimizer).__name__} looks at whole tensors, and {_pieces[of_piece]!r} is in pieces here",
            where=f"{type(optimizer).__name__}.step()",
            expected="an optimizer that works on each element alone, such as AdamW",
            got=why,
            remedy="run under torchrun, where parameters are DTensors; or leave these parameters uncut",
        )


def looks_at_whole(optimizer: torch.optim.Optimizer) -> str:
    """In what way a step on a tensor differs from a step on its halves; "" where it does not, or cannot be tried."""
    kind = type(optimizer)
    key = kind, repr(sorted(optimizer.defaults.items(), key=lambda item: str(item[0])))
    if key not in _known:
        _known[key] = ""  # the trial's own steps are not looked at
        _known[key] = _tried(kind, optimizer.defaults)
    return _known[key]


def _tried(kind: type[torch.optim.Optimizer], defaults: Mapping[str, Any]) -> str:
    torch_state = torch.get_rng_state()
    generator = torch.Generator().manual_seed(0)
    start, *grads = (torch.randn(8, 6, dtype=torch.float64, generator=generator) for _ in range(STEPS + 1))
    found = []
    for parts in (1, 2):
        held = [nn.Parameter(piece.clone()) for piece in start.chunk(parts)]
        made = _made(kind, held, defaults)
        if made is None:
            return ""
        for grad in grads:
            for parameter, piece in zip(held, grad.chunk(parts), strict=True):
                parameter.grad = piece.clone()
            made.step()
        found.append(torch.cat([parameter.detach() for parameter in held]))
    torch.set_rng_state(torch_state)
    apart = float((found[0] - found[1]).abs().max())
    return f"after {STEPS} steps a tensor and its halves are {apart:.2g} apart" if apart > 1e-9 else ""


def _made(
    kind: type[torch.optim.Optimizer], held: list[nn.Parameter], defaults: Mapping[str, Any]
) -> torch.optim.Optimizer | None:
    """An optimizer of a kind with these options; None where it takes others than it shows, or needs a closure."""
    takes = inspect.signature(kind.__init__).parameters
    options = {name: value for name, value in defaults.items() if name in takes}
    needed = [p for p in takes.values() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    closure = inspect.signature(kind.step).parameters.get("closure")
    alone = closure is None or closure.default is not closure.empty
    if not alone or {p.name for p in needed} - {"self", "params", *options}:
        return None
    return kind(held, **options)
