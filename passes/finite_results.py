"""What is sure of the results of an op, by what is sure of its arguments: a table, and laws for what is not in it.

A NaN on one device is left aside (it is one in pieces too), and so is what overflows or vanishes in its dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from enum import Flag, auto
from typing import Any, NamedTuple

import torch

from shardfx.ir.graph import Node, Value
from shardfx.ir.ops.traits import base_name, is_heavy
from shardfx.ir.rules.schema import argument
from shardfx.ir.rules.sharding_rule import ShardingRule
from shardfx.ir.rules.template import keeps_precision


class Sure(Flag):
    """What is known of all elements of a value."""

    NOTHING = 0
    FINITE = auto()
    NONZERO = auto()
    NONNEGATIVE = auto()


NOTHING, FINITE, NONZERO, NONNEGATIVE = Sure.NOTHING, Sure.FINITE, Sure.NONZERO, Sure.NONNEGATIVE
ALL = FINITE | NONZERO | NONNEGATIVE
Facts = Mapping[Value, Sure]


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


class Call(NamedTuple):
    """A node, with what is sure of its arguments."""

    node: Node
    facts: Facts

    def sure(self, *called: str) -> Sure:
        """What is sure of the argument of that name: all, if it is optional and not given."""
        given = argument(self.node, *called)
        return ALL if given is None else fact(given, self.facts)

    @property
    def inputs(self) -> list[Sure]:
        """What is sure of each argument, in order."""
        return [fact(each, self.facts) for each in (*self.node.args, *self.node.kwargs.values())]

    @property
    def common(self) -> Sure:
        """What is sure of all tensors; nothing if there are none."""
        found = ALL if self.node.operands else NOTHING
        for value in self.node.operands:
            found &= self.facts.get(value, NOTHING)
        return found

    @property
    def numbers_are_finite(self) -> bool:
        """Whether none of the arguments is a number that is infinite."""
        return all(math.isfinite(each) for each in _floats((self.node.args, list(self.node.kwargs.values()))))

    @property
    def real(self) -> Sure:
        """What may be said of real numbers alone."""
        return NOTHING if self.node.outs[0].type.dtype.is_complex else ALL


def _floats(nest: Any) -> Iterator[float]:
    if isinstance(nest, (list, tuple)):
        for each in nest:
            yield from _floats(each)
    elif isinstance(nest, float):
        yield nest


Result = Sure | tuple[Sure, ...]
"""What is sure of all results, or of each."""


def of_results(call: Call, rule: ShardingRule) -> Result:
    """What is sure of the results of a node: by the table, by how elements move, by what the op is made of."""
    name, node = base_name(call.node), call.node
    if name in BY_OP:
        return BY_OP[name](call)
    if name in BOUNDED:
        return FINITE
    if not call.numbers_are_finite:
        return NOTHING
    reads_bits = any(a.type.dtype != b.type.dtype for a in node.operands for b in node.outs)
    if name in SHOWN and not reads_bits:
        return call.common
    if rule.moves_only:
        return call.common & (FINITE if reads_bits else FINITE | NONNEGATIVE)
    return call.common & FINITE if name in BUILT or is_heavy(node) or is_polynomial(rule, node) else NOTHING


def is_polynomial(rule: ShardingRule, node: Node) -> bool:
    """Whether a node's results are sums of products of its operands: it is linear in each of them."""
    linear = frozenset[int]().union(*(each.operands for each in rule.linear if not each.along))
    return bool(linear) and all(i in linear or whole(value) for i, value in enumerate(node.operands))


def whole(value: Value) -> bool:
    """Whether a value holds whole numbers, or truths."""
    return not (value.type.dtype.is_floating_point or value.type.dtype.is_complex)


SHOWN = frozenset(
    "clone slice detach view expand permute transpose t unsqueeze squeeze select split unbind cat stack".split()
)
"""Moves that put nothing between the elements, as the gradient of a slice does."""
BOUNDED = frozenset("tanh sin cos erf sign sgn _softmax _safe_softmax".split())
"""Finite whatever they are given."""
BUILT = frozenset(
    """
    amax amin max min prod cumprod cummax cummin sort topk median logsumexp logcumsumexp
    _softmax_backward_data _log_softmax _log_softmax_backward_data native_layer_norm_backward
    native_group_norm_backward native_batch_norm_backward _fused_rms_norm_backward
    nll_loss_forward nll_loss2d_forward max_pool2d_with_indices constant_pad_nd scatter index_fill
    """.split()
)
"""Of finite numbers they make finite ones."""


