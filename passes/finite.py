"""Which values are sure to be finite, nonzero, not negative: by what they are multiplied with, partial sums may pass.

``a * c + b * c`` is ``(a + b) * c`` for numbers; where c is infinite, terms of two signs make NaN of what one device
finds infinite. So a partial sum passes a product only with a value that is sure to be finite, and a quotient only by
one that is sure not to be zero. Overflow is left aside: a result that is too large for its dtype is taken for a number.
What the user hands in (arguments, targets, buffers) may hold infinities on purpose, as masks do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from enum import Flag, auto
from typing import Any

from shardfx.ir.graph import Graph, InputKind, Node, Value
from shardfx.ir.ops.traits import base_name, is_heavy
from shardfx.ir.rules.schema import given_tensors
from shardfx.ir.rules.sharding_rule import ShardingRule


class Sure(Flag):
    """What is known of all elements of a value."""

    NOTHING = 0
    FINITE = auto()
    NONZERO = auto()
    NONNEGATIVE = auto()


NOTHING, FINITE, NONZERO, NONNEGATIVE = Sure.NOTHING, Sure.FINITE, Sure.NONZERO, Sure.NONNEGATIVE
ALL = FINITE | NONZERO | NONNEGATIVE
Facts = Mapping[Value, Sure]

NEEDED: dict[str, dict[int, Sure]] = {
    "mul": {0: FINITE, 1: FINITE},
    "div": {1: NONZERO},
    "addcmul": {1: FINITE, 2: FINITE},
    "addcdiv": {2: NONZERO},
    "lerp": {2: FINITE},
}
"""What an op's tensors must be where others of them are partial sums."""


def keeps_terms_finite(node: Node, group: frozenset[int], facts: Facts) -> bool:
    """Whether a node whose operands of these numbers are partial sums multiplies them by nothing infinite."""
    needed = NEEDED.get(base_name(node))
    if needed is None:
        return True
    partial = {node.operands[i] for i in group}
    slots = enumerate(given_tensors(node))
    return all(slot not in needed or given in partial or needed[slot] in fact(given, facts) for slot, given in slots)


def fact(given: Any, facts: Facts) -> Sure:
    """What is sure of an argument: a value, or a number."""
    if isinstance(given, Value):
        return facts.get(given, NOTHING)
    if not isinstance(given, (int, float)):
        return NOTHING
    return (
        (FINITE if math.isfinite(given) else NOTHING)
        | (NONZERO if given != 0 else NOTHING)
        | (NONNEGATIVE if given >= 0 else NOTHING)
    )


def sure_facts(graph: Graph, rules: Mapping[Node, ShardingRule]) -> dict[Value, Sure]:
    """What is sure of each value of a graph."""
    facts = {given.value: _typed(given.value) for given in graph.inputs}
    for given in graph.of_kind(InputKind.PARAMETER):
        facts[given.value] |= FINITE
    for node in graph.nodes:
        found = _made(node, rules[node], facts)
        for value in node.outs:
            facts[value] = found | _typed(value)
    return facts


def _typed(value: Value) -> Sure:
    """Whole numbers are finite."""
    dtype = value.type.dtype
    return NOTHING if dtype.is_floating_point or dtype.is_complex else FINITE


def _made(node: Node, rule: ShardingRule, facts: Facts) -> Sure:
    name = base_name(node)
    if name in FILLED:
        return fact(node.args[1], facts)
    given = [fact(each, facts) for each in (*node.args, *node.kwargs.values())]
    if name in BY_ARGUMENT:
        return BY_ARGUMENT[name](node, given)
    if is_heavy(node) or name in BOUNDED:
        return FINITE
    tensors = [facts.get(value, NOTHING) for value in node.operands]
    common = _common(tensors) if tensors else NOTHING
    if name in SAME or rule.moves_only:
        return common if name in SAME or name in SHOWN else common & ~NONZERO
    return NOTHING if rule.transparent else common & FINITE


def _common(given: Sequence[Sure]) -> Sure:
    found = ALL
    for each in given:
        found &= each
    return found


def _chosen(node: Node, given: list[Sure]) -> Sure:
    """One of the last two arguments, element by element."""
    return given[-1] & given[-2] if len(given) > 2 else NOTHING


def _masked(node: Node, given: list[Sure]) -> Sure:
    return given[0] & given[2]


def _product(node: Node, given: list[Sure]) -> Sure:
    square = NONNEGATIVE if node.args[0] is node.args[1] else NOTHING
    return (given[0] & given[1]) | (square & _real(node))


def _real(node: Node) -> Sure:
    return NOTHING if node.outs[0].type.dtype.is_complex else ALL


def _sum(node: Node, given: list[Sure]) -> Sure:
    """Of two numbers that are not negative neither takes anything from the other."""
    a, b = given[:2]
    if len(given) > 2 or not NONNEGATIVE & a & b:
        return a & b & FINITE if len(given) == 2 else NOTHING
    return (a & b & FINITE) | ((a | b) & NONZERO) | NONNEGATIVE


