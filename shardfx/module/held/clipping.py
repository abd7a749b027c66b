"""Norms of gradients where a rank has those of its stages alone: of all of them, whoever asks.

``torch.nn.utils.clip_grad_norm_(pm.parameters(), 1.0)`` sees the gradients of one process. Where these are all the
model's (whole, or DTensors) it is right as it stands. In a pipeline it would clip each stage by a norm of its own: the
norm that it takes is then that of the gradients that all ranks pass.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.nn import utils
from torch.nn.utils import clip_grad
from torch.utils.weak import WeakIdKeyDictionary

from shardfx.runtime.store import Store
from shardfx.runtime.virtual.shard_gradient import plain

Tensor = torch.Tensor
Norm = Callable[[Mapping[str, Sequence[Tensor]], float], Tensor]
"""The norm of gradients by name, of which each rank gives its own."""
_staged = WeakIdKeyDictionary()
"""Of each parameter of a stage how norms are taken, and its name."""
_taken: list[Any] = []


def gradients_here(store: Store) -> dict[str, list[Tensor]]:
    """The gradients of this process, in pieces."""
    every = {name: [plain(p.grad) for p in pieces if p.grad is not None] for name, pieces in store.parameters.items()}
    return {name: grads for name, grads in every.items() if grads}


def clip(total: Tensor, grads: Mapping[str, Sequence[Tensor]], max_norm: float) -> None:
    """Scale gradients whose norm is too large, as torch does it."""
    scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    with torch.no_grad():
        for grad in (grad for pieces in grads.values() for grad in pieces):
            grad.mul_(scale.to(grad.device))


def watch_norms(store: Store, norm: Norm) -> None:
    """Let torch take norms of gradients of these parameters by ``norm``, a method of what owns them."""
    owner = weakref.WeakMethod(norm)
    _staged.update({piece: (owner, name) for name, pieces in store.parameters.items() for piece in pieces})
    if not _taken:
        inside: Any = clip_grad
        _taken.append(inside._get_total_norm)
        inside._get_total_norm = utils.get_total_norm = functools.wraps(_taken[0])(_total_norm)


def _total_norm(
    tensors: Tensor | Iterable[Tensor],
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    given = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    known = {id(p.grad): held for p, held in _staged.items() if p.grad is not None}
    owner = next((known[id(grad)][0]() for grad in given if id(grad) in known), None)
    if owner is None:
        made: Tensor = _taken[0](given, norm_type, error_if_nonfinite, foreach)
        return made
    mine: dict[str, list[Tensor]] = {}
    for grad in given:
        if id(grad) in known:
            mine.setdefault(known[id(grad)][1], []).append(grad)
    rest = [grad for grad in given if id(grad) not in known]
    total: Tensor = owner(mine, float(norm_type))
    if rest:
        total = torch.linalg.vector_norm(torch.stack([total, _taken[0](rest, norm_type).to(total)]), norm_type)
    return checked(total, error_if_nonfinite)


def checked(total: Tensor, error_if_nonfinite: bool) -> Tensor:
    """The norm.

    Raises:
        RuntimeError: it is not finite, as torch has it.
    """
    if error_if_nonfinite and not bool(total.isfinite()):
        raise RuntimeError("the total norm of the gradients is not finite, so it cannot be clipped")
    return total
