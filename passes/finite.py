"""Finiteness: the values with which a partial sum may be multiplied, or divided.

``a * c + b * c`` is ``(a + b) * c`` for numbers; where c is infinite, terms of two signs make NaN of what one device
finds infinite. So a partial sum passes a product only with what is finite where the inputs are, and a quotient only by
a number that is not zero. That the inputs are finite, and so what is made of them (no number overflows, no factor is
a quotient by zero), is an assumption of a plan and of its proof. What no table here has is taken to be infinite: then
sums are reduced before.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from shardfx.ir.graph import Graph, Node, Value
from shardfx.ir.ops.table import OwnOp
from shardfx.ir.ops.traits import base_name, is_heavy
from shardfx.ir.rules.sharding_rule import ShardingRule
from shardfx.ir.rules.template import argument, given_tensors

from .base import RuleCache

EXAMINED: dict[str, tuple[int, ...]] = {
    **dict.fromkeys("sigmoid tanh sin cos erf sign sgn _softmax _safe_softmax".split(), ()),
    **dict.fromkeys(("attention", "_scaled_dot_product_flash_attention_for_cpu"), (2,)),
    **dict.fromkeys(("attention_backward", "_scaled_dot_product_flash_attention_for_cpu_backward"), (0, 1, 2, 3, 4)),
}
"""The tensors, by position, that must be finite so that a product with the others is: of all other ops each. The weight
that attention gives is bounded, whatever its mask is."""
DIVISORS = {"div": "other", "addcdiv": "tensor2"}
DIVISORS |= dict.fromkeys(("nll_loss_backward", "nll_loss2d_backward"), "total_weight")
"""The argument by which the first tensor is divided."""
SOLVES = frozenset("linalg_solve_triangular linalg_lu_solve linalg_ldl_solve triangular_solve cholesky_solve".split())
"""They divide by a matrix, of which nothing is known."""
FINITE_OF_FINITE = frozenset(
    """
    zeros zeros_like new_zeros ones ones_like new_ones full full_like new_full fill scalar_tensor arange _to_copy
    masked_fill where maximum minimum mul div add sub rsub neg abs sqrt square pow clamp clamp_min clamp_max reciprocal
    rsqrt exp expm1 relu silu gelu elu leaky_relu dropout native_dropout sum mean amax amin max min prod cumprod cummax
    cummin sort topk median logsumexp logcumsumexp _log_softmax constant_pad_nd scatter index_fill nll_loss_forward
    nll_loss2d_forward max_pool2d_with_indices native_layer_norm native_group_norm _fused_rms_norm native_batch_norm
    _native_batch_norm_legit_functional tanh_backward sigmoid_backward elu_backward gelu_backward silu_backward
    threshold_backward leaky_relu_backward hardtanh_backward softplus_backward hardswish_backward hardsigmoid_backward
    mish_backward softshrink_backward hardshrink_backward _softmax_backward_data _log_softmax_backward_data
    native_layer_norm_backward native_group_norm_backward native_batch_norm_backward _fused_rms_norm_backward
    nll_loss_backward nll_loss2d_backward
    """.split()
)


@dataclass
class Factors:
    """The values of a graph that may be infinite though the inputs are finite."""

    infinite: set[Value] = field(default_factory=set)

    @staticmethod
    def of(graph: Graph, rules: RuleCache) -> Factors:
        """Those of a graph."""
        found = Factors()
        for node in graph.nodes:
            if not found.gives_finite(node, rules.rule(node)):
                found.infinite.update(value for value in node.outs if _is_float(value))
        return found

    def gives_finite(self, node: Node, rule: ShardingRule) -> bool:
        """Whether the results of a node are finite, by the tables or by what it is made of."""
        if isinstance(node.op, OwnOp):
            return self.infinite.isdisjoint(node.operands)
        name = base_name(node)
        linear = frozenset[int]().union(*(each.operands for each in rule.linear if not each.along))
        polynomial = linear and all(i in linear or not _is_float(value) for i, value in enumerate(node.operands))
        known = name in FINITE_OF_FINITE or name in EXAMINED or is_heavy(node)
        if not (known or rule.moves_only or polynomial) or not all(map(math.isfinite, _floats(node))):
            return False
        return self.keeps_finite(node, frozenset())

    def keeps_finite(self, node: Node, free: frozenset[int]) -> bool:
        """Whether all tensors of a node are finite, but for operands of ``free`` numbers."""
        slots, number = EXAMINED.get(base_name(node)), -1
        for slot, operand in enumerate(given_tensors(node)):
            number += isinstance(operand, Value)
            if operand is None or (isinstance(operand, Value) and number in free):
                continue
            if (slots is None or slot in slots) and not self._is_finite(operand):
                return False
        return True

    def may_pass(self, node: Node, rule: ShardingRule, group: frozenset[int]) -> bool:
        """Whether a node multiplies operands of these numbers, which are partial sums, by nothing infinite, and divides
        them by nothing that may be zero."""
        if rule.moves_only:
            return True
        name, free = DIVISORS.get(base_name(node)), group | rule.ignored
        divisor = argument(node, name) if name is not None else None
        if isinstance(divisor, Value):
            divides = node.operands.index(divisor) in free  # whose values do not matter
        else:
            divides = divisor != 0 and base_name(node) not in SOLVES
        return divides and self.keeps_finite(node, free)

    def _is_finite(self, value: Any) -> bool:
        if isinstance(value, Value):
            return value not in self.infinite
        return isinstance(value, (int, float)) and math.isfinite(value)


def _is_float(value: Value) -> bool:
    return value.type.dtype.is_floating_point or value.type.dtype.is_complex


def _floats(node: Node) -> Iterator[float]:
    """The numbers among the arguments of a node, in lists as well."""
    todo: list[Any] = [*node.args, *node.kwargs.values()]
    while todo:
        value = todo.pop()
        if isinstance(value, (list, tuple)):
            todo += value
        elif isinstance(value, float):
            yield value