def _held(given: Any, dtype: torch.dtype) -> Any:
    """A number as a tensor of this dtype holds it."""
    return torch.tensor(given, dtype=dtype).item() if isinstance(given, (int, float)) else given


def _filled(name: str) -> Callable[[Call], Result]:
    """Full of one number, as the result's dtype holds it."""
    return lambda call: _converted(call, argument(call.node, name))


def _converted(call: Call, given: Any) -> Sure:
    """What is sure of an argument in the dtype of the result: of fewer bits, a small number may be zero."""
    dtype = call.node.outs[0].type.dtype
    keeps = ALL if not isinstance(given, Value) or keeps_precision(given.type.dtype, dtype) else ~NONZERO
    return fact(_held(given, dtype), call.facts) & keeps


def _chosen(call: Call) -> Sure:
    """One of two arguments, element by element."""
    return call.sure("self") & call.sure("other") if len(call.node.args) > 1 else NOTHING


def _masked(call: Call) -> Sure:
    return call.sure("self") & _converted(call, argument(call.node, "value"))


def _product(call: Call) -> Sure:
    a, b = call.node.args[:2]
    square = NONNEGATIVE if a is b else NOTHING
    return (fact(a, call.facts) & fact(b, call.facts)) | (square & call.real)


def _sum(call: Call) -> Sure:
    """Of two numbers that are not negative neither takes anything from the other."""
    a, b, *scaled = call.inputs
    if scaled or not NONNEGATIVE & a & b:
        return NOTHING if scaled else a & b & FINITE
    return (a & b & FINITE) | ((a | b) & NONZERO) | NONNEGATIVE


def _difference(call: Call) -> Sure:
    a, b, *scaled = call.inputs
    return NOTHING if scaled else a & b & FINITE


def _quotient(call: Call) -> Sure:
    a, b, *rounded = call.inputs
    finite = FINITE & a if NONZERO & b else NOTHING
    nonzero = NONZERO & a if FINITE & b else NOTHING
    return NOTHING if rounded else finite | nonzero | (a & b & NONNEGATIVE)


def _inverse(given: Sure) -> Sure:
    """1 / x and 1 / sqrt(x)."""
    swapped = (FINITE if NONZERO & given else NOTHING) | (NONZERO if FINITE & given else NOTHING)
    return swapped | (NONNEGATIVE & given)


def _power(call: Call) -> Sure:
    base, exponent = call.node.args[:2]
    if not isinstance(exponent, (int, float)) or not math.isfinite(exponent) or not isinstance(base, Value):
        return NOTHING
    even = NONNEGATIVE & call.real if exponent % 2 == 0 else NOTHING
    given = call.facts.get(base, NOTHING)
    return (given if exponent >= 0 else _inverse(given)) | even


def _limited(call: Call) -> Sure:
    """What lies between two finite limits is finite; what is at least a positive number, and no limit is less, is
    positive."""
    low, high = (argument(call.node, name) for name in ("min", "max"))
    below, above = call.sure("min"), call.sure("max")
    between = FINITE if low is not None and high is not None else call.sure("self") & FINITE
    positive = low is not None and NONNEGATIVE in below & above
    sign = NONNEGATIVE | (NONZERO & below & above) if positive else NOTHING
    return (between & below & above & FINITE) | (sign & call.real)


def _keeps(always: Sure = NOTHING, of: Sure = FINITE) -> Callable[[Call], Result]:
    """Keeps these facts of the first operand, and has some of its own; nothing if it is given an infinite number."""
    return lambda call: (call.inputs[0] & of) | (always & call.real) if call.numbers_are_finite else NOTHING


def _sloped(call: Call) -> Sure:
    slope = argument(call.node, "negative_slope")
    return call.inputs[0] & (FINITE | NONZERO if slope else FINITE) if math.isfinite(slope) else NOTHING


def _softplus(call: Call) -> Sure:
    return _keeps(NONNEGATIVE)(call) if argument(call.node, "beta") > 0 else NOTHING  # type: ignore[return-value]


def _common(call: Call) -> Sure:
    return call.common & FINITE if call.numbers_are_finite else NOTHING


