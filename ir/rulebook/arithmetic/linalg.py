"""Linear algebra: matrices are whole, the dims before them are a batch; the columns of a right-hand side may be cut."""

from __future__ import annotations

from collections.abc import Callable

import torch

from shardfx.ir.errors import Error
from shardfx.ir.graph import Node
from shardfx.ir.rulebook.dims import argument, names
from shardfx.ir.rules.book import Contiguous, RuleEntry, replicated, rule
from shardfx.ir.rules.sharding_rule import SAME, Dim, ShardingRule
from shardfx.ir.rules.template import Template

aten = torch.ops.aten


MATRIX = "n.. i! j!"
MakeRule = Callable[[Node], ShardingRule]


def batched(template: str, *, linear: str = "", reduce: str = "sum") -> MakeRule:
    """A template for ops that leave some result empty if it is not asked for: then nothing is cut."""
    parsed = Template(template, linear, reduce)

    def make(node: Node) -> ShardingRule:
        if any(0 in value.shape for value in node.outs):
            return replicated(node)
        return parsed(node)

    make.__name__ = template
    return make


def sided(left: str, right: str, *, linear: str = "", reduce: str = "sum") -> MakeRule:
    """One template where the system stands on the left (``A X = B``), another where it stands on the right."""
    on_left, on_right = batched(left, linear=linear, reduce=reduce), batched(right, linear=linear, reduce=reduce)

    def make(node: Node) -> ShardingRule:
        return (on_right if argument(node, "left") is False else on_left)(node)

    make.__name__ = f"{left} | {right}"
    return make


def solve_ex(node: Node) -> ShardingRule:
    """``A X = B`` with the factorisation of A among the results, which every rank has of all columns of B."""
    a, b = (value.shape for value in node.operands)
    factors = f"{MATRIX}, n.. p!, n.."
    if len(b) == 1 or b == a[:-1]:
        return Template(f"{MATRIX}, n.. j! -> n.. j!, {factors}")(node)
    if argument(node, "left") is False:
        return Template(f"{MATRIX}, n.. k j! -> n.. k j!, {factors}", reduce=SAME)(node)
    return Template(f"{MATRIX}, n.. j! k -> n.. j! k, {factors}", reduce=SAME)(node)


def cross(node: Node) -> ShardingRule:
    """The dim of three is whole; linear in each of the two."""
    out = node.outs[0].shape
    dim = int(argument(node, "dim")) % len(out)
    full, sizes = names(out)

    def dims(shape: tuple[int, ...]) -> tuple[Dim, ...]:
        lead = len(out) - len(shape)
        return tuple(() if s == 1 and out[lead + i] != 1 else full[lead + i] for i, s in enumerate(shape))

    operands = tuple(dims(v.shape) for v in node.operands)
    return ShardingRule(operands, (tuple(full),), sizes, frozenset({f"d{dim}"}), (frozenset({0}), frozenset({1})))


def trilinear(node: Node) -> ShardingRule:
    """The product of three tensors, each with dims of size one put in, summed over some dims: an einsum."""
    expands, summed = node.args[3:6], set(node.args[6])
    ndim = node.operands[0].type.ndim + len(expands[0])
    full, sizes = names([1] * ndim)
    operands = []
    for value, expand in zip(node.operands, expands, strict=True):
        at = [d for d in range(ndim) if d not in expand]
        for d, size in zip(at, value.shape, strict=True):
            sizes[f"d{d}"] = max(sizes[f"d{d}"], size)
        operands.append([(d, size) for d, size in zip(at, value.shape, strict=True)])
    result = tuple(n for d, n in enumerate(full) if d not in summed)
    if len(result) != node.outs[0].type.ndim:
        raise Error("a trilinear product of a shape that its rule does not know", got=str(node.args))
    dims = tuple(tuple(() if s == 1 and sizes[f"d{d}"] != 1 else full[d] for d, s in each) for each in operands)
    return ShardingRule(dims, (result,), sizes, linear=(frozenset({0}), frozenset({1}), frozenset({2})))


