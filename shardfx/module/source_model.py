"""The user's model as traces see it: its Python state is shared with the user's own object, which is not kept alive."""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn

from shardfx.ir.capture.frontend.loss_module import OwnLoss
from shardfx.ir.capture.frontend.model_preparation import without_weights


class SourceModel:
    """The model that a parallel module was made of.

    ``module`` shares attributes, modes, hooks and submodules with the user's object, so that changes on either are seen
    by guards, and calls change both. Once the user's object is gone, ``module`` is a copy of it without weights.
    """

    def __init__(self, model: nn.Module, loss: object) -> None:
        self._loss = loss if isinstance(loss, OwnLoss) else None
        self.module: nn.Module = object.__new__(type(model))
        object.__setattr__(self.module, "__dict__", model.__dict__)
        weakref.finalize(model, SourceModel._detach, weakref.ref(self)).atexit = False

    @staticmethod
    def _detach(held: weakref.ref[SourceModel]) -> None:
        if (source := held()) is not None:
            source.module = without_weights(source.module)

    def __deepcopy__(self, memo: dict[int, Any]) -> SourceModel:
        made = memo[id(self)] = object.__new__(SourceModel)
        made.module, made._loss = without_weights(self.module), self._loss
        return made

    def is_of_loss(self, name: str) -> bool:
        """Whether a tensor is one of the loss."""
        return self._loss is not None and name.partition(".")[0] == self._loss.name

    @property
    def with_loss(self) -> nn.Module:
        """The model, and its loss as a submodule if that has tensors of its own."""
        return self.module if self._loss is None else self._loss.beside(self.module)

    def at(self, path: str) -> nn.Module:
        """A module by its path; those of the loss as well."""
        name, _, rest = path.partition(".")
        if self._loss is not None and name == self._loss.name:
            return self._loss.module.get_submodule(rest)
        return self.module.get_submodule(path)

    @property
    def training(self) -> frozenset[str]:
        """The paths of the modules that are in training mode."""
        return frozenset(path for path, module in self.module.named_modules() if module.training)
