"""Shells: tensors of which nothing is there but their form, to run a model's code at the cost of its Python.

A fake tensor answers torch's questions in Python, and finds out for each call what it gives. A shell answers them as
any tensor does, and what a call gives for operands of some forms is asked once, of fake tensors: equal blocks ask
nothing new.
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


class Unknown(Exception):
    """A tensor whose origin was not seen, or of which more must be known than its form."""


class Form(NamedTuple):
    """All that is known of a shell."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def of(tensor: torch.Tensor) -> Form:
        """The form of any tensor with strides."""
        if isinstance(tensor, Shell):
            return tensor.form
        if tensor.layout is not torch.strided:
            raise Unknown(f"a tensor is {tensor.layout}")
        return Form(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)


class Shell(FakeTensor):
    """A fake tensor with nothing behind it. Autograd knows its device without asking Python, as it must of other fake
    ones, several times in each op."""

    form: Form

    @staticmethod
    def __new__(cls, form: Form, mode: FakeTensorMode) -> Shell:
        made: Shell = torch.Tensor._make_wrapper_subclass(
            cls, form.shape, strides=form.strides, dtype=form.dtype, device=form.device
        )
        made.form, made.fake_device, made.fake_mode = form, form.device, mode
        made.constant = made.real_tensor = made.pytype = made.dispatch_keys = None
        return made


@dataclass(frozen=True)
class Operand:
    """A result that is one of the operands itself: of an op that works in place."""

    number: int


class Outcomes:
    """What ops give for operands of some forms: torch is asked once for each distinct call."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self.mode = next((t.fake_mode for t in tensors if isinstance(t, FakeTensor)), None) or FakeTensorMode()
        self._known: dict[Hashable, Any] = {}

    def shell(self, tensor: torch.Tensor) -> torch.Tensor:
        """A shell of the form of a parameter, a buffer or an input."""
        made = Shell(Form.of(tensor), self.mode)
        if isinstance(tensor, nn.Parameter):
            made._is_param = True
        return made.requires_grad_(tensor.requires_grad)

    def of(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """What a call gives, as shells. What is made of constants of the code alone is computed."""
        operands: list[torch.Tensor] = []
        key = func, _flat(args, operands), _flat(kwargs, operands)
        if operands and not any(isinstance(each, Shell) for each in operands):
            with _disable_current_modes():
                return func(*args, **kwargs)
        if key not in self._known:
            self._known[key] = self._ask(func, args, kwargs, operands)
        return self._shells(self._known[key], operands)

    def _ask(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], operands: list[torch.Tensor]) -> Any:
        forms = [Form.of(each) for each in operands]
        with _disable_current_modes(), self.mode:
            fakes = [torch.empty_strided(f.shape, f.strides, dtype=f.dtype, device=f.device) for f in forms]
            given = iter(fakes)
            asked = tree_map_only(torch.Tensor, lambda _: next(given), (args, dict(kwargs)))
            out = func(*asked[0], **asked[1])
        if [Form.of(each) for each in fakes] != forms:
            raise Unknown(f"{func} changes the shape of its operand in place")
        numbers = {id(each): Operand(number) for number, each in enumerate(fakes)}
        return tree_map_only(torch.Tensor, lambda each: numbers.get(id(each)) or Form.of(each), out)

    def _shells(self, outcome: Any, operands: Sequence[torch.Tensor]) -> Any:
        if isinstance(outcome, Operand):
            return operands[outcome.number]
        if isinstance(outcome, Form):
            return Shell(outcome, self.mode)
        if isinstance(outcome, (list, tuple)):
            return type(outcome)(self._shells(each, operands) for each in outcome)
        return outcome


def _flat(arg: Any, operands: list[torch.Tensor]) -> Hashable:
    """A key of arguments, by the forms of the tensors among them, which are noted."""
    if isinstance(arg, torch.Tensor):
        operands.append(arg)
        return Form.of(arg)
    if isinstance(arg, (list, tuple)):
        return tuple([_flat(each, operands) for each in arg])
    if isinstance(arg, dict):
        return tuple([(key, _flat(value, operands)) for key, value in arg.items()])
    return type(arg), repr(arg)
