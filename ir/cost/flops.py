"""FLOPs of an op: torch's own table, and the ops that it lacks."""

from __future__ import annotations

from collections.abc import Callable
from itertools import repeat
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from shardfx.ir.context.attention_masks import count_of_seen, count_of_step
from shardfx.ir.graph import Node, Value, substitute
from shardfx.ir.mesh import Mesh
from shardfx.ir.ops.computing.grouped_product import grouped_mm, grouped_outer
from shardfx.ir.ops.context.attention_steps import attention_step, attention_step_backward
from shardfx.ir.ops.fused_attention import attention, attention_backward
from shardfx.ir.ops.loop.loop_ops import addmm
from shardfx.ir.spec import Spec

aten = torch.ops.aten


def _attention(q: Any, k: Any, v: Any, *args: Any, out_val: Any = None, **kwargs: Any) -> Any:
    return sdpa_flop_count(q.shape, *_of_each_query_head(q, k, v))


def _attention_backward(grad: Any, q: Any, k: Any, v: Any, *args: Any, out_val: Any = None, **kwargs: Any) -> Any:
    return sdpa_backward_flop_count(grad.shape, q.shape, *_of_each_query_head(q, k, v))


def _of_each_query_head(q: Any, k: Any, v: Any) -> tuple[tuple[int, ...], ...]:
    """The shapes of keys and values expanded to all query heads, as the count expects."""
    return tuple((t.shape[0], q.shape[1], *t.shape[2:]) for t in (k, v))


def _grouped_mm(x: Any, w: Any, ends: Any, *ranges: Any, out_val: Any = None, **kwargs: Any) -> Any:
    """FLOPs of a grouped product on a rank with part of the groups, for rows spread evenly over groups."""
    return 2 * x.shape[0] * w.shape[1] * w.shape[2] * w.shape[0] // max(ends.shape[0], 1)


def _grouped_outer(x: Any, y: Any, ends: Any, *ranges: Any, out_val: Any = None, **kwargs: Any) -> Any:
    return 2 * x.shape[0] * x.shape[1] * y.shape[1] * out_val.shape[0] // max(ends.shape[0], 1)


def _add_product(total: Any, a: Any, b: Any, *, out_val: Any = None, **kwargs: Any) -> Any:
    return 2 * a.shape[0] * a.shape[1] * b.shape[1]


FLASH: dict[Any, Callable[..., Any]] = {
    aten._scaled_dot_product_flash_attention_for_cpu.default: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _attention_backward,
}
FLOPS: dict[Any, Callable[..., Any]] = {
    attention: count_of_seen(attention, _attention),
    attention_backward: count_of_seen(attention_backward, _attention_backward),
    attention_step: count_of_step(attention_step),
    attention_step_backward: count_of_step(attention_step_backward),
    grouped_mm: _grouped_mm,
    grouped_outer: _grouped_outer,
    addmm: _add_product,
    aten.addmm_.default: _add_product,
    **{op: count_of_seen(op, count) for op, count in FLASH.items()},
}
"""FLOP formulas that torch's own table lacks."""


CAUSAL = "causal "
"""The prefix of the kind of causal attention without a window, which has tiles of its own."""
MASKED = {attention: 4, attention_backward: 7}
"""The index of the argument ``causal``, by attention op."""


def formula(target: Any) -> Callable[..., Any] | None:
    """The FLOP formula of ``target``, a function of its arguments and ``out_val``; None if it has none."""
    return FLOPS.get(target) or flop_registry.get(getattr(target, "overloadpacket", None))


def flops_of(node: Node, mesh: Mesh | None = None) -> int:
    """The FLOPs of a node: on one device, or, with a mesh, on the rank with the largest shards."""
    count = formula(node.op)
    if count is None:
        return 0
    made = node.strategy if mesh is not None else None
    operands = iter(made.operands) if made is not None else repeat(None)
    results = iter(made.results) if made is not None else repeat(None)

    def empty(value: Value, spec: Spec | None) -> torch.Tensor:
        shape = value.shape
        if spec is not None and mesh is not None:
            shape = spec.local_shape(shape, mesh, dict.fromkeys(mesh.names, 0))
        return torch.empty(shape, dtype=value.type.dtype, device="meta")

    outs = tuple(None if value is None else empty(value, next(results)) for value in node.results)
    out = outs if len(outs) > 1 else outs[0]
    args = substitute(node.args, lambda value: empty(value, next(operands)))
    kwargs = {name: substitute(arg, lambda value: empty(value, next(operands))) for name, arg in node.kwargs.items()}
    return int(count(*args, **kwargs, out_val=out))