def _normal(call: Call) -> Result:
    """Normalised numbers are bounded, and then scaled and shifted; mean and deviation are those of what is given."""
    eps = argument(call.node, "eps")
    if eps is not None and eps <= 0:
        return NOTHING
    affine = call.sure("weight") & (call.sure("bias") if base_name(call.node) != "_fused_rms_norm" else ALL)
    first, last = affine & FINITE, FINITE
    return (first, call.sure("input") & FINITE, last) if len(call.node.results) > 2 else (first, last)


def _batch_normal(call: Call) -> Result:
    """In training as the others, and running statistics of all; else by statistics that may be anything."""
    training = argument(call.node, "training")
    if not training or argument(call.node, "eps") <= 0:
        return NOTHING
    made = _normal(call)
    assert isinstance(made, tuple)
    return (*made, call.common & FINITE, call.common & FINITE)[: len(call.node.results)]


def _picked(call: Call) -> Sure:
    """The gradient of a mean is divided by the total weight, that of a sum is not."""
    mean = argument(call.node, "reduction") == 1
    return NOTHING if mean and NONZERO not in call.sure("total_weight") else call.common & FINITE


def _attention(call: Call) -> Result:
    """Means of values, whatever the scores; the logsumexp is one of scores."""
    scores = call.sure("q", "query") & call.sure("k", "key") & call.sure("mask", "attn_mask")
    if not call.numbers_are_finite:
        return NOTHING
    return call.sure("v", "value") & FINITE, scores & FINITE


def _attention_backward(call: Call) -> Sure:
    """Weights are at most one, whatever masks say; the logsumexp is that of the scores."""
    found = ALL if call.numbers_are_finite else NOTHING
    for value in call.node.operands[:5]:
        found &= call.facts.get(value, NOTHING)
    return found & FINITE


BY_OP: dict[str, Callable[[Call], Result]] = {
    **dict.fromkeys(("zeros", "zeros_like", "new_zeros"), lambda call: FINITE | NONNEGATIVE),
    **dict.fromkeys(("ones", "ones_like", "new_ones"), lambda call: ALL),
    **dict.fromkeys(("full", "full_like", "new_full"), _filled("fill_value")),
    "fill": _filled("value"),
    "scalar_tensor": _filled("s"),
    "_to_copy": _filled("self"),
    "arange": lambda call: FINITE,
    "neg": _keeps(of=FINITE | NONZERO),
    "mul": _product,
    "div": _quotient,
    "add": _sum,
    "sub": _difference,
    "rsub": _difference,
    "pow": _power,
    "where": _chosen,
    "masked_fill": _masked,
    **dict.fromkeys(("maximum", "minimum"), lambda call: call.sure("self") & call.sure("other")),
    **dict.fromkeys(("clamp", "clamp_min", "clamp_max"), _limited),
    **dict.fromkeys(("reciprocal", "rsqrt"), lambda call: _inverse(call.inputs[0])),
    "sqrt": _keeps(of=ALL),
    **dict.fromkeys(("abs", "square"), _keeps(NONNEGATIVE, of=ALL)),
    "exp": _keeps(NONNEGATIVE),
    "log": lambda call: FINITE if call.inputs[0] == ALL else NOTHING,
    "sigmoid": lambda call: FINITE | NONNEGATIVE,
    "relu": _keeps(NONNEGATIVE, of=FINITE),
    **dict.fromkeys(("expm1", "silu", "gelu", "elu", "dropout", "native_dropout"), _keeps()),
    "softplus": _softplus,
    "leaky_relu": _sloped,
    **dict.fromkeys(("sum", "mean"), _keeps(of=FINITE | NONNEGATIVE)),
    **{f"{name}_backward": _keeps() for name in "gelu silu threshold leaky_relu hardtanh softplus".split()},
    **dict.fromkeys(("tanh_backward", "sigmoid_backward", "elu_backward"), _common),
    **dict.fromkeys(("native_layer_norm", "native_group_norm", "_fused_rms_norm"), _normal),
    **dict.fromkeys(("native_batch_norm", "_native_batch_norm_legit_functional"), _batch_normal),
    "_native_batch_norm_legit_no_training": lambda call: NOTHING,
    **dict.fromkeys(("nll_loss_backward", "nll_loss2d_backward"), _picked),
    **dict.fromkeys(("attention", "_scaled_dot_product_flash_attention_for_cpu"), _attention),
    **dict.fromkeys(
        ("attention_backward", "_scaled_dot_product_flash_attention_for_cpu_backward"), _attention_backward
    ),
}
"""What is sure of the results of an op."""
