"""Optimizers that step each element alone work on the pieces themselves, not on what these are shown as.

Under ``torchrun`` a parameter of a plan that shards some is a DTensor, for whoever looks at it (checkpoints, norms,
optimizers that want the whole). To ``torch.optim.AdamW`` it is nothing but its elements, and DTensor's dispatch of each
op costs more than the op. So a step of one of torch's own optimizers that steps elements (which is tried, see
:mod:`.trial`) is done by a twin of it, whose parameters are the plain pieces in the same memory: with ``foreach`` and
``fused`` kernels as for any tensors. Its states are shown as before: DTensors, as their parameters are.

What is more than that goes on as before: optimizers of others, gradients that are placed otherwise than their
parameters, hooks and closures that may exchange gradients within a step.
"""

from __future__ import annotations

from collections import defaultdict
from operator import is_
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from shardfx.runtime.store import Shown, Store, laid_as

from .trial import tried

Tensor = torch.Tensor
_shown = WeakIdKeyDictionary()
"""How each parameter shows its piece."""
_hooks: list[Any] = []
_twins: WeakKeyDictionary[torch.optim.Optimizer, Twin] = WeakKeyDictionary()


def step_locally(store: Store) -> None:
    """Have torch's optimizers of a store's parameters step the pieces that these show."""
    for name, pieces in store.parameters.items():
        shown = store.shown(name)
        if shown is not None:
            _shown.update(dict.fromkeys(pieces, shown))
    if _shown and not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_before_step))
        _hooks.append(register_optimizer_step_post_hook(_after_step))


class _Elsewhere(Exception):
    """Something is not shown as its parameter is."""


class Twin:
    """Does the steps of an optimizer on plain pieces. Parameters that show none are the optimizer's own."""

    def __init__(self, kind: type[torch.optim.Optimizer]) -> None:
        self.optimizer = object.__new__(kind)
        self._known: dict[Tensor, tuple[Shown, Tensor, nn.Parameter]] = {}
        """Of each parameter that shows a piece how it does, that piece, and the piece as a parameter."""
        self._state: defaultdict[Tensor, dict[str, Any]] = defaultdict(dict)
        self._same: dict[Tensor, tuple[list[Any], list[Any]]] = {}
        """What was in the state of each parameter, and in that of its piece, when they were the same."""

    def begin(self, optimizer: torch.optim.Optimizer) -> None:
        """Bring the twin to where the optimizer is.

        Raises:
            _Elsewhere: it cannot be.
        """
        groups = [{**group, "params": [self._own(p) for p in group["params"]]} for group in optimizer.param_groups]
        for p, (shown, piece, own) in self._known.items():
            own.grad = None if p.grad is None else laid_as(_piece(shown, p.grad), piece)
            held = optimizer.state.get(p, {})
            if not _are(held, self._same.get(p, ([], []))[0]):
                self._state[own] = {key: _plain(shown, value) for key, value in held.items()}
                self._same[p] = list(held.values()), list(self._state[own].values())
        others = {p: held for p, held in optimizer.state.items() if p not in self._known}
        self._state.update(others)
        self.optimizer.__dict__.update({**optimizer.__dict__, "param_groups": groups, "state": self._state})

    def end(self, optimizer: torch.optim.Optimizer) -> None:
        """Give the optimizer what a step left: states, as their parameters are, and options."""
        for p, (shown, piece, own) in self._known.items():
            own.grad = None
            made = self._state.get(own, {})
            if not _are(made, self._same.get(p, ([], []))[1]):
                held = optimizer.state[p]
                for key, new in made.items():
                    if key not in held or _plain(shown, held[key]) is not new:
                        held[key] = _as_shown(shown, piece, new)
                self._same[p] = list(held.values()), list(made.values())
        mine = {own for _, _, own in self._known.values()}
        others = [p for p in self._state if p not in mine]
        optimizer.state.update({p: self._state.pop(p) for p in others})
        for group, made in zip(optimizer.param_groups, self.optimizer.param_groups, strict=True):
            group.update({key: value for key, value in made.items() if key != "params"})
        self.optimizer.__dict__.clear()

    def _own(self, p: Tensor) -> Tensor:
        known = self._known.get(p)
        shown = known[0] if known is not None else _shown.get(p)
        if shown is None:
            return p
        piece = _piece(shown, p)
        if known is None or known[1] is not piece:
            known = self._known[p] = shown, piece, nn.Parameter(piece, requires_grad=p.requires_grad)
        return known[2]


def _are(held: dict[str, Any], known: list[Any]) -> bool:
    """Whether these are the values that are known, each of them."""
    return len(held) == len(known) and all(map(is_, held.values(), known))


def _piece(shown: Shown, tensor: Tensor) -> Tensor:
    """The piece that is shown.

    Raises:
        _Elsewhere: it is placed otherwise.
    """
    piece = shown.plain(tensor)
    if piece is None:
        raise _Elsewhere
    return piece


def _plain(shown: Shown, value: Any) -> Any:
    """What an optimizer keeps of a parameter, of its piece."""
    return _piece(shown, value) if isinstance(value, Tensor) else value


def _as_shown(shown: Shown, piece: Tensor, value: Any) -> Any:
    """What an optimizer keeps of a piece, of its parameter: an element for each of its own."""
    alike = isinstance(value, Tensor) and value.dim() and value.shape == piece.shape
    return shown.wrap(value) if alike else value


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
    computes = kwargs.get("closure") is not None or any(each is not None for each in args[1:])
    shown = any(p in _shown for group in optimizer.param_groups for p in group["params"])
    if computes or not shown or not _may(optimizer):
        return None
    twin = _twins.setdefault(optimizer, Twin(type(optimizer)))
    try:
        twin.begin(optimizer)
    except _Elsewhere:
        return None
    return (twin.optimizer, *args[1:]), kwargs


def _may(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step is known to do the same to a tensor and to its pieces, and is done at once."""
    if torch.compiler.is_compiling() or optimizer._optimizer_step_pre_hooks:
        return False
    own = type(optimizer).step.__module__.startswith("torch.optim.")
    if not own or any(group.get("differentiable") for group in optimizer.param_groups):
        return False
    trial = tried(optimizer)
    return not (trial.apart or trial.failed)


def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    twin = _twins.get(optimizer)
    if twin is not None and args[0] is twin.optimizer:
        twin.end(optimizer)
