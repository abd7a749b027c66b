"""The decomposition of an op, compared with the op on random numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch._decomp import decomposition_table
from torch.fx.experimental.proxy_tensor import make_fx

from shardfx.ir.graph import Node, op_name, substitute
from shardfx.ir.spec import TensorType

CHECKED_NUMEL = 1 << 22
"""A decomposition is compared with its op where the op's tensors have no more elements than this."""
TOLERANCE = 1e-9


class Unjustified(Exception):
    """A decomposition that is not the op, or that cannot be made."""


def justified(node: Node, expand: Any) -> torch.fx.GraphModule:
    """The decomposition of a node, traced, after a comparison with the op on random numbers."""
    decomposition = expand if callable(expand) else decomposition_table[node.op]

    def call(function: Callable[..., Any], tensors: Iterable[torch.Tensor], wide: bool = False) -> Any:
        given = iter(tensors)
        args = substitute(node.args, lambda _: next(given))
        kwargs = {k: substitute(a, lambda _: next(given)) for k, a in node.kwargs.items()}
        out = function(*widened(args), **widened(kwargs)) if wide else function(*args, **kwargs)
        return tuple(out) if isinstance(out, (tuple, list)) else out

    def function(*tensors: torch.Tensor) -> Any:
        return call(decomposition, tensors)

    fake = [torch.empty(v.shape, dtype=v.type.dtype, device="meta") for v in node.operands]
    traced = make_fx(function, tracing_mode="real")(*fake)
    if small(node):
        random = torch.Generator().manual_seed(0)
        least = min((size for v in node.operands for size in v.shape), default=2)
        tensors = [_random(v.type, random, min(least, 2)) for v in node.operands]
        with torch.no_grad():
            expected, got = call(node.op, tensors, True), call(decomposition, tensors, True)
        pairs = zip(expected, got, strict=False) if isinstance(expected, tuple) else [(expected, got)]
        for (a, b), value in zip(pairs, node.results, strict=False):
            asked = value is not None and a is not None  # an output mask leaves some out
            if asked and (b is None or not _close(a, b)):
                raise Unjustified(f"the decomposition of {op_name(node.op)} gives other numbers than the op")
    return traced


def small(node: Node) -> bool:
    """Whether the node can be run here, for a comparison."""
    return sum(v.type.numel for v in [*node.operands, *node.outs]) <= CHECKED_NUMEL


def widened(arg: Any) -> Any:
    """A nest of arguments with float64 for every floating-point dtype among them."""
    if isinstance(arg, torch.dtype) and arg.is_floating_point:
        return torch.float64
    if isinstance(arg, (list, tuple)):
        return type(arg)(widened(a) for a in arg)
    if isinstance(arg, dict):
        return {k: widened(a) for k, a in arg.items()}
    return arg


def _random(type: TensorType, random: torch.Generator, indices: int) -> torch.Tensor:
    """Random numbers that are far from zero; integers below ``indices``, as they may be indices."""
    if type.dtype.is_floating_point:
        return torch.rand(type.shape, dtype=torch.float64, generator=random) + 0.25
    if type.dtype is torch.bool:
        return torch.rand(type.shape, generator=random) < 0.5
    return torch.randint(0, max(indices, 1), type.shape, generator=random).to(type.dtype)


def _close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a.double(), b.double(), rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True)
