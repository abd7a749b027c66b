"""Scaled dot-product attention: batch, heads and query rows may be sharded; query heads may share key heads in groups.

q[b (h r) s e!], k[b h t! e!], v[b h t! v!], mask -> out[b (h r) s v!], logsumexp[b (h r) s]
"""

from __future__ import annotations

from typing import Any

import torch

from shardfx.ir.graph import Node, Value
from shardfx.ir.node import draw_slot
from shardfx.ir.ops.fused_attention import attention, attention_backward
from shardfx.ir.rulebook.dims import argument
from shardfx.ir.rules.book import Contiguous, RuleEntry, rule
from shardfx.ir.rules.local import DimShard, Emit
from shardfx.ir.rules.sharding_rule import Dim, ShardingRule
from shardfx.ir.rules.template import parse_linear, tensor_slots

aten = torch.ops.aten


def _rule(node: Node, operands: str, results: str, free: str) -> ShardingRule:
    """The rule of a node, each of whose tensors is one of ``q k v o`` (the output), ``l`` (logsumexp), ``m`` (mask) or
    ``-`` (anything whole); ``free`` factors are sharded where each query sees all keys."""
    slots = tensor_slots(node)
    at = {kind: value for kind, value in zip(operands, slots, strict=True) if value is not None}
    q, k, v = at["q"].shape, at["k"].shape, at["v"].shape
    groups = q[1] // k[1]
    sizes = {"b": q[0], "h": k[1], "s": q[2], "t": k[2], "e": q[3], "v": v[3]}
    heads: Dim = ("h", "r") if groups > 1 else ("h",)
    if groups > 1:
        sizes["r"] = groups
    dims: dict[str, tuple[Dim, ...]] = {
        "q": (("b",), heads, ("s",), ("e",)),
        "k": (("b",), ("h",), ("t",), ("e",)),
        "v": (("b",), ("h",), ("t",), ("v",)),
        "o": (("b",), heads, ("s",), ("v",)),
        "l": (("b",), heads, ("s",)),
    }
    full: tuple[Dim, ...] = (("b",), heads, ("s",), ("t",))

    def of(kind: str, value: Value) -> tuple[Dim, ...]:
        if kind == "m":
            return tuple(() if size == 1 else dim for size, dim in zip(value.shape[::-1], full[::-1], strict=False))[
                ::-1
            ]
        return dims[kind] if kind in dims else ((),) * value.type.ndim

    whole = frozenset("stev") - (frozenset() if argument(node, "causal", "is_causal") else frozenset(free))
    if draw_slot(node) is not None:  # what is drawn is a box of the whole, and heads that share a key head are not
        whole |= {"r"}
    return ShardingRule(
        tuple(of(kind, value) for kind, value in zip(operands, slots, strict=True) if value is not None),
        tuple(None if v is None else of(kind, v) for kind, v in zip(results, node.results, strict=False)),
        sizes,
        whole,
        parse_linear("0|3&4>0&1&3" if operands[0] == "o" else "2>0"),
    )


def forward(node: Node) -> ShardingRule:
    """Keys are whole; queries may be sharded, unless each sees the keys before it."""
    return _rule(node, "qkvm-"[: len(tensor_slots(node))], "ol", "s")


def backward(node: Node) -> ShardingRule:
    """Linear in the gradient, and in values and result together; the gradients of keys and values (and of a mask that
    broadcasts) are sums over the queries."""
    return _rule(node, "oqkvolm-"[: len(tensor_slots(node))], "qkvm", "st")


def attention_local(emit: Emit) -> Any:
    """Dropout draws for where in the whole ``[b, h, s, t]`` this rank's queries and keys stand."""
    slot, args = draw_slot(emit.node), list(emit.args)
    if slot is not None:
        q = emit.node.operands.index(argument(emit.node, "q"))
        k = emit.node.operands.index(argument(emit.node, "k"))
        held = [*(emit.operand_shard(q, dim) for dim in range(3)), emit.operand_shard(k, 2)]
        plain = all(len(each.ranges) == 1 for each in held)
        args[slot + 1 :] = [[each.first for each in held] if plain else [n for each in held for n in _sub_dims(each)]]
    return emit.call(emit.node.op, *args, **emit.kwargs)


def _sub_dims(held: DimShard) -> list[int]:
    """A dim in the box of :func:`shardfx.ir.ops.fused_attention.drawn`, with the shard that is held of each sub-dim."""
    return [len(held.ranges), *(n for shard in held.ranges for n in shard)]


RULES: tuple[RuleEntry, ...] = (
    rule(attention, forward, local=attention_local, contiguous=Contiguous.LAST_DIM),
    rule(attention_backward, backward, local=attention_local, contiguous=Contiguous.LAST_DIM),
    rule(aten._scaled_dot_product_flash_attention_for_cpu.default, forward, contiguous=Contiguous.LAST_DIM),
    rule(aten._scaled_dot_product_flash_attention_for_cpu_backward.default, backward, contiguous=Contiguous.LAST_DIM),
)
