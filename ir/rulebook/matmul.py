"""Matrix products. A cut of the summed dim leaves a partial sum; with a bias inside, the op is taken apart first."""

from __future__ import annotations

import torch

from ..graph import Node
from ..rules import Dim, RuleEntry, ShardingRule, rule

aten = torch.ops.aten


def with_bias(node: Node) -> ShardingRule:
    """``addmm``, ``baddbmm``: ``bias, m k!, k! n -> m n``. Each rank of a cut k would add the bias."""
    batch: tuple[Dim, ...] = (("b",),) if node.op.overloadpacket is aten.baddbmm else ()
    out = node.outs[0].shape
    sizes = dict(zip(["b", "m", "n"][-len(out) :], out, strict=True))
    sizes["k"] = node.operands[1].shape[-1]
    result = (*batch, ("m",), ("n",))
    bias = node.operands[0].shape
    lead = len(out) - len(bias)
    given = tuple(() if s == 1 and out[lead + i] != 1 else result[lead + i] for i, s in enumerate(bias))
    return ShardingRule(
        (given, (*batch, ("m",), ("k",)), (*batch, ("k",), ("n",))),
        (result,),
        sizes,
        frozenset({"k"}),
        linear=(frozenset({0, 1}), frozenset({0, 2})),
    )


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
    rule(aten.dot.default, "k, k -> ", linear="0|1"),
    rule((aten.addmm.default, aten.baddbmm.default), with_bias, expand=expand_with_bias),
)
