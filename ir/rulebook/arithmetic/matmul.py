"""Matrix products. A sharding of the summed dim leaves a partial sum; with a bias inside, the op is decomposed first.

Products by group may be sharded by rows and by groups: each rank multiplies those of its rows that are in its groups.
"""

from __future__ import annotations

from typing import Any

import torch

from shardfx.ir.ops.computing.grouped_product import grouped_mm, grouped_outer
from shardfx.ir.rules.book import RuleEntry, rule
from shardfx.ir.rules.local import DimShard, Emit

aten = torch.ops.aten


BIAS = "0&1|0&2"
SUMMED = f"{BIAS}|0*k"
"""With a bias inside the summed dims are whole, for each rank would add the bias; unless that is a partial sum, too."""


def expand_with_bias(
    bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: float = 1, alpha: float = 1
) -> torch.Tensor:
    """``addmm`` and ``baddbmm`` as a product and a sum, so that the product alone may be partial. What is taken zero
    times is not looked at: infinities and NaN in it are in no result."""
    product = torch.matmul(a, b) if a.dim() == 2 else torch.bmm(a, b)
    product = product if alpha == 1 else product * alpha if alpha else torch.zeros_like(product)
    return product + (bias if beta == 1 else bias * beta) if beta else product


def by_group(emit: Emit) -> Any:
    """The rank's rows and groups, for the ends are those of the whole."""
    groups = emit.operand_shard(1, 0) if emit.node.op is grouped_mm else emit.result_shard(0, 0)
    return emit.call(emit.node.op, *emit.args[:3], _numbers(emit.operand_shard(0, 0)), _numbers(groups))


def _numbers(held: DimShard) -> list[int]:
    return [] if held.is_whole else [n for shard in held.ranges for n in shard]


RULES: tuple[RuleEntry, ...] = (
    rule(aten.mm.default, "m k, k n -> m n", linear="0|1"),
    rule(aten.bmm.default, "b m k, b k n -> b m n", linear="0|1"),
    rule(aten.mv.default, "m k, k -> m", linear="0|1"),
    rule((aten.dot.default, aten.vdot.default), "k, k -> ", linear="0|1"),
    rule(aten.addmm.default, "~m n, m k!, k! n -> m n", linear=SUMMED, expand=expand_with_bias),
    rule(aten.baddbmm.default, "~b m n, b m k!, b k! n -> b m n", linear=SUMMED, expand=expand_with_bias),
    rule(aten.addmv.default, "~m, m k!, k! -> m", linear=SUMMED),
    rule(aten.addr.default, "~m n, m, n -> m n", linear=BIAS),
    rule(aten.addbmm.default, "~m n, b! m k!, b! k! n -> m n", linear=f"{BIAS}|0*b k"),
    rule(grouped_mm, "s k, g k n, e! -> s n", linear="0|1", local=by_group),
    rule(grouped_outer, "s k, s n, e! -> g k n", linear="0|1", local=by_group),
)
