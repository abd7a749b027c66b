"""Capture of ``torch.autograd.Function``: the exported program calls the function, whose gradient it has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionMeta
from torch.utils.checkpoint import CheckpointFunction

from shardfx.ir.capture.frontend.autograd_in_forward import AppliedFunction, OwnGradients


class Tripled(torch.autograd.Function):
    """The identity, with a gradient of three."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0] * 3


class Derived(Tripled):
    """Calls the forward of its base class."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return Tripled.forward(ctx, x) * 2


class Scaled(torch.autograd.Function):
    """Has a separate ``setup_context`` and a default argument."""

    @staticmethod
    def forward(x: Tensor, by: float = 5.0) -> Tensor:
        return x * by

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.by = inputs[1]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return -grads[0] * ctx.by, None


class Ranked(torch.autograd.Function):
    """Has a second result without a gradient, and saves its first one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        values, places = x.topk(2)
        made, rank = values * 2, places.to(x.dtype)
        ctx.mark_non_differentiable(rank)
        ctx.save_for_backward(made)
        return made, rank

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (made,) = ctx.saved_tensors
        return (grads[0] * made).sum(-1, keepdim=True).expand(3, 4) * 1.0


class Nested(torch.autograd.Function):
    """Calls another function, and switches gradients off, in its forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            y = x.sin()
        return Tripled.apply(y) + Scaled.forward(x, 2.0)  # type: ignore[no-any-return, no-untyped-call]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0] * 7


bound = Tripled.apply
CASES: dict[str, tuple[Callable[[Tensor], Tensor], list[type]]] = {
    "bound before": (lambda x: bound(x).sin(), [Tripled]),
    "twice": (lambda x: Tripled.apply(Tripled.apply(x).sin()), [Tripled, Tripled]),
    "derived": (lambda x: Derived.apply(x), [Derived]),
    "with a separate context": (lambda x: Scaled.apply(x, 2.0) + Scaled.apply(x), [Scaled, Scaled]),
    "with a result without a gradient": (lambda x: torch.cat(Ranked.apply(x)), [Ranked]),
    "nested": (lambda x: Nested.apply(x), [Nested]),
    "its forward, called without apply": (lambda x: Scaled.forward(x.sin(), 2.0), []),
    "torch's own": (lambda x: CheckpointFunction.apply(torch.sin, True, x), []),
}


class Model(nn.Module):
    """A function, with a scale before and behind it."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.before, self.behind = (nn.Parameter(torch.rand((), dtype=torch.float64)) for _ in range(2))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x * self.before) * self.behind


@pytest.mark.parametrize("case", CASES)
def test_an_exported_program_has_the_gradient_of_the_function(case: str) -> None:
    function, called = CASES[case]
    model, x = Model(function), torch.rand(3, 4, dtype=torch.float64)
    own = OwnGradients()
    with own.noting():
        exported: Any = torch.export.export(model, (x,), strict=False).module(check_guards=False)
    assert "__getattribute__" not in vars(FunctionMeta)
    own.restore(exported)
    assert [n.target.kind for n in exported.graph.nodes if isinstance(n.target, AppliedFunction)] == called
    expected, got = model(x), exported(x)
    assert expected.equal(got)
    torch.autograd.backward([expected.sum()])
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    torch.autograd.backward([got.sum()])
    for name, parameter in exported.named_parameters():
        assert torch.equal(parameter.grad, gradients[name]), name  # type: ignore[arg-type]
