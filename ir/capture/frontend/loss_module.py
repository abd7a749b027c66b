"""Losses with tensors of their own (class weights, a learned temperature, a module in a closure) as modules.

The loss becomes a submodule of the model, so that its tensors are parameters and buffers as any others:

    loss=nn.CrossEntropyLoss(weight=w)            buffer "loss.weight"
    loss=lambda out, y: f(out * temperature, y)   parameter "loss.temperature", if it is an nn.Parameter
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FunctionType
from typing import Any
from unittest import mock

import torch
from torch import nn

from shardfx.ir.errors import Error

NAMES = ("loss", "loss_function", "the_loss")


class OwnLoss:
    """A loss that is a submodule of the model, by name; ``given`` is the user's, ``module`` that with its tensors."""

    def __init__(self, name: str, function: Callable[..., Any], module: nn.Module) -> None:
        self.name, self.given, self.module = name, function, module
        self._was: dict[str, tuple[int, int]] = {}

    def beside(self, model: nn.Module) -> nn.Module:
        """A twin of a model that has the loss as a submodule."""
        twin = object.__new__(_beside(type(model), self.name))
        twin.__dict__.update(model.__dict__)
        twin.__dict__["_modules"] = {**model._modules, self.name: self.module}
        return twin

    def settle(self) -> None:
        """Take the user's tensors as unchanged: a capture may write into them, and restore them."""
        self._was = _contents(self.given)

    def __deepcopy__(self, memo: dict[int, Any]) -> OwnLoss:
        return self  # a copy of a plan has the user's loss, too

    def check(self) -> None:
        """Check that the user's tensors are unchanged: those of the parallel module are others.

        Raises:
            Error: one was written into, or another one stands in its place.
        """
        now = _contents(self.given)
        changed = next((name for name, content in self._was.items() if now.get(name) != content), None)
        if changed is not None:
            raise Error(
                "a tensor of the loss has changed, and is not the one that a parallel module has",
                where=f"{changed!r} of the loss",
                expected="the tensor as it was when the model was parallelized",
                got="other content, or another tensor",
                remedy=f"change that of pm, pm.{self.name}.{changed}, or give the loss such tensors as targets",
            )

    def __call__(self, model: nn.Module, out: Any, *targets: Any) -> Any:
        """The loss of the model's results, by the tensors that the model has now."""
        return model.get_submodule(self.name)(out, *targets)


class Rebound(nn.Module):
    """A function whose own tensors and modules are those of this module."""

    def __init__(self, function: FunctionType, values: Mapping[str, Any]) -> None:
        super().__init__()
        self._function = function
        for name, value in values.items():
            if isinstance(value, nn.Module):
                self.add_module(name, value)
            elif isinstance(value, nn.Parameter):
                self.register_parameter(name, value)
            else:
                self.register_buffer(name, value, persistent=False)

    def forward(self, *args: Any) -> Any:
        """The result of the function, with the tensors of this module in its closure and globals."""
        if torch.compiler.is_dynamo_compiling():
            return self._function(*args)
        with self.bound():
            return self._function(*args)

    @contextmanager
    def bound(self) -> Iterator[None]:
        """Within, the closure and the globals of the function have the tensors and modules of this module."""
        function = self._function
        current = {**self._parameters, **self._buffers, **self._modules}
        names, cells = function.__code__.co_freevars, function.__closure__ or ()
        closed = [
            (cell, cell.cell_contents, current.pop(n)) for n, cell in zip(names, cells, strict=True) if n in current
        ]
        with mock.patch.dict(function.__globals__, current):
            for cell, _, value in closed:
                cell.cell_contents = value
            try:
                yield
            finally:
                for cell, was, _ in closed:
                    cell.cell_contents = was


class Filled(nn.Module):
    """A partial function whose own tensors are those of this module."""

    def __init__(self, given: functools.partial[Any]) -> None:
        super().__init__()
        self._given = given
        named = {f"argument_{i}": value for i, value in enumerate(given.args)} | given.keywords
        for name, value in named.items():
            if isinstance(value, nn.Parameter):
                self.register_parameter(name, value)
            elif has_tensors(value):
                self.register_buffer(name, value, persistent=False)

    def forward(self, *arguments: Any) -> Any:
        """The result of the function, with the tensors of this module in place of its arguments."""
        current = {**self._parameters, **self._buffers}
        args = [current.get(f"argument_{i}", value) for i, value in enumerate(self._given.args)]
        keywords = {name: current.get(name, value) for name, value in self._given.keywords.items()}
        return self._given.func(*args, *arguments, **keywords)


def _contents(loss: Callable[..., Any]) -> dict[str, tuple[int, int]]:
    """The tensors of a loss, and their versions."""
    made = _as_module(loss)
    if made is None:
        return {}
    return {
        name: (id(each), 0 if each.is_inference() else each._version)
        for name, each in (*made.named_parameters(), *made.named_buffers())
    }


def with_own_loss(
    model: nn.Module, loss: Callable[..., Any] | None
) -> tuple[nn.Module, Callable[..., Any] | OwnLoss | None]:
    """The model and the loss; where the loss has tensors, a twin of the model that has it as a submodule."""
    made = _as_module(loss)
    if made is None or loss is None:
        return model, loss
    own = OwnLoss(next(name for name in NAMES if not hasattr(model, name)), loss, made)
    return own.beside(model), own


def _beside(kind: type[nn.Module], name: str) -> type[nn.Module]:
    """The class of a model with its loss as a submodule, which its forward does not see: some call all submodules."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        loss = self._modules.pop(name)
        try:
            return kind.forward(self, *args, **kwargs)
        finally:
            self._modules[name] = loss

    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})


def _as_module(loss: Callable[..., Any] | None) -> nn.Module | None:
    """A loss as a module; None where it has no tensors."""
    if isinstance(loss, nn.Module):
        return loss if has_tensors(loss) else None
    if isinstance(loss, functools.partial):
        filled = Filled(loss)
        return filled if has_tensors(filled) else None
    if not isinstance(loss, FunctionType) or inspect.unwrap(loss) is not loss:
        return None
    used = inspect.getclosurevars(loss)
    used_values = {name: value for name, value in {**used.globals, **used.nonlocals}.items() if has_tensors(value)}
    return Rebound(loss, used_values) if used_values else None


def has_tensors(value: object) -> bool:
    """Whether a value is a tensor, or a module with some."""
    if isinstance(value, nn.Module):
        return next(value.parameters(), None) is not None or next(value.buffers(), None) is not None
    return isinstance(value, torch.Tensor) and (isinstance(value, nn.Parameter) or not value.requires_grad)
