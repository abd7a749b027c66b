"""Scaled dot-product attention: batch and heads may be cut; query heads may share key heads in groups."""

from __future__ import annotations

import torch

from shardfx.ir.graph import Node
from shardfx.ir.rulebook.dims import argument
from shardfx.ir.rules.book import Contiguous, RuleEntry, rule
from shardfx.ir.rules.sharding_rule import Dim, ShardingRule
from shardfx.ir.rules.template import tensor_slots

aten = torch.ops.aten


def _factors(node: Node, q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...]) -> tuple[dict[str, int], Dim]:
    repeat = q[1] // k[1]
    sizes = {"b": q[0], "h": k[1], "s": q[2], "t": k[2], "e": q[3], "v": v[3]}
    if repeat > 1:
        sizes["r"] = repeat
    return sizes, ("h", "r") if repeat > 1 else ("h",)


def _mask(shape: tuple[int, ...], heads: Dim, q: tuple[int, ...]) -> tuple[Dim, ...]:
    full: tuple[Dim, ...] = (("b",), heads, ("s",), ("t",))
    lead = 4 - len(shape)
    return tuple(() if s == 1 else full[lead + i] for i, s in enumerate(shape))


def _whole(node: Node, *free: str) -> frozenset[str]:
    """Queries (and in the gradient keys) may be cut where each query sees all keys, but not where it sees those
    before."""
    return frozenset("stev") - (set() if argument(node, "is_causal") else set(free))


def attention(node: Node) -> ShardingRule:
    """``q[b (h r) s e!], k[b h t! e!], v[b h t! v!], mask -> out[b (h r) s v!], lse[b (h r) s]``; causal: s!"""
    q, k, v = (value.shape for value in node.operands[:3])
    sizes, heads = _factors(node, q, k, v)
    operands: list[tuple[Dim, ...]] = [
        (("b",), heads, ("s",), ("e",)),
        (("b",), ("h",), ("t",), ("e",)),
        (("b",), ("h",), ("t",), ("v",)),
    ]
    operands += [_mask(m.shape, heads, q) for m in node.operands[3:]]
    return ShardingRule(
        tuple(operands), ((("b",), heads, ("s",), ("v",)), (("b",), heads, ("s",))), sizes, _whole(node, "s")
    )


def attention_backward(node: Node) -> ShardingRule:
    _, q, k, v, out, lse, *rest = tensor_slots(node)
    assert q and k and v and out and lse
    sizes, heads = _factors(node, q.shape, k.shape, v.shape)
    qd: tuple[Dim, ...] = (("b",), heads, ("s",), ("e",))
    kd: tuple[Dim, ...] = (("b",), ("h",), ("t",), ("e",))
    vd: tuple[Dim, ...] = (("b",), ("h",), ("t",), ("v",))
    od: tuple[Dim, ...] = (("b",), heads, ("s",), ("v",))
    operands = [od, qd, kd, vd, od, od[:3], *[_mask(m.shape, heads, q.shape) for m in rest if m is not None]]
    return ShardingRule(tuple(operands), (qd, kd, vd), sizes, _whole(node, "s", "t"), (frozenset({0}),))


RULES: tuple[RuleEntry, ...] = (
    rule(aten._scaled_dot_product_flash_attention_for_cpu.default, attention, contiguous=Contiguous.LAST_DIM),
    rule(
        aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
        attention_backward,
        contiguous=Contiguous.LAST_DIM,
    ),
)
