"""Transforms of ``torch.func`` that differentiate within a forward: they are refused where they begin, and one that
fails midway is left."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch._functorch import eager_transforms
from torch.autograd import forward_ad

from shardfx.ir.errors import Error


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
