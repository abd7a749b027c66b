"""Which values are finite, nonzero, nonnegative: by what a partial sum is multiplied with decides whether it may pass.

``a * c + b * c`` is ``(a + b) * c`` for numbers; where c is infinite, terms of two signs make NaN of what one device
finds infinite. So a partial sum passes a product only with a finite value, and a quotient only by a nonzero one. Inputs
of the user (arguments, targets, buffers) may be infinite on purpose, as masks are. NaN on one device, overflow and
underflow are left out of account. What no table here has is taken to be anything: then sums are reduced before.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Flag, auto
from typing import Any

import torch

from shardfx.ir.graph import Graph, InputKind, Node, Value
from shardfx.ir.ops.table import OwnOp, carried
from shardfx.ir.ops.traits import base_name, is_heavy
from shardfx.ir.rules.sharding_rule import ShardingRule
from shardfx.ir.rules.template import argument, given_tensors, keeps_precision


class Sure(Flag):
    """What is known of all elements of a value."""

    NOTHING = 0
    FINITE = auto()
    NONZERO = auto()
    NONNEGATIVE = auto()


NOTHING, FINITE, NONZERO, NONNEGATIVE = Sure.NOTHING, Sure.FINITE, Sure.NONZERO, Sure.NONNEGATIVE
ALL = FINITE | NONZERO | NONNEGATIVE
Facts = Mapping[Value, Sure]
Result = Sure | tuple[Sure, ...]
"""What is sure of all results, or of each."""


def _each(names: str, entry: Any) -> dict[str, Any]:
    return dict.fromkeys(names.split(), entry)


SLOPES = "gelu silu threshold leaky_relu hardtanh softplus hardswish hardsigmoid mish softshrink hardshrink"
ATTENTION = "attention _scaled_dot_product_flash_attention_for_cpu"
ATTENTION_BACKWARD = " ".join(f"{name}_backward" for name in ATTENTION.split())
SLOPE_BACKWARD = " ".join(f"{name}_backward" for name in SLOPES.split())
NEEDED: dict[str, Mapping[int, Sure]] = {
    "div": {1: NONZERO},
    "addcdiv": {2: NONZERO},
    **_each(ATTENTION_BACKWARD, dict.fromkeys(range(1, 5), FINITE)),
    **_each("nll_loss_backward nll_loss2d_backward", {3: FINITE, 4: FINITE | NONZERO}),
    **_each("linalg_solve_triangular linalg_lu_solve linalg_ldl_solve", {0: FINITE | NONZERO}),
    **_each("triangular_solve cholesky_solve", {1: FINITE | NONZERO}),
    **_each(SLOPE_BACKWARD, {}),
}
"""What an op's tensors must be where others of them are partial sums, by position; of all other ops finite. The slope
of an activation is bounded whatever its input is, and so is the weight that attention gives, whatever its mask is."""
ALWAYS: dict[str, Sure] = {
    **_each("zeros zeros_like new_zeros sigmoid", FINITE | NONNEGATIVE),
    **_each("ones ones_like new_ones", ALL),
    **_each("arange tanh sin cos erf sign sgn _softmax _safe_softmax", FINITE),
}
"""Of results, whatever the operands are."""
OF_FIRST: dict[str, tuple[Sure, Sure]] = {
    "neg": (FINITE | NONZERO, NOTHING),
    "sqrt": (ALL, NOTHING),
    **_each("abs square", (ALL, NONNEGATIVE)),
    **_each("exp relu", (FINITE, NONNEGATIVE)),
    **_each("sum mean", (FINITE | NONNEGATIVE, NOTHING)),
    **_each("expm1 silu gelu elu leaky_relu dropout native_dropout", (FINITE, NOTHING)),
    **_each(SLOPE_BACKWARD, (FINITE, NOTHING)),
}
"""What results keep of the facts of the first operand, and what they have besides."""
SHOWN = frozenset(
    "clone slice detach view expand permute transpose t unsqueeze squeeze select split unbind cat stack".split()
)
"""Moves that put nothing between the elements, as the gradient of a slice does."""
FINITE_OF_FINITE = frozenset(
    """
    amax amin max min prod cumprod cummax cummin sort topk median logsumexp logcumsumexp tanh_backward sigmoid_backward
    elu_backward _softmax_backward_data _log_softmax _log_softmax_backward_data native_layer_norm_backward
    native_group_norm_backward native_batch_norm_backward _fused_rms_norm_backward sub rsub nll_loss_forward
    nll_loss2d_forward max_pool2d_with_indices constant_pad_nd scatter index_fill
    """.split()
)


def keeps_terms_finite(node: Node, rule: ShardingRule, group: frozenset[int], facts: Facts) -> bool:
    """Whether a node whose operands of these numbers are partial sums multiplies them by nothing infinite."""
    if rule.moves_only:
        return True
    free, needed, numbers = group | rule.ignored, NEEDED.get(base_name(node)), itertools.count()
    for slot, given in enumerate(given_tensors(node)):
        if given is None or (isinstance(given, Value) and next(numbers) in free):
            continue
        if (FINITE if needed is None else needed.get(slot, NOTHING)) not in fact(given, facts):
            return False
    return True


def sure_facts(graph: Graph, rule: Callable[[Node], ShardingRule]) -> dict[Value, Sure]:
    """What is sure of each value of a graph, with ``rule`` giving the rule of a node."""
    facts = {given.value: FINITE if _is_integer(given.value) else NOTHING for given in graph.inputs}
    for given in graph.of_kind(InputKind.PARAMETER):
        facts[given.value] |= FINITE
    for node in graph.nodes:
        if isinstance(node.op, OwnOp):
            for operand, moved in carried(node):
                facts[moved] = facts.get(moved, ALL) & facts[operand]
            continue
        found = of_results(node, facts, rule(node))
        for value in node.outs:
            facts[value] = found[value.index] if isinstance(found, tuple) else found
            facts[value] |= FINITE if _is_integer(value) else NOTHING
    return facts


def of_results(node: Node, facts: Facts, rule: ShardingRule) -> Result:
    """What is sure of the results of a node: by the tables, by how elements move, by what the op is made of."""
    name = base_name(node)
    if name in ALWAYS:
        return ALWAYS[name]
    if name in BY_OP:
        return BY_OP[name](node, facts)
    if not all(map(math.isfinite, _floats((node.args, list(node.kwargs.values()))))):
        return NOTHING
    if name in OF_FIRST:
        kept, added = OF_FIRST[name]
        return (fact(node.args[0], facts) & kept) | (added & _real(node))
    common = _common(node.operands, facts)
    other_dtype = any(a.type.dtype != b.type.dtype for a in node.operands for b in node.outs)
    if rule.moves_only:
        return (
            common if name in SHOWN and not other_dtype else common & (FINITE if other_dtype else FINITE | NONNEGATIVE)
        )
    linear = frozenset[int]().union(*(each.operands for each in rule.linear if not each.along))
    polynomial = linear and all(i in linear or _is_integer(value) for i, value in enumerate(node.operands))
    return common & FINITE if name in FINITE_OF_FINITE or is_heavy(node) or polynomial else NOTHING


def fact(given: Any, facts: Facts) -> Sure:
    """What is sure of an argument: a value, or a number."""
    if isinstance(given, Value):
        return facts.get(given, NOTHING)
    if not isinstance(given, (int, float)):
        return NOTHING
    known = {FINITE: math.isfinite(given), NONZERO: given != 0, NONNEGATIVE: given >= 0}
    return Sure(sum(each.value for each, holds in known.items() if holds))


def _named(node: Node, facts: Facts, *called: str) -> Sure:
    """What is sure of the argument of that name: all, if it is optional and not given."""
    given = argument(node, *called)
    return ALL if given is None else fact(given, facts)


def _common(given: Iterable[Any], facts: Facts) -> Sure:
    """What is sure of all of them; nothing if there are none."""
    found = [fact(each, facts) for each in given]
    return functools.reduce(operator.and_, found) if found else NOTHING


def _real(node: Node) -> Sure:
    """What may be said of real numbers alone."""
    return NOTHING if node.outs[0].type.dtype.is_complex else ALL


def _is_integer(value: Value) -> bool:
    """Whether a value holds integers or booleans, which are finite."""
    return not (value.type.dtype.is_floating_point or value.type.dtype.is_complex)


def _floats(nest: Any) -> Iterator[float]:
    if isinstance(nest, (list, tuple)):
        for each in nest:
            yield from _floats(each)
    elif isinstance(nest, float):
        yield nest


def _filled(name: str) -> Callable[[Node, Facts], Sure]:
    """Of an argument in the dtype of the result: of fewer bits, a small number may be zero."""

    def filled(node: Node, facts: Facts) -> Sure:
        given, dtype = argument(node, name), node.outs[0].type.dtype
        if isinstance(given, Value):
            return fact(given, facts) & (ALL if keeps_precision(given.type.dtype, dtype) else ~NONZERO)
        return fact(torch.tensor(given, dtype=dtype).item(), facts)

    return filled


def _product(node: Node, facts: Facts) -> Sure:
    a, b = node.args[:2]
    return _common((a, b), facts) | (NONNEGATIVE & _real(node) if a is b else NOTHING)


def _sum(node: Node, facts: Facts) -> Sure:
    """Of two nonnegative numbers neither takes anything from the other."""
    if len(node.args) != 2 or node.kwargs:
        return NOTHING
    a, b = (fact(each, facts) for each in node.args)
    return (a & b & (FINITE | NONNEGATIVE)) | ((a | b) & NONZERO if NONNEGATIVE in a & b else NOTHING)


def _quotient(node: Node, facts: Facts) -> Sure:
    a, b = (fact(each, facts) for each in node.args[:2])
    return NOTHING if node.kwargs else (a & _inverse(b) & ~NONNEGATIVE) | (a & b & NONNEGATIVE)


def _inverse(given: Sure) -> Sure:
    """1 / x and 1 / sqrt(x)."""
    swapped = (FINITE if NONZERO in given else NOTHING) | (NONZERO if FINITE in given else NOTHING)
    return swapped | (NONNEGATIVE & given)


def _power(node: Node, facts: Facts) -> Sure:
    base, exponent = node.args[:2]
    if not isinstance(exponent, (int, float)) or not math.isfinite(exponent) or not isinstance(base, Value):
        return NOTHING
    even = NONNEGATIVE & _real(node) if exponent % 2 == 0 else NOTHING
    return (fact(base, facts) if exponent >= 0 else _inverse(fact(base, facts))) | even


def _clamped(node: Node, facts: Facts) -> Sure:
    """Between finite limits it is finite, and at least a positive number, which no limit is below, it is positive."""
    limits = _named(node, facts, "min") & _named(node, facts, "max")
    both = argument(node, "min") is not None and argument(node, "max") is not None
    low = limits & (NONNEGATIVE | NONZERO) if argument(node, "min") is not None and NONNEGATIVE in limits else NOTHING
    return (limits & FINITE & (ALL if both else _named(node, facts, "self"))) | (low & _real(node))


def _normalized(node: Node, facts: Facts) -> Result:
    """Bounded numbers, scaled and shifted; their mean, and an inverse deviation that eps keeps finite; of a batch norm
    in training the running statistics, too. In evaluation it divides by what may be anything."""
    eps = argument(node, "eps")
    if (eps is not None and eps <= 0) or argument(node, "training") is False:
        return NOTHING
    scaled = _named(node, facts, "weight") & _named(node, facts, "bias") & FINITE
    if len(node.results) == 2:
        return scaled, FINITE
    common = _common(node.operands, facts) & FINITE
    return (scaled, _named(node, facts, "input") & FINITE, FINITE, common, common)[: len(node.results)]


def _picked(node: Node, facts: Facts) -> Sure:
    """The gradient of a mean is divided by the total weight, that of a sum is not."""
    mean = argument(node, "reduction") == 1
    return _common(node.operands, facts) & (
        FINITE if not mean or NONZERO in _named(node, facts, "total_weight") else NOTHING
    )


def _attended(node: Node, facts: Facts) -> Result:
    """Means of values, whatever the scores, and the logsumexp of the scores."""
    scores = (
        _named(node, facts, "q", "query") & _named(node, facts, "k", "key") & _named(node, facts, "mask", "attn_mask")
    )
    return _named(node, facts, "v", "value") & FINITE, scores & FINITE


BY_OP: dict[str, Callable[[Node, Facts], Result]] = {
    **_each("full full_like new_full", _filled("fill_value")),
    "fill": _filled("value"),
    "scalar_tensor": _filled("s"),
    "_to_copy": _filled("self"),
    "masked_fill": lambda node, facts: _named(node, facts, "self") & _filled("value")(node, facts),
    "where": lambda node, facts: _common(node.args[1:], facts),
    **_each("maximum minimum", lambda node, facts: _common(node.args, facts)),
    "mul": _product,
    "div": _quotient,
    "add": _sum,
    "pow": _power,
    **_each("clamp clamp_min clamp_max", _clamped),
    **_each("reciprocal rsqrt", lambda node, facts: _inverse(fact(node.args[0], facts))),
    "log": lambda node, facts: FINITE if fact(node.args[0], facts) == ALL else NOTHING,
    **_each(
        "native_layer_norm native_group_norm _fused_rms_norm native_batch_norm _native_batch_norm_legit_functional",
        _normalized,
    ),
    **_each("nll_loss_backward nll_loss2d_backward", _picked),
    **_each(ATTENTION, _attended),
    **_each(ATTENTION_BACKWARD, lambda node, facts: _common(node.operands[:5], facts) & FINITE),
    "_native_batch_norm_legit_no_training": lambda node, facts: NOTHING,
}
