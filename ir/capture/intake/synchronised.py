"""What a capture has to do with the state of the process: ``SyncBatchNorm`` asks other processes for their rows, and
what is captured has all rows there are; a transform of ``torch.func`` that fails midway is left."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import nn
from torch._functorch import eager_transforms
from torch.autograd import forward_ad
from torch.nn.modules.batchnorm import _BatchNorm

from shardfx.ir.errors import Error

OWN, USUAL = nn.SyncBatchNorm.forward, _BatchNorm.forward


@contextmanager
def alone() -> Iterator[None]:
    """Within, a synchronised batch norm is a batch norm of what it is given, on any device; and one that keeps the mean
    of all batches (``momentum=None``) computes with their number, and does not ask what it is."""
    nn.SyncBatchNorm.forward = _BatchNorm.forward = _batch_norm  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.SyncBatchNorm.forward, _BatchNorm.forward = OWN, USUAL  # type: ignore[method-assign]


def _batch_norm(self: _BatchNorm, input: torch.Tensor) -> torch.Tensor:
    """What a batch norm does; the factor of its running statistics is a tensor where it follows from their number."""
    mean, variance, count = self.running_mean, self.running_var, self.num_batches_tracked
    if self.momentum is not None or not self.training or mean is None or variance is None or count is None:
        return USUAL(self, input)
    self._check_input_dim(input)
    count.add_(1)
    of_batch = torch.zeros_like(mean), torch.zeros_like(variance)
    made = F.batch_norm(input, *of_batch, self.weight, self.bias, True, 1.0, self.eps)
    with torch.no_grad():
        for kept, new in zip((mean, variance), of_batch, strict=True):
            factor = 1.0 / count.to(kept.dtype)
            kept.copy_(new * factor + kept * (1.0 - factor))
    return made


@contextmanager
def transforms_left() -> Iterator[None]:
    """Behind, no transform of ``torch.func`` is under way that was begun within: one that fails while it is traced does
    not always leave, and all calls of the process would be a part of it."""
    depth, level = torch._C._functorch.get_dynamic_layer_stack_depth(), forward_ad._current_level
    try:
        yield
    finally:
        torch._C._functorch.pop_dynamic_layer_stack_and_undo_to_depth(depth)
        while forward_ad._current_level > level:
            torch._C._exit_dual_level(level=forward_ad._current_level)
            forward_ad._current_level -= 1


@contextmanager
def transforms_refused() -> Iterator[None]:
    """Within, a transform of ``torch.func`` that differentiates is an error where it is begun: torch writes it into
    what it exports as steps that no backward is made of, or as constants.

    Raises:
        Error: one is begun.
    """
    inside: tuple[tuple[Any, str], ...] = (
        (eager_transforms, "grad_increment_nesting"),
        (eager_transforms, "jvp_increment_nesting"),
        (forward_ad, "enter_dual_level"),
    )
    before = [getattr(module, name) for module, name in inside]
    for module, name in inside:
        setattr(module, name, _refuse)
    try:
        yield
    finally:
        for (module, name), was in zip(inside, before, strict=True):
            setattr(module, name, was)


def _refuse(*given: Any, **named: Any) -> NoReturn:
    raise Error(
        "a transform that differentiates is none that can be captured",
        expected="torch.autograd.grad(y, x, create_graph=True), torch.autograd.functional.jacobian, torch.func.vmap",
        got="torch.func.grad, vjp, jvp, jacrev, jacfwd, hessian, or torch.autograd.forward_ad",
        remedy="torch.autograd.grad(f(x), x, create_graph=True) in the place of torch.func.grad(f)(x)",
    )
