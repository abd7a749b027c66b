"""Matrix products. A cut of the summed dim leaves a partial sum; with a bias inside, the op is taken apart first."""

from __future__ import annotations

import torch

from shardfx.ir.rules.book import RuleEntry, rule

aten = torch.ops.aten


BIAS = "0&1|0&2"
"""With a bias inside the summed dims are whole: each rank of a cut sum would add the bias."""


def expand_with_bias(
    bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: float = 1, alpha: float = 1
) -> torch.Tensor:
    """``addmm`` and ``baddbmm`` as a product and a sum, so that the product alone may be partial."""
    product = torch.matmul(a, b) if a.dim() == 2 else torch.bmm(a, b)
    product = product if alpha == 1 else product * alpha
    return product + (bias if beta == 1 else bias * beta)


RULES: tuple[RuleEntry, ...] = (
    rule(aten.mm.default, "m k, k n -> m n", linear="0|1"),
    rule(aten.bmm.default, "b m k, b k n -> b m n", linear="0|1"),
    rule(aten.mv.default, "m k, k -> m", linear="0|1"),
    rule((aten.dot.default, aten.vdot.default), "k, k -> ", linear="0|1"),
    rule(aten.addmm.default, "~m n, m k!, k! n -> m n", linear=BIAS, expand=expand_with_bias),
    rule(aten.baddbmm.default, "~b m n, b m k!, b k! n -> b m n", linear=BIAS, expand=expand_with_bias),
    rule(aten.addmv.default, "~m, m k!, k! -> m", linear=BIAS),
    rule(aten.addr.default, "~m n, m, n -> m n", linear=BIAS),
    rule(aten.addbmm.default, "~m n, b! m k!, b! k! n -> m n", linear=BIAS),
)
