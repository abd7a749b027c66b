"""A call in another form that a model was captured for before."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Earlier:
    """What a call was given, the paths of modules in training mode, and the names of what has a gradient. ``keeps``:
    when it was traced, the model changed what it holds beside buffers."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    targets: tuple[Any, ...]
    loss: Callable[..., Tensor] | None
    training: frozenset[str]
    gradients: frozenset[str]
    keeps: bool

    @contextmanager
    def taken_by(self, model: nn.Module) -> Iterator[None]:
        """Within, a model is in the modes of the call, and its parameters have the gradients that it wants."""
        modules, parameters = dict(model.named_modules()), dict(model.named_parameters())
        modes = {path: module.training for path, module in modules.items()}
        wants = {name: each.requires_grad for name, each in parameters.items()}
        _set(modules, {path: path in self.training for path in modules})
        _want(parameters, {name: name in self.gradients for name in parameters})
        try:
            with torch.set_grad_enabled(bool(self.gradients)):
                yield
        finally:
            _set(modules, modes)
            _want(parameters, wants)


def _set(modules: Mapping[str, nn.Module], modes: Mapping[str, bool]) -> None:
    for path, module in modules.items():
        module.training = modes[path]


def _want(parameters: Mapping[str, Tensor], wants: Mapping[str, bool]) -> None:
    for name, parameter in parameters.items():
        parameter.requires_grad_(wants[name])
