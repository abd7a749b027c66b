"""Masks and repeated heads of attention calls as arguments of the call, before the backward is written.

    aten.scaled_dot_product_attention(q, k, v, mask)              mask[.., i, j] is j <= i
    aten.scaled_dot_product_attention(q, k, v, None, 0.0, True)

    aten.scaled_dot_product_attention(q, repeat_kv(k), repeat_kv(v), ...)
    aten.scaled_dot_product_attention(q, k, v, ..., enable_gqa=True)

Without a dense mask, and with key heads as few as they are, torch's fastest kernels take the call.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import fx

from shardfx.ir.ops.traits import with_defaults

from .mask_reader import MaskReader, Value, mapped, true_where

aten = torch.ops.aten
ATTENTION = aten.scaled_dot_product_attention.default


def simplify_attention(graph: fx.Graph) -> None:
    """Simplify the attention calls of an exported graph."""
    calls = [node for node in graph.nodes if node.target is ATTENTION]
    if not calls:
        return
    reader = MaskReader(graph)
    for node in calls:
        bound = with_defaults(ATTENTION, node.args, node.kwargs)
        mask = bound["attn_mask"]
        if isinstance(mask, fx.Node) and not bound["is_causal"] and mask in reader.values:
            is_causal = _is_causal(reader.values[mask], mask.meta["val"].dtype)
            if is_causal is not None:
                bound |= {"attn_mask": None, "is_causal": is_causal}
        if not bound["enable_gqa"]:
            bound |= _grouped(bound)
        tensors = tuple(bound[name] for name in ("query", "key", "value"))
        node.args = (*tensors, bound["attn_mask"], bound["dropout_p"], bound["is_causal"])
        node.kwargs = {"scale": bound["scale"], "enable_gqa": bound["enable_gqa"]}


def _is_causal(mask: Value, dtype: torch.dtype) -> bool | None:
    """Whether query ``i`` sees the keys up to ``i``; False: it sees all; None: something else."""
    conditions = true_where(mask if dtype is torch.bool else mapped(mask, partial(_is_seen, torch.finfo(dtype).min)))
    if conditions is None:
        return None
    if not conditions:
        return False
    (first, *more) = conditions
    return True if not more and (first.start, *first.steps[-2:]) == (0, -1, 1) and not any(first.steps[:-2]) else None


def _is_seen(lowest: float, added: float) -> bool | None:
    """Whether a key is seen to whose score a number is added; None: in part."""
    return True if added == 0 else False if added <= lowest else None


def _grouped(bound: dict[str, Any]) -> dict[str, Any]:
    """The few heads of keys and values that are repeated for groups of query heads."""
    key, value = (_few_heads(bound[name]) for name in ("key", "value"))
    if key is None or value is None or key[1] != value[1]:
        return {}
    few, many = (each.meta["val"].shape for each in (key[0], bound["query"]))
    if len(few) != 4 or len(many) != 4 or many[1] != few[1] * key[1]:
        return {}
    return {"key": key[0], "value": value[0], "enable_gqa": True}


def _few_heads(node: Any) -> tuple[fx.Node, int] | None:
    """``x [b g t e]`` and ``n``, where a node is ``x`` with each head repeated ``n`` times in a row."""
    node = _beneath(node, aten.clone.default, aten.contiguous.default)
    if node.target is aten.repeat_interleave.self_int and len(node.args) > 2 and node.args[2] in (1, -3):
        return node.args[0], node.args[1]
    if node.target not in (aten.reshape.default, aten.view.default, aten._unsafe_view.default):
        return None
    many = node.meta["val"].shape
    repeated = _beneath(node.args[0], aten.clone.default, aten.contiguous.default)
    if repeated.target is not aten.expand.default:
        return None
    single = repeated.args[0]
    if single.target is not aten.unsqueeze.default or single.args[1] not in (2, -3):
        return None
    (x, _), shape = single.args, repeated.meta["val"].shape
    few = x.meta["val"].shape
    of_groups = (*few[:2], shape[2], *few[2:])
    if len(few) != 4 or tuple(shape) != of_groups or tuple(many) != (few[0], few[1] * shape[2], *few[2:]):
        return None
    return x, shape[2]


def _beneath(node: Any, *ops: Any) -> Any:
    """A node below copies."""
    while node.target in ops:
        node = node.args[0]
    return node
