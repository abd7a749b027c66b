"""Optimizers on shards: one that looks at a whole tensor (Adafactor, Muon, LAMB) computes something else on its shards.

Whether an optimizer does is found out by running it (see :mod:`..stepping.trial`): one that gives other weights, or
that cannot be tried, is an Error.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from shardfx.ir.errors import Error
from shardfx.module.stepping.trial import Layout, lay_out, tried
from shardfx.runtime.virtual.shard_gradient import ShardGradient

from .program_optimizer import ProgramOptimizer


def watch_pieces(
    parameters: Mapping[str, Sequence[nn.Parameter]], layouts: Mapping[str, Layout], stepped: Collection[str] = ()
) -> None:
    """Have the first step of an optimizer of any of these parameters looked at, where they are sharded by ``layouts``,
    or ``stepped`` by the program (names)."""
    for name, pieces in parameters.items():
        _stepped.update(dict.fromkeys(pieces if name in stepped else (), True))
        for piece in pieces:
            lay_out(piece, layouts[name])
            if len(pieces) > 1:
                _pieces[piece] = name
    if (_pieces or stepped) and not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_before_step))
        _hooks.append(register_optimizer_step_post_hook(_after_step))


_hooks: list[Any] = []
_guarded: WeakKeyDictionary[torch.optim.Optimizer, list[Any]] = WeakKeyDictionary()
"""The gradients that an optimizer does not see while it steps: of each parameter its own, and what is there instead."""
_pieces = WeakIdKeyDictionary()
"""The parameters that are shards, by their names in the model."""
_stepped = WeakIdKeyDictionary()
"""The parameters that a program steps."""


@torch._disable_dynamo
def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
    if isinstance(optimizer, ProgramOptimizer):  # which says itself that it is a part of the program
        return None
    reject_stepped(optimizer)
    shard = next((p for group in optimizer.param_groups for p in group["params"] if p in _pieces), None)
    if shard is None:
        return None
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    found = tried(optimizer, closure is not None)
    if found.apart or found.failed:
        kind, name = type(optimizer).__name__, found.name or _pieces[shard]
        raise Error(
            f"{kind} looks at whole tensors, and {name!r} is sharded here"
            if found.apart
            else f"{kind} cannot be tried on shards, and {name!r} is sharded here",
            where=f"{kind}.step()",
            expected="an optimizer that works on each element alone, such as AdamW",
            got=found,
            remedy="Hints(optimizer=...), whose step is a part of the program and sees the whole; or leave these "
            "parameters unsharded; or run under torchrun, where parameters are DTensors",
        )
    _guarded[optimizer] = []
    _take_plain(optimizer)
    if closure is None:
        return None

    def computed(*given: Any, **more: Any) -> Any:
        loss = closure(*given, **more)
        _take_plain(optimizer)
        return loss

    if "closure" in kwargs:
        return args, {**kwargs, "closure": computed}
    return (args[0], computed, *args[2:]), kwargs


def _take_plain(optimizer: torch.optim.Optimizer) -> None:
    """Have an optimizer see plain gradients, which were not changed shard by shard.

    Raises:
        Error: one was.
    """
    for p in (p for group in optimizer.param_groups for p in group["params"] if isinstance(p.grad, ShardGradient)):
        p.grad.check(f"{type(optimizer).__name__}.step()")
        p.grad.check_others(f"{type(optimizer).__name__}.step()")
        _guarded[optimizer].append((p, p.grad, p.grad.plain))
        p.grad = _guarded[optimizer][-1][2]


@torch._disable_dynamo
def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for p, guarded, taken in _guarded.pop(optimizer, ()):
        if p.grad is taken:
            p.grad = guarded


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
