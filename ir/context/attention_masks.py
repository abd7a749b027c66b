"""Masks and repeated heads of attention calls as arguments of the call, before the backward is written.

    aten.scaled_dot_product_attention(q, k, v, mask)              mask[.., i, j] is j <= i
    aten.scaled_dot_product_attention(q, k, v, None, 0.0, True)

    aten.scaled_dot_product_attention(q, k, v, mask)              mask[.., i, j] is i - w < j <= i
    shardfx.attention(q, k, v, None, True, window=[w - 1, 0])     in order: ..., scale, p, None, 0, [], window

    aten.scaled_dot_product_attention(q, repeat_kv(k), repeat_kv(v), ...)
    aten.scaled_dot_product_attention(q, k, v, ..., enable_gqa=True)

Without a dense mask, and with key heads as few as they are, torch's fastest kernels take the call.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import fx

from shardfx.ir.ops.context.window_tiles import seen_pairs
from shardfx.ir.ops.fused_attention import attention
from shardfx.ir.ops.traits import positional, with_defaults

from .mask_reader import Affine, MaskReader, Value, mapped, true_where

aten = torch.ops.aten
ATTENTION = aten.scaled_dot_product_attention.default
OUR_NAMES = {
    "query": "q",
    "key": "k",
    "value": "v",
    "attn_mask": "mask",
    "is_causal": "causal",
    "dropout_p": "p",
    "grad_out": "grad",
}
"""Names of torch's arguments in our op of attention."""


def by_our_names(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of an attention op, by their names in ours."""
    return {OUR_NAMES.get(name, name): arg for name, arg in with_defaults(op, args, kwargs).items()}


def in_order(op: Any, bound: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of one of our attention ops by position, and those that restrict its keys by name."""
    named = {name: bound[name] for name in ("window",) if bound.get(name)}
    return positional(op, {name: arg for name, arg in bound.items() if name not in named}), named


def count_of_seen(op: Any, count: Callable[..., Any]) -> Callable[..., Any]:
    """The part of a count that a window leaves of all pairs of queries and keys."""

    def counted(*args: Any, **kwargs: Any) -> Any:
        bound = with_defaults(op, args, kwargs)
        every, shape = count(*args, **kwargs), (*bound["q"].shape[:3], bound["k"].shape[2])
        pairs = shape[2] * shape[3]
        if not bound["window"] or not pairs:
            return every
        seen = seen_pairs(shape, bound["causal"], bound["window"], bound["box"], bound.get("rows", ()))
        return every * seen // pairs

    return counted


class Seen(NamedTuple):
    """What a query sees: the keys up to its place, and those of a window; all, where it has neither."""

    causal: bool = False
    window: tuple[int, ...] = ()


def simplify_attention(graph: fx.Graph) -> None:
    """Simplify the attention calls of an exported graph."""
    calls = [node for node in graph.nodes if node.target is ATTENTION]
    if not calls:
        return
    reader = MaskReader(graph)
    for node in calls:
        bound = with_defaults(ATTENTION, node.args, node.kwargs)
        mask, seen = bound["attn_mask"], None
        if isinstance(mask, fx.Node) and not bound["is_causal"] and mask in reader.values:
            seen = _seen(reader.values[mask], mask.meta["val"].dtype, bound)
        if seen is not None:
            bound |= {"attn_mask": None, "is_causal": seen.causal}
        if not bound["enable_gqa"]:
            bound |= _grouped(bound)
        if seen is not None and seen.window:
            _write(node, bound, seen)
            continue
        tensors = tuple(bound[name] for name in ("query", "key", "value"))
        node.args = (*tensors, bound["attn_mask"], bound["dropout_p"], bound["is_causal"])
        node.kwargs = {"scale": bound["scale"], "enable_gqa": bound["enable_gqa"]}


def _seen(mask: Value, dtype: torch.dtype, bound: Mapping[str, Any]) -> Seen | None:
    """What queries see by a mask; None: something that only the mask says."""
    conditions = true_where(mask if dtype is torch.bool else mapped(mask, partial(_is_seen, torch.finfo(dtype).min)))
    if conditions is None:
        return None
    sides = _sides(conditions)
    if sides is None:
        return None
    left, right = sides
    if left is None and right in (None, 0):
        return Seen(right == 0)
    rows, keys = (bound[name].meta["val"].shape[-2] for name in ("query", "key"))
    window = rows - 1 if left is None else left, keys - 1 if right is None else right
    return Seen(right == 0, window) if sum(window) >= 0 and _is_plain(bound) else None


def _sides(conditions: Iterable[Affine]) -> tuple[int | None, int | None] | None:
    """How many keys before and behind its place a query sees, None: all; None, where that is not what they say."""
    found: dict[tuple[int, ...], int | None] = {(1, -1): None, (-1, 1): None}
    for each in conditions:
        before = found.get(each.steps[-2:], ())
        if before == () or any(each.steps[:-2]):
            return None
        found[each.steps[-2:]] = -each.start if before is None else min(before, -each.start)
    return found[1, -1], found[-1, 1]


def _is_plain(bound: Mapping[str, Any]) -> bool:
    """Whether our op takes the tensors of a call as they are: of four dims, with heads in groups."""
    q, k, v = (bound[name].meta["val"].shape for name in ("query", "key", "value"))
    same = len(q) == len(k) == len(v) == 4 and q[0] == k[0] == v[0] and k[1] == v[1]
    return same and k[1] in (1, q[1] if not bound["enable_gqa"] else k[1])


def _write(node: fx.Node, bound: Mapping[str, Any], seen: Seen) -> None:
    """The call as our op, which has an argument for what is seen."""
    given, named = in_order(attention, {**by_our_names(ATTENTION, (), bound), "window": [*seen.window]})
    made = node.meta["val"]
    with node.graph.inserting_before(node):
        call = node.graph.call_function(attention, given, named)
        out = node.graph.call_function(operator.getitem, (call, 0))
    call.meta, out.meta = {**node.meta, "val": (made, made.new_empty(made.shape[:3]))}, node.meta
    node.replace_all_uses_with(out)
    node.graph.erase_node(node)


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