def _difference(node: Node, given: list[Sure]) -> Sure:
    return given[0] & given[1] & FINITE if len(given) == 2 else NOTHING


def _quotient(node: Node, given: list[Sure]) -> Sure:
    a, b = given[:2]
    finite = FINITE & a if NONZERO & b else NOTHING
    nonzero = NONZERO & a if FINITE & b else NOTHING
    return NOTHING if len(given) > 2 else finite | nonzero | (a & b & NONNEGATIVE)


def _inverse(given: Sure) -> Sure:
    """1 / x and 1 / sqrt(x)."""
    swapped = (FINITE if NONZERO & given else NOTHING) | (NONZERO if FINITE & given else NOTHING)
    return swapped | (NONNEGATIVE & given)


def _power(node: Node, given: list[Sure]) -> Sure:
    base, exponent = node.args[:2]
    if isinstance(exponent, Value) or not isinstance(base, Value):
        return NOTHING
    even = NONNEGATIVE & _real(node) if exponent % 2 == 0 else NOTHING
    return (given[0] if exponent >= 0 else _inverse(given[0])) | even


def _limited(node: Node, given: list[Sure]) -> Sure:
    """What is at least a positive number is not zero."""
    low = node.args[1] if len(node.args) > 1 else None
    positive = isinstance(low, (int, float)) and low > 0
    return (given[0] & FINITE) | (NONZERO | NONNEGATIVE if positive else NOTHING)


FILLED = ("full", "full_like", "fill")
SAME = ("clone", "_to_copy", "slice", "detach")
"""What is sure of all operands is sure of the results."""
SHOWN = frozenset("view expand permute transpose t unsqueeze squeeze select split unbind cat stack".split())
"""Moves that put nothing between the elements, as the gradient of a slice does."""
BOUNDED = frozenset(
    """
    tanh sin cos erf sign sgn _softmax _log_softmax native_layer_norm native_group_norm native_batch_norm
    _native_batch_norm_legit_functional _native_batch_norm_legit_no_training _fused_rms_norm native_dropout
    """.split()
)
"""Finite whatever they are given, but for what is NaN on one device too."""


ACTIVATIONS = ("gelu", "silu", "tanh", "sigmoid", "threshold", "elu", "leaky_relu", "hardtanh", "softplus")


def _keeps(*always: Sure, of: Sure = FINITE) -> Callable[[Node, list[Sure]], Sure]:
    """Keeps these facts of the first operand, and has some of its own."""
    own = always[0] if always else NOTHING
    return lambda node, given: (given[0] & of) | (own & _real(node))


BY_ARGUMENT: dict[str, Callable[[Node, list[Sure]], Sure]] = {
    "neg": _keeps(of=FINITE | NONZERO),
    "zeros": lambda node, given: FINITE | NONNEGATIVE,
    "zeros_like": lambda node, given: FINITE | NONNEGATIVE,
    "new_zeros": lambda node, given: FINITE | NONNEGATIVE,
    "ones": lambda node, given: ALL,
    "ones_like": lambda node, given: ALL,
    "new_ones": lambda node, given: ALL,
    "arange": lambda node, given: FINITE,
    "new_full": lambda node, given: given[2],
    "scalar_tensor": lambda node, given: given[0],
    "mul": _product,
    "div": _quotient,
    "add": _sum,
    "sub": _difference,
    "rsub": _difference,
    "pow": _power,
    "where": _chosen,
    "masked_fill": _masked,
    "maximum": lambda node, given: given[0] & given[1],
    "minimum": lambda node, given: given[0] & given[1],
    "clamp": _limited,
    "clamp_min": _limited,
    "reciprocal": lambda node, given: _inverse(given[0]),
    "rsqrt": lambda node, given: _inverse(given[0]),
    "sqrt": _keeps(of=ALL),
    "abs": _keeps(NONNEGATIVE, of=ALL),
    "square": _keeps(NONNEGATIVE, of=ALL),
    "exp": _keeps(NONNEGATIVE),
    "expm1": _keeps(),
    "log": lambda node, given: FINITE if given[0] == ALL else NOTHING,
    "sigmoid": lambda node, given: FINITE | NONNEGATIVE,
    "relu": _keeps(NONNEGATIVE),
    "silu": _keeps(),
    "gelu": _keeps(),
    "softplus": _keeps(NONNEGATIVE),
    "leaky_relu": _keeps(of=FINITE | NONZERO),
    "elu": _keeps(),
    "sum": _keeps(of=FINITE | NONNEGATIVE),
    "mean": _keeps(of=FINITE | NONNEGATIVE),
    **{f"{name}_backward": _keeps() for name in ACTIVATIONS},
}
"""What is sure of the results, by what is sure of each argument in its order."""
