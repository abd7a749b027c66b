"""What differentiates within a forward, or watches that: transforms of ``torch.func``, ``backward()``, hooks on
tensors. They are refused where they begin, and a transform that fails midway is left."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch._functorch import eager_transforms
from torch.autograd import forward_ad

from shardfx.ir.capture.sources import is_user_file
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
    """Within, what differentiates is an error where it is begun, but ``torch.autograd.grad``, and so is a hook on the
    gradient of a tensor.

    Raises:
        Error: one is begun.
    """
    before = [getattr(place, name) for place, name, _ in INSIDE]
    for place, name, refusal in INSIDE:
        setattr(place, name, refusal.instead_of(getattr(place, name)))
    try:
        yield
    finally:
        for (place, name, _), was in zip(INSIDE, before, strict=True):
            setattr(place, name, was)


class Refusal(NamedTuple):
    """What is said of something that cannot be captured."""

    what: str
    expected: str
    got: str
    remedy: str
    but_of_torch: bool = False
    """Torch itself may do it: to count operations, say."""

    def instead_of(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """What is to stand in the place of a function, and raises this."""

        def refuse(*given: Any, **named: Any) -> Any:
            if self.but_of_torch and not is_user_file(sys._getframe(1).f_code.co_filename):
                return function(*given, **named)
            raise Error(self.what, expected=self.expected, got=self.got, remedy=self.remedy)

        return refuse


TRANSFORM = Refusal(
    "a transform that differentiates is none that can be captured",
    "torch.autograd.grad(y, x, create_graph=True), torch.autograd.functional.jacobian, torch.func.vmap",
    "torch.func.grad, vjp, jvp, jacrev, jacfwd, hessian, or torch.autograd.forward_ad",
    "torch.autograd.grad(f(x), x, create_graph=True) in the place of torch.func.grad(f)(x)",
)
"""Torch writes it into what it exports as steps that no backward is made of, or as constants."""
HOOK = Refusal(
    "a hook on the gradient of a tensor would never be called",
    "no hooks in forward and loss: a program makes gradients, and gives those of parameters and inputs",
    "register_hook(...) of a tensor",
    "a torch.autograd.Function whose backward does it to the gradient; or look at it on one device",
    but_of_torch=True,
)
BACKWARD = Refusal(
    "backward() within a forward or a loss leaves gradients where no program looks for them",
    "a loss that is given back",
    "backward(...)",
    "torch.autograd.grad(y, x, create_graph=True), and give back what it makes",
)
INSIDE: tuple[tuple[Any, str, Refusal], ...] = (
    (eager_transforms, "grad_increment_nesting", TRANSFORM),
    (eager_transforms, "jvp_increment_nesting", TRANSFORM),
    (forward_ad, "enter_dual_level", TRANSFORM),
    (torch.Tensor, "register_hook", HOOK),
    (torch.Tensor, "register_post_accumulate_grad_hook", HOOK),
    (torch.autograd, "backward", BACKWARD),
)
