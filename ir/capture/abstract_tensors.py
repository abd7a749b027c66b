"""Abstract tensors: shape, strides, dtype and device alone, to run a model's code at the cost of its Python.

A fake tensor answers torch's questions in Python, and computes for each call what it gives. An abstract tensor answers
them as any tensor does, and what a call gives for operands of some signatures is asked once, of fake tensors: equal
blocks ask nothing new.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only


class UnknownOrigin(Exception):
    """A tensor that no recorded call made, or that needs more than its signature."""


class TensorSignature(NamedTuple):
    """Shape, strides, dtype and device of a tensor."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def of(tensor: torch.Tensor) -> TensorSignature:
        """The signature of any strided tensor."""
        if isinstance(tensor, AbstractTensor):
            return tensor.form
        if tensor.layout is not torch.strided:
            raise UnknownOrigin(f"a tensor is {tensor.layout}")
        return TensorSignature(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)


class AbstractTensor(FakeTensor):
    """A fake tensor that is its signature alone. Autograd knows its device without asking Python, as it must several
    times in each op of other fake tensors."""

    form: TensorSignature

    @staticmethod
    def __new__(cls, form: TensorSignature, mode: FakeTensorMode) -> AbstractTensor:
        made: AbstractTensor = torch.Tensor._make_wrapper_subclass(
            cls, form.shape, strides=form.strides, dtype=form.dtype, device=form.device
        )
        made.form, made.fake_device, made.fake_mode = form, form.device, mode
        made.constant = made.real_tensor = made.pytype = made.dispatch_keys = None
        return made


@dataclass(frozen=True)
class OperandResult:
    """A result that is one of the operands itself: of an in-place op."""

    number: int


class OutcomeCache:
    """The results of ops by the signatures of their operands: torch is asked once for each distinct call."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self.mode = next((t.fake_mode for t in tensors if isinstance(t, FakeTensor)), None) or FakeTensorMode()
        self._known: dict[Hashable, Any] = {}

    def abstract(self, tensor: torch.Tensor) -> torch.Tensor:
        """The abstract tensor of a parameter, a buffer or an input."""
        made = AbstractTensor(TensorSignature.of(tensor), self.mode)
        if isinstance(tensor, nn.Parameter):
            made._is_param = True
        return made.requires_grad_(tensor.requires_grad)

    def of(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The results of a call, as abstract tensors. A call on constants of the code alone is computed."""
        operands: list[torch.Tensor] = []
        key = func, _flat(args, operands), _flat(kwargs, operands)
        if operands and not any(isinstance(each, AbstractTensor) for each in operands):
            with _disable_current_modes():
                return func(*args, **kwargs)
        if key not in self._known:
            self._known[key] = self._ask(func, args, kwargs, operands)
        return self._instantiate(self._known[key], operands)

    def _ask(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], operands: list[torch.Tensor]) -> Any:
        signatures = [TensorSignature.of(each) for each in operands]
        with _disable_current_modes(), self.mode:
            fakes = [torch.empty_strided(f.shape, f.strides, dtype=f.dtype, device=f.device) for f in signatures]
            remaining = iter(fakes)
            asked = tree_map_only(torch.Tensor, lambda _: next(remaining), (args, dict(kwargs)))
            out = func(*asked[0], **asked[1])
        if [TensorSignature.of(each) for each in fakes] != signatures:
            raise UnknownOrigin(f"{func} changes the shape of its operand in place")
        numbers = {id(each): OperandResult(number) for number, each in enumerate(fakes)}
        return tree_map_only(torch.Tensor, lambda each: numbers.get(id(each)) or TensorSignature.of(each), out)

    def _instantiate(self, outcome: Any, operands: Sequence[torch.Tensor]) -> Any:
        if isinstance(outcome, OperandResult):
            return operands[outcome.number]
        if isinstance(outcome, TensorSignature):
            return AbstractTensor(outcome, self.mode)
        if isinstance(outcome, (list, tuple)):
            return type(outcome)(self._instantiate(each, operands) for each in outcome)
        return outcome


def _flat(arg: Any, operands: list[torch.Tensor]) -> Hashable:
    """A key of arguments, by the signatures of the tensors among them, which are appended to ``operands``."""
    if isinstance(arg, torch.Tensor):
        operands.append(arg)
        return TensorSignature.of(arg)
    if isinstance(arg, (list, tuple)):
        return tuple([_flat(each, operands) for each in arg])
    if isinstance(arg, dict):
        return tuple([(key, _flat(value, operands)) for key, value in arg.items()])
    return type(arg), repr(arg)
