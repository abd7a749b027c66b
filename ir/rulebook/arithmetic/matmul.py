"""Matrix products. A cut of the summed dim leaves a partial sum; with a bias inside, the op is taken apart first."""

from __future__ import annotations

import torch

from shardfx.ir.graph import Node
from shardfx.ir.rules.book import RuleEntry, rule
from shardfx.ir.rules.sharding_rule import ShardingRule

aten = torch.ops.aten


PRODUCTS = {
    aten.addmm: ("m k", "k n", "m n"),
    aten.addmv: ("m k", "k", "m"),
    aten.addr: ("m", "n", "m n"),
    aten.baddbmm: ("b m k", "b k n", "b m n"),
    aten.addbmm: ("b m k", "b k n", "m n"),
}


def with_bias(node: Node) -> ShardingRule:
    """``addmm`` and its like: ``bias, m k!, k! n -> m n``. Each rank of a cut k would add the bias."""
    a, b, result = (tuple((f,) for f in text.split()) for text in PRODUCTS[node.op.overloadpacket])
    out = node.outs[0].shape
    shapes = (node.operands[1].shape, node.operands[2].shape, out)
    sizes = {
        f: s for dims, shape in zip((a, b, result), shapes, strict=True) for (f,), s in zip(dims, shape, strict=True)
    }
    bias = node.operands[0].shape
    lead = len(out) - len(bias)
    given = tuple(() if s == 1 and out[lead + i] != 1 else result[lead + i] for i, s in enumerate(bias))
    summed = frozenset(sizes) - {f for (f,) in result}
    return ShardingRule((given, a, b), (result,), sizes, summed, linear=(frozenset({0, 1}), frozenset({0, 2})))


def expand_with_bias(
    bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: float = 1, alpha: float = 1
) -> torch.Tensor:
    product = torch.matmul(a, b) if a.dim() == 2 else torch.bmm(a, b)
    product = product if alpha == 1 else product * alpha
    return product + (bias if beta == 1 else bias * beta)


RULES: tuple[RuleEntry, ...] = (
    rule(aten.mm.default, "m k, k n -> m n", linear="0|1"),
    rule(aten.bmm.default, "b m k, b k n -> b m n", linear="0|1"),
    rule(aten.mv.default, "m k, k -> m", linear="0|1"),
    rule((aten.dot.default, aten.vdot.default), "k, k -> ", linear="0|1"),
    rule((aten.addmm.default, aten.baddbmm.default), with_bias, expand=expand_with_bias),
    rule((aten.addmv.default, aten.addr.default, aten.addbmm.default), with_bias),
)
