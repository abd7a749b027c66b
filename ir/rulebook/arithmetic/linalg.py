"""Linear algebra: matrices are replicated, their leading dims are batch dims; the columns of a right-hand side may be
sharded.

Matrix products: sharding the summed dim leaves a partial sum; with a fused bias, the op is decomposed first. Grouped
products may be sharded by rows and by groups: each rank multiplies those of its rows that are in its groups.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from shardfx.ir.graph import Node
from shardfx.ir.ops.computing.grouped_product import grouped_mm, grouped_outer
from shardfx.ir.rulebook.dims import argument, packed, words
from shardfx.ir.rules.book import RuleEntry, rule
from shardfx.ir.rules.local import Emit
from shardfx.ir.rules.sharding_rule import SAME
from shardfx.ir.rules.template import Template, template

aten = torch.ops.aten


MATRIX = "n.. i! j!"


def sided(form: str, node: Node) -> str:
    """Select the template for ``A X = B`` or for ``X A = B``, by the argument ``left``."""
    left, right = form.split(" | ")
    return right if argument(node, "left") is False else left


def solve_ex(node: Node) -> str:
    """``A X = B`` with the factorization of A among the results: replicated where columns of B are sharded."""
    a, b = (value.shape for value in node.operands)
    vectors = len(b) == 1 or b == a[:-1]
    x = "n.. j!" if vectors else "n.. k j!" if argument(node, "left") is False else "n.. j! k"
    return f"{MATRIX}, {x} -> {x}, {MATRIX}, n.. p!, n.."


def trilinear(node: Node) -> str:
    """A trilinear product: an einsum of three tensors, each unsqueezed, that is summed over some dims."""
    put_in, summed = node.args[3:6], node.args[6]
    ndim = node.operands[0].type.ndim + len(put_in[0])
    operands = [words(f"d{d}" for d in range(ndim) if d not in own) for own in put_in]
    return f"{', '.join(operands)} -> {words(f'd{d}' for d in range(ndim) if d not in summed)}"


def columns(form: str, node: Node) -> str:
    """In the norms 0 and 1 a distance is a sum over the columns ``k``; in other norms they are replicated."""
    return form if argument(node, "p") in (0, 1) else form.replace("k", "k!")


def distance_gradient(form: str, node: Node) -> Template:
    """The gradient of distances: zero in the norm 0, whatever the operands; in the norm 1 independent of the distances;
    in the norm 2 linear in the points, for fixed distances."""
    p, last = argument(node, "p"), form.partition("->")[0].count(",")
    unread = range(last + 1) if p == 0 else (last,) if p == 1 else ()
    between = ["&".join(map(str, range(1, last)))] * (p == 2)
    return template(form, "|".join(["0"] * (p != 0) + between + [f"{i}>" for i in unread]))


# ---- products --------------------------------------------------------------------------------------------------------


BIAS = "0&1|0&2"
SUMMED = f"{BIAS}|0*k"
"""With a bias the summed dims are replicated, as each rank would add the bias; unless it is a partial sum, too."""


def expand_with_bias(
    bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: float = 1, alpha: float = 1
) -> torch.Tensor:
    """``addmm`` and ``baddbmm`` as a product and a sum, so that the product alone may be partial. An operand with
    factor 0 is ignored, infinities and NaN included."""
    product = torch.matmul(a, b) if a.dim() == 2 else torch.bmm(a, b)
    product = product if alpha == 1 else product * alpha if alpha else torch.zeros_like(product)
    return product + (bias if beta == 1 else bias * beta) if beta else product


def by_group(emit: Emit) -> Any:
    """A grouped product, with the numbers of the rank's rows and groups, as the groups' ends are global."""
    groups = emit.operand_shard(1, 0) if emit.node.op is grouped_mm else emit.result_shard(0, 0)
    stored = [[] if each.is_full else each.numbers for each in (emit.operand_shard(0, 0), groups)]
    return emit.call(emit.node.op, *emit.args[:3], *stored)


RULES: tuple[RuleEntry, ...] = (
    rule((aten.cholesky_inverse, aten.linalg_matrix_exp), f"{MATRIX} -> {MATRIX}"),
    rule((aten.linalg_cholesky_ex.default, aten.linalg_inv_ex.default), f"{MATRIX} -> {MATRIX}, n.."),
    rule((aten.linalg_lu_factor_ex, aten.linalg_ldl_factor_ex), f"{MATRIX} -> {MATRIX}, n.. p!, n.."),
    rule(aten.linalg_lu, "n.. i! j! -> n.. i! i!, n.. i! p!, n.. p! j!"),
    rule(aten.lu_unpack, "n.. i! j!, n.. p! -> n.. i! i!, n.. i! q!, n.. q! j!"),
    rule(aten.linalg_qr, "n.. i! j! -> n.. i! k!, n.. l! j!"),
    rule(aten.geqrf, f"{MATRIX} -> {MATRIX}, n.. k!"),
    rule(aten.linalg_householder_product, f"{MATRIX}, n.. k! -> {MATRIX}"),
    rule(
        aten.ormqr,
        partial(sided, f"{MATRIX}, n.. t!, n.. k! c -> n.. k! c | {MATRIX}, n.. t!, n.. c k! -> n.. c k!"),
        linear="2",
    ),
    packed(aten._linalg_det, f"{MATRIX} -> n.., {MATRIX}, n.. p!"),
    packed(aten._linalg_slogdet, f"{MATRIX} -> n.., n.., {MATRIX}, n.. p!"),
    rule(aten.linalg_eig, f"{MATRIX} -> n.. i!, {MATRIX}"),
    rule(aten._linalg_eigh, f"{MATRIX} -> n.. i!, {MATRIX}"),
    rule(aten._linalg_svd, "n.. i! j! -> n.. i! k!, n.. s!, n.. l! j!"),
    rule(aten.linalg_pinv.atol_rtol_tensor, "n.. i! j!, n.., n.. -> n.. j! i!"),
    packed(aten._linalg_solve_ex, solve_ex, linear="1>0", reduce=SAME),
    rule(
        aten.linalg_solve_triangular,
        partial(sided, f"{MATRIX}, n.. j! k -> n.. j! k | {MATRIX}, n.. k j! -> n.. k j!"),
        linear="1",
    ),
    rule(aten.triangular_solve, f"n.. j! k, {MATRIX} -> n.. j! k, {MATRIX}", linear="0>0", reduce=SAME),
    rule(
        aten.linalg_lu_solve,
        partial(sided, f"{MATRIX}, n.. i!, n.. i! k -> n.. i! k | {MATRIX}, n.. i!, n.. k i! -> n.. k i!"),
        linear="2",
    ),
    rule(aten.linalg_ldl_solve, f"{MATRIX}, n.. i!, n.. i! k -> n.. i! k", linear="2"),
    rule(aten.cholesky_solve, f"n.. j! k, {MATRIX} -> n.. j! k", linear="0"),
    rule(aten.linalg_cross, "d.. k@dim!, d.. k@dim! -> d.. k@dim", linear="0|1"),
    rule(aten._trilinear, trilinear, linear="0|1|2"),
    rule(aten._cdist_forward, partial(columns, "n.. i k, n.. j k -> n.. i j")),
    rule(aten._cdist_backward, partial(distance_gradient, "n.. i j, n.. i k, n.. j k, n.. i j -> n.. i k")),
    packed(aten._pdist_forward, partial(columns, "i! k -> p!")),
    packed(aten._pdist_backward, partial(distance_gradient, "p!, i! k, p! -> i! k")),
    rule(aten.trace, "i! j! -> ", linear="0"),
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