def cdist(node: Node) -> ShardingRule:
    """Distances of each row to each; in the norms 0 and 1 a distance is a sum over the columns."""
    return Template(f"n.. i {_columns(node)}, n.. j {_columns(node)} -> n.. i j")(node)


def pdist(node: Node) -> ShardingRule:
    return Template(f"i! {_columns(node)} -> p!")(node)


def _columns(node: Node) -> str:
    return "k" if argument(node, "p") in (0, 1) else "k!"


RULES: tuple[RuleEntry, ...] = (
    rule((aten.cholesky, aten.linalg_matrix_exp), f"{MATRIX} -> {MATRIX}"),
    rule(aten.cholesky_inverse, f"{MATRIX} -> {MATRIX}"),
    rule((aten.linalg_cholesky_ex.default, aten.linalg_inv_ex.default), f"{MATRIX} -> {MATRIX}, n.."),
    rule((aten.linalg_lu_factor_ex, aten.linalg_ldl_factor_ex), f"{MATRIX} -> {MATRIX}, n.. p!, n.."),
    rule(aten.linalg_lu, batched("n.. i! j! -> n.. i! i!, n.. i! p!, n.. p! j!")),
    rule(aten.lu_unpack, batched("n.. i! j!, n.. p! -> n.. i! i!, n.. i! q!, n.. q! j!")),
    rule(aten.linalg_qr, batched("n.. i! j! -> n.. i! k!, n.. l! j!")),
    rule(aten.geqrf, f"{MATRIX} -> {MATRIX}, n.. k!"),
    rule(aten.linalg_householder_product, f"{MATRIX}, n.. k! -> {MATRIX}"),
    rule(
        aten.ormqr,
        sided(f"{MATRIX}, n.. t!, n.. k! c -> n.. k! c", f"{MATRIX}, n.. t!, n.. c k! -> n.. c k!", linear="2"),
    ),
    rule(aten._linalg_det, f"{MATRIX} -> n.., {MATRIX}, n.. p!"),
    rule(aten._linalg_slogdet, f"{MATRIX} -> n.., n.., {MATRIX}, n.. p!"),
    rule(aten.linalg_eig, f"{MATRIX} -> n.. i!, {MATRIX}"),
    rule(aten._linalg_eigh, batched(f"{MATRIX} -> n.. i!, {MATRIX}")),
    rule(aten._linalg_svd, batched("n.. i! j! -> n.. i! k!, n.. s!, n.. l! j!")),
    rule(aten.linalg_pinv.atol_rtol_tensor, "n.. i! j!, n.., n.. -> n.. j! i!"),
    rule(aten._linalg_solve_ex, solve_ex),
    rule(
        aten.linalg_solve_triangular,
        sided(f"{MATRIX}, n.. j! k -> n.. j! k", f"{MATRIX}, n.. k j! -> n.. k j!", linear="1"),
    ),
    rule(aten.triangular_solve, f"n.. j! k, {MATRIX} -> n.. j! k, {MATRIX}", reduce=SAME),
    rule(
        aten.linalg_lu_solve,
        sided(f"{MATRIX}, n.. i!, n.. i! k -> n.. i! k", f"{MATRIX}, n.. i!, n.. k i! -> n.. k i!", linear="2"),
    ),
    rule(aten.linalg_ldl_solve, f"{MATRIX}, n.. i!, n.. i! k -> n.. i! k", linear="2"),
    rule(aten.cholesky_solve, f"n.. j! k, {MATRIX} -> n.. j! k", linear="0"),
    rule(aten.linalg_cross, cross),
    rule(aten._trilinear, trilinear),
    rule(aten._cdist_forward, cdist),
    rule(aten._cdist_backward, "n.. i j, n.. i k, n.. j k, n.. i j -> n.. i k", linear="0"),
    rule(aten._pdist_forward, pdist, contiguous=Contiguous.ALL),
    rule(aten._pdist_backward, "p!, i! k, p! -> i! k", linear="0", contiguous=Contiguous.ALL),
    rule(aten.trace, "i! j! -> ", linear="0"),
)
