"""Rewrites of an exported program before its backward is written. Casts of weights, with which a program of mixed
precision begins, are moved before their first users.

Single ops of the graph, whatever torch would make of them on some device, or what only torch's kernels decompose:

aten.scaled_dot_product_attention(q, k, v, attn_mask, 0.0, True)   ->   shardfx.attention(q, k, v, mask, True)
aten.pad(x, [1, 2], "circular")   ->   constant_pad_nd(x, [1, 2]) + constant_pad_nd(x, ...) + ...

Matrices that torch.linalg factors are contiguous: of such, ``det``, ``slogdet`` and ``solve`` factor the transposed
one, and their gradients are written for one or the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import takewhile
from math import prod
from typing import Any

import torch
from torch import Tensor

from shardfx.ir.context.attention_masks import simplify_attention
from shardfx.ir.ops.computing.tiles import circular
from shardfx.ir.ops.fused_attention import attention

from .batch_norms import BatchNorm, BatchParts
from .embedding_bags import sparse_lookup
from .sorted_rows import route_sorted_rows

aten = torch.ops.aten


def single_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """``F.scaled_dot_product_attention`` as the op of the graph, which wants ``[batch, heads, rows, columns]``.

    Dims before these become one batch; where there are fewer, there is one head. What broadcasts is expanded, but for
    a single key head, which is a group by itself.
    """
    if torch.is_autocast_enabled(query.device.type) and query.dtype is not torch.float64:
        query, key, value = (t.to(torch.get_autocast_dtype(t.device.type)) for t in (query, key, value))
    dims = query.dim()
    q, k, v = (_with_heads(t, dims) for t in (query, key, value))
    lead = torch.broadcast_shapes(*(t.shape[:-3] for t in (q, k, v)))
    q, k, v = (_broadcast(t, lead).reshape(prod(lead), *t.shape[-3:]) for t in (q, k, v))
    if not enable_gqa and not (k.shape[1] == v.shape[1] and k.shape[1] in (1, q.shape[1])):
        heads = max(t.shape[1] for t in (q, k, v))
        q, k, v = (t.expand(-1, heads, -1, -1) for t in (q, k, v))
    mask = None if attn_mask is None else _mask(attn_mask, dims, lead)
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.to(q.dtype)
    out: Tensor = attention(q, k, v, mask, is_causal, scale, float(dropout_p))[0]
    if dims > 4:
        return out.reshape(*lead, *out.shape[1:])
    for _ in range(4 - dims):
        out = out.squeeze(-3)
    return out


def _with_heads(tensor: Tensor, dims: int) -> Tensor:
    """A tensor of at least four dims: batch, heads, rows, columns."""
    for _ in range(4 - dims):
        tensor = tensor.unsqueeze(-3)
    return tensor


def _broadcast(tensor: Tensor, lead: Sequence[int]) -> Tensor:
    """A tensor with these dims before its last three."""
    return tensor if tensor.shape[:-3] == tuple(lead) else tensor.expand(*lead, *tensor.shape[-3:])


def _mask(mask: Tensor, dims: int, lead: Sequence[int]) -> Tensor:
    """A mask as one of two or four dims."""
    if mask.dim() <= 2:
        return mask if mask.dim() == 2 else mask.unsqueeze(0)
    if dims > 4 and mask.dim() >= 4:
        return _broadcast(mask, lead).reshape(prod(lead), *mask.shape[-3:])
    return mask.unsqueeze(-3 if dims == 3 else 0) if mask.dim() == 3 else mask


def single_pad(x: Tensor, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> Tensor:
    """``F.pad``: circular padding dim by dim, after negative padding."""
    if mode != "circular":
        padded: Tensor = aten.pad.default(x, pad, mode, value)
        return padded
    x = aten.constant_pad_nd.default(x, [min(n, 0) for n in pad]) if min(pad) < 0 else x
    for i, (front, back) in enumerate(zip(pad[::2], pad[1::2], strict=True)):
        if front > 0 or back > 0:
            x = circular(x, -1 - i, max(front, 0), max(back, 0))
    return x


KEPT: dict[Any, Callable[..., Any]] = {
    aten.scaled_dot_product_attention.default: single_attention,
    aten.pad.default: single_pad,
}
"""The single op for each composite op of the exported program."""


FACTORS = (
    aten.det.default,
    aten.linalg_det.default,
    aten.linalg_slogdet.default,
    aten.linalg_solve.default,
    aten.linalg_solve_ex.default,
    aten.linalg_tensorsolve.default,
    aten.logdet.default,
    aten.slogdet.default,
)
"""The ops that factor their first operand."""


def rewrite_exported(exported: torch.fx.GraphModule, parts: BatchParts) -> None:
    """Rewrite an exported program, and the graphs that its higher-order ops call."""
    simplify_attention(exported.graph)
    route_sorted_rows(exported.graph)
    _sink_casts(exported.graph)
    for module in exported.modules():
        if isinstance(module, torch.fx.GraphModule):
            _rewrite(module.graph, parts)
            module.recompile()


CASTS = (aten.to.dtype, aten._to_copy.default, aten._assert_tensor_metadata.default)


def _sink_casts(graph: torch.fx.Graph) -> None:
    """Move casts of weights and inputs, with which a program begins, before their first users."""
    order = {node: number for number, node in enumerate(graph.nodes)}
    calls = (node for node in graph.nodes if node.op == "call_function")
    casts = [*takewhile(lambda each: each.target in CASTS and len(each.meta["nn_module_stack"]) == 1, calls)]
    for cast in sorted(casts, key=lambda each: each.args[0].op == "get_attr"):  # inputs first
        if cast.users:
            user = min(cast.users, key=order.__getitem__)
            user.prepend(cast)
            cast.meta = {**user.meta, "val": cast.meta["val"]}


def _rewrite(graph: torch.fx.Graph, parts: BatchParts) -> None:
    """Results of single ops may have other strides than torch's, behind which ``contiguous()`` was no op: what was a
    view of such is a reshape."""
    kept = False
    for node in graph.nodes:
        first = node.all_input_nodes[:1]
        if node.target in KEPT and all(x.meta["val"].is_floating_point() for x in first if "val" in x.meta):
            node.target, kept = KEPT[node.target], True
        elif node.target is aten.embedding.default and node.args[4:5] == (True,):
            node.target = sparse_lookup
        elif kept and node.target is aten.view.default:
            node.target = aten.reshape.default
        elif node.target is aten.batch_norm.default:
            node.target = BatchNorm(parts)
        elif node.target in FACTORS:
            with graph.inserting_before(node):
                matrix = graph.call_function(aten.contiguous.default, (node.args[0],))
                matrix.meta = dict(node.meta)
            node.args = (matrix, *node.args[1:])
