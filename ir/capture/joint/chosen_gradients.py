"""Gradients whose formulas torch chooses by the numbers at hand, of which a trace has one: both are written down.

    x.prod()   ->   behind it, of the gradient g:   where(any(x == 0), g * (the product of the others), g * out / x)

Of a tensor without numbers torch takes the formula for zeros, which is another one where a product is NaN, infinite or
too small.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


class Product(torch.autograd.Function):
    """A product over all, or along a dim."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int | None, keepdim: bool) -> Tensor:
        """The product."""
        out = torch.prod(x) if dim is None else torch.prod(x, dim, keepdim)
        ctx.save_for_backward(x, out)
        ctx.along = dim, keepdim
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        """The gradient, of numbers with zeros among them and of others."""
        x, out = ctx.saved_tensors
        dim, keepdim = ctx.along
        if not x.dim():
            return grad, None, None
        if not x.numel():
            return torch.zeros_like(x), None, None
        zeros = x == 0
        if dim is None:
            count = zeros.sum()
            made = torch.where(count > 1, 0, _of_others(grad, x.reshape(-1), 0).view_as(x))
            return torch.where(count == 0, grad * (out / x).conj(), made), None, None
        if not keepdim:
            grad, out = grad.unsqueeze(dim), out.unsqueeze(dim)
        return torch.where(zeros.any(), _of_others(grad, x, dim), grad * (out / x).conj()), None, None


def _of_others(grad: Tensor, x: Tensor, dim: int) -> Tensor:
    """The gradient by the products of the elements before and behind each."""
    if x.shape[dim] == 1:
        return grad
    one = torch.ones_like(x.narrow(dim, 0, 1))
    before = torch.cat([one, x.narrow(dim, 0, x.shape[dim] - 1)], dim).cumprod(dim)
    behind = torch.cat([one, x.narrow(dim, 1, x.shape[dim] - 1).flip(dim)], dim).cumprod(dim).flip(dim)
    return grad * (before * behind).conj()


def _product(x: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    made: Tensor = Product.apply(x if dtype is None else x.to(dtype), None, False)  # type: ignore[no-untyped-call]
    return made


def _product_along(x: Tensor, dim: int, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    made: Tensor = Product.apply(x if dtype is None else x.to(dtype), dim, keepdim)  # type: ignore[no-untyped-call]
    return made


CHOSEN: dict[Any, Callable[..., Any]] = {aten.prod.default: _product, aten.prod.dim_int: _product_along}
"""What computes an op with such a gradient."""


def write_all_choices(exported: torch.fx.GraphModule) -> None:
    """Have the ops of an exported program with such gradients be computed so."""
    for module in exported.modules():
        if isinstance(module, torch.fx.GraphModule):
            for node in module.graph.nodes:
                if node.target in CHOSEN and _may_have_gradient(node.args[0]):
                    node.target = CHOSEN[node.target]
            module.recompile()


def _may_have_gradient(of: Any) -> bool:
    x = of.meta.get("val") if isinstance(of, torch.fx.Node) else None
    return x is not None and (x.is_floating_point() or x.is_complex())
