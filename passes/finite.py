"""Which values are sure to be finite, nonzero, not negative: by what they are multiplied with, partial sums may pass.

``a * c + b * c`` is ``(a + b) * c`` for numbers; where c is infinite, terms of two signs make NaN of what one device
finds infinite. So a partial sum passes a product only with a value that is sure to be finite, and a quotient only by
one that is sure not to be zero. What the user hands in (arguments, targets, buffers) may hold infinities on purpose, as
masks do.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from types import MappingProxyType

from shardfx.ir.graph import Graph, InputKind, Node, Value
from shardfx.ir.ops.table import OwnOp, carried
from shardfx.ir.ops.traits import base_name
from shardfx.ir.rules.schema import given_tensors
from shardfx.ir.rules.sharding_rule import ShardingRule

from .finite_results import ALL, FINITE, NONZERO, NOTHING, Call, Facts, Sure, fact, of_results, whole

ANYTHING: Mapping[int, Sure] = MappingProxyType({})
SLOPES = """
    gelu silu threshold leaky_relu hardtanh softplus hardswish hardsigmoid mish softshrink hardshrink
    """
NEEDED: dict[str, Mapping[int, Sure]] = {
    "div": {1: NONZERO},
    "addcdiv": {2: NONZERO},
    "attention_backward": dict.fromkeys(range(1, 5), FINITE),
    "_scaled_dot_product_flash_attention_for_cpu_backward": dict.fromkeys(range(1, 5), FINITE),
    **{f"nll_loss{name}_backward": {3: FINITE, 4: FINITE | NONZERO} for name in ("", "2d")},
    "linalg_solve_triangular": {0: FINITE | NONZERO},
    "triangular_solve": {1: FINITE | NONZERO},
    "cholesky_solve": {1: FINITE | NONZERO},
    "linalg_lu_solve": {0: FINITE | NONZERO},
    "linalg_ldl_solve": {0: FINITE | NONZERO},
    **{f"{name}_backward": ANYTHING for name in SLOPES.split()},
}
"""What an op's tensors must be where others of them are partial sums; of all other ops finite. A system of equations
is divided by its diagonal, a mean by its weights; what the rule says nobody looks at may be anything. The slope of an
activation is bounded whatever its input is, and so is the weight that attention gives, whatever its mask is."""


def keeps_terms_finite(node: Node, rule: ShardingRule, group: frozenset[int], facts: Facts) -> bool:
    """Whether a node whose operands of these numbers are partial sums multiplies them by nothing infinite."""
    if rule.moves_only:
        return True
    free = group | rule.ignored
    needed = NEEDED.get(base_name(node))
    numbers = itertools.count()
    for slot, given in enumerate(given_tensors(node)):
        if given is None or (isinstance(given, Value) and next(numbers) in free):
            continue
        if (FINITE if needed is None else needed.get(slot, NOTHING)) not in fact(given, facts):
            return False
    return True


def sure_facts(graph: Graph, rule: Callable[[Node], ShardingRule]) -> dict[Value, Sure]:
    """What is sure of each value of a graph; one that is held otherwise is the same value.

    Args:
        rule: gives the rule of a node.
    """
    facts = {given.value: _typed(given.value) for given in graph.inputs}
    for given in graph.of_kind(InputKind.PARAMETER):
        facts[given.value] |= FINITE
    for node in graph.nodes:
        if isinstance(node.op, OwnOp):
            for operand, held in carried(node):
                facts[held] = facts.get(held, ALL) & facts[operand]
            continue
        found = of_results(Call(node, facts), rule(node))
        for value in node.outs:
            facts[value] = (found[value.index] if isinstance(found, tuple) else found) | _typed(value)
    return facts


def _typed(value: Value) -> Sure:
    """Whole numbers are finite."""
    return FINITE if whole(value) else NOTHING
