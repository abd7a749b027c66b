"""What a rank did to parameters since all ranks last made a call together: words that are compared at the next one.

A rank that takes one step more than the others, at another rate, or of a gradient that it scaled otherwise, has other
weights from then on. Of pieces that no other rank holds nothing else would tell.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol
from weakref import WeakSet

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

PLAIN = (bool, int, float, str)
STEPPED = "an optimizer stepped"
MOST = 64
"""So many are kept in words: of a rank that makes no call any more there may be any number."""


class Acts:
    """What one rank did to one module's parameters."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.more = 0
        self.anew = False
        """Whether what is stored was loaded, so that what was done before counts no more."""

    def note(self, words: str) -> None:
        """One thing more."""
        if len(self.done) < MOST:
            self.done.append(words)
        else:
            self.more += 1

    def begin_anew(self, words: str) -> None:
        """All that is stored was loaded, which makes up for what was done before."""
        self.clear()
        self.anew = True
        self.note(words)

    def clear(self) -> None:
        """All ranks did the same."""
        self.done, self.more, self.anew = [], 0, False

    def __str__(self) -> str:
        more = [f"and {self.more} more"] if self.more else []
        return "; ".join([*self.done, *more]) or "nothing"


class Stepped(Protocol):
    """Whose parameters are stepped."""

    acts: Acts
    is_staged: bool
    """Whether ranks hold other parameters each, which may be stepped otherwise, but as often."""

    def stepped_by_all(self) -> Mapping[int, str]:
        """The parameters here whose steps all ranks take alike, by their ``id``."""


_watched: WeakSet[Any] = WeakSet()
_hooks: list[Any] = []


def watch_steps(store: Stepped) -> None:
    """Have the steps of optimizers of a store's parameters noted from now on."""
    _watched.add(store)
    if not _hooks:
        _hooks.append(register_optimizer_step_post_hook(_note))


def _note(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """An optimizer has taken a step."""
    for store in _watched:
        mine = store.stepped_by_all()
        groups = [g for g in optimizer.param_groups if any(id(p) in mine for p in g["params"])]
        if groups and store.is_staged:
            if STEPPED not in store.acts.done:
                store.acts.note(STEPPED)
        elif groups:
            settings = dict.fromkeys(", ".join(_settings(group)) for group in groups)
            store.acts.note(f"{type(optimizer).__name__} stepped with " + ", and with ".join(settings))


def _settings(group: Mapping[str, Any]) -> Iterator[str]:
    """What a group of parameters is stepped with, but for what is switched off."""
    for name, value in group.items():
        if isinstance(value, torch.Tensor) and value.numel() == 1 and value.device.type == "cpu":
            value = value.item()
        if value is None or value is False:
            continue
        if isinstance(value, PLAIN) or (isinstance(value, tuple) and all(isinstance(each, PLAIN) for each in value)):
            yield f"{name} {value!r}"


def backward_of(scale: torch.Tensor | float, grads: Iterable[torch.Tensor | None]) -> str:
    """A backward, in words: what the loss was multiplied by, and whether gradients are added to others."""
    if isinstance(scale, torch.Tensor):
        times = f" of {scale.item()!r} times the loss" if scale.device.type == "cpu" and scale.numel() == 1 else ""
    else:
        times = f" of {scale!r} times the loss"
    added = any(grad is not None for grad in grads)
    return f"a backward{times}, {'added to gradients' if added else 'with no gradients before'}"
