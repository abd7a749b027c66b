"""Ops whose arithmetic normal forms know: sums, products, numbers, reductions, products of matrices."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from shardfx.ir.cost.fake_calls import FakeCalls
from shardfx.ir.ops.traits import with_defaults
from shardfx.runtime.verify.proof.elements import Elements

from .arithmetic import Sum, plain, total
from .forms import NormalForms, Types
from .laws import COMMUTE, INVOLUTIONS, LAWS, ONLY
from .matrices import DOTS, dot, reduced
from .values import Alone, Each, V, put, values_in

aten = torch.ops.aten
Given = Mapping[str, Any]
Known = Callable[[NormalForms, Given, tuple[int, ...], torch.dtype], "V | None"]
"""Makes the value of a shape and dtype from arguments by name."""


def empty(fakes: FakeCalls | None = None) -> NormalForms:
    """NormalForms of nothing yet; ``fakes`` remember what calls give."""
    return NormalForms(known=made_of, fakes=fakes or FakeCalls())


def made_of(forms: NormalForms, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], types: Types) -> V | None:
    """What an op gives, where this file knows it."""
    if not isinstance(op, torch._ops.OpOverload):
        return None
    known = KNOWN.get(op)
    pointwise = torch.Tag.pointwise in op.tags
    if known is None and not pointwise:
        return None
    given = types()
    if not isinstance(given, tuple):
        return None
    shape, dtype = given
    made = known(forms, with_defaults(op, args, kwargs), tuple(shape), dtype) if known is not None else None
    if made is not None or not pointwise or (op in LAWS and _speaks(forms, op, args, kwargs)):
        return made
    return each(forms, op, args, kwargs, tuple(shape), dtype)


def _speaks(forms: NormalForms, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    dtypes = {forms[t].dtype for t in values_in((args, kwargs))} - {torch.bool}
    of_floats = len(dtypes) == 1 and next(iter(dtypes)).is_floating_point
    return of_floats and not (op in ONLY and not ONLY[op](*args, **kwargs))


def each(
    forms: NormalForms,
    op: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    shape: tuple[int, ...],
    dtype: torch.dtype,
) -> V | None:
    """An op that is done element by element, of operands in the result's shape."""
    operands = list(values_in((args, kwargs)))
    if kwargs or not operands:
        return None
    wide = [wider(forms, v, shape) for v in operands]
    if None in wide:
        return None
    mixed = tuple(len(forms[v].shape) for v in operands) if len({forms[v].dtype for v in operands}) > 1 else ()
    if op in COMMUTE and len(args) == len(wide) == 2 and not mixed:
        args = wide = sorted(wide, key=lambda v: v.number)  # type: ignore[union-attr]
    if op in INVOLUTIONS and INVOLUTIONS[op] in (None, forms[operands[0]].dtype):
        inner = forms.all_of(operands[0])
        if isinstance(inner, Each) and inner.op is op:
            return inner.args[0]  # type: ignore[no-any-return]
    left = iter(wide)
    return forms.atom(Each(op, put(tuple(args), lambda _: next(left)), mixed), shape, dtype)


def wider(forms: NormalForms, of: V, shape: tuple[int, ...]) -> V | None:
    """A value broadcast to a shape."""
    if forms[of].shape == shape:
        return of
    made = forms.move(aten.expand.default, (of, list(shape)), {})
    return made if isinstance(made, V) else None


# ---- sums and products --------------------------------------------------------------------------------------------


def _numbers(dtype: torch.dtype) -> tuple[type, ...]:
    """What is a number to reckon with beside tensors of a dtype."""
    return (int, float) if dtype.is_floating_point else (int,)


def _term(forms: NormalForms, given: Any, shape: tuple[int, ...], dtype: torch.dtype) -> Sum | None:
    """An operand as a sum, in the shape and dtype of the result."""
    if isinstance(given, V):
        wide = wider(forms, given, shape) if forms[given].dtype == dtype else None
        return None if wide is None else forms.as_sum(wide)
    allowed = type(given) in _numbers(dtype) and math.isfinite(given)
    return Sum(given, ()) if allowed else None


def holds(dtype: torch.dtype, number: int | float) -> bool:
    """Whether a number is in the range of a dtype."""
    if dtype.is_floating_point or dtype is torch.bool:
        return True
    return math.isfinite(number) and torch.iinfo(dtype).min <= number <= torch.iinfo(dtype).max


def _ring(dtype: torch.dtype) -> bool:
    return dtype is not torch.bool and not dtype.is_complex


def _added(first: str, second: str, sign: int) -> Known:
    def known(forms: NormalForms, given: Given, shape: tuple[int, ...], dtype: torch.dtype) -> V | None:
        alpha = given.get("alpha", 1)
        a, b = (_term(forms, given[name], shape, dtype) for name in (first, second))
        if a is None or b is None or not _ring(dtype) or not plain(alpha) or type(alpha) not in _numbers(dtype):
            return None
        return forms.sum(total([a, b.times(sign * alpha)]), shape, dtype)

    return known


def _neg(forms: NormalForms, given: Given, shape: tuple[int, ...], dtype: torch.dtype) -> V | None:
    return forms.sum(forms.as_sum(given["self"]).times(-1), shape, dtype) if _ring(dtype) else None


def _factors(
    forms: NormalForms, names: Sequence[str], given: Given, shape: tuple[int, ...], dtype: torch.dtype
) -> list[V] | None:
    found = []
    for name in names:
        value = given[name]
        if not isinstance(value, V):
            if type(value) not in _numbers(dtype) or not plain(value) or not holds(dtype, value):
                return None
            value = forms.constant(value, shape, dtype)
        wide = wider(forms, value, shape) if forms[value].dtype == dtype else None
        if wide is None:
            return None
        found.append(wide)
    return found


def _mul(forms: NormalForms, given: Given, shape: tuple[int, ...], dtype: torch.dtype) -> V | None:
    factors = _factors(forms, ("self", "other"), given, shape, dtype) if _ring(dtype) else None
    return None if factors is None else forms.product(factors)


def _div(forms: NormalForms, given: Given, shape: tuple[int, ...], dtype: torch.dtype) -> V | None:
    if not dtype.is_floating_point or given.get("rounding_mode") is not None:
        return None
    factors = _factors(forms, ("self", "other"), given, shape, dtype)
    return None if factors is None else forms.product(factors[:1], factors[1:])


def _reciprocal(forms: NormalForms, given: Given, shape: tuple[int, ...], dtype: torch.dtype) -> V | None:
    alike = dtype.is_floating_point and forms[given["self"]].dtype == dtype
    return forms.product([forms.constant(1, shape, dtype)], [given["self"]]) if alike else None


def _pow(forms: NormalForms, given: Given, shape: tuple[int, ...], dtype: torch.dtype) -> V | None:
    times, of = given["exponent"], given["self"]
    if not dtype.is_floating_point or forms[of].dtype != dtype or times != int(times) or not 0 < abs(times) <= 16:
        return None
    one = forms.constant(1, shape, dtype)
    return forms.product([of] * int(times)) if times > 0 else forms.product([one], [of] * int(-times))


# ---- numbers, dtypes ----------------------------------------------------------------------------------------------


def _filled(name: str | int | float) -> Known:
    def known(forms: NormalForms, given: Given, shape: tuple[int, ...], dtype: torch.dtype) -> V | None:
        number = given[name] if isinstance(name, str) else name
        held = isinstance(number, (bool, int, float)) and not dtype.is_complex and holds(dtype, number)
        return forms.constant(number, shape, dtype) if held else None

    return known


def _cast(forms: NormalForms, given: Given, shape: tuple[int, ...], dtype: torch.dtype) -> V | None:
    of: V = given["self"]
    held = forms[of].dtype
    if held == dtype:
        return of
    inner = forms.all_of(of)
    if isinstance(inner, Each) and inner.op is aten._to_copy.default:  # there and back, where nothing is lost
        first: V = inner.args[0]
        if exact(forms[first].dtype, held):
            return _cast(forms, {"self": first}, shape, dtype)
    return forms.atom(Each(aten._to_copy.default, (of, dtype)), shape, dtype)


def exact(narrow: torch.dtype, wide: torch.dtype) -> bool:
    """Whether a dtype holds all that another one does."""
    if narrow.is_floating_point and wide.is_floating_point:
        a, b = torch.finfo(narrow), torch.finfo(wide)
        return a.eps >= b.eps and a.max <= b.max and a.smallest_normal * a.eps >= b.smallest_normal * b.eps
    if narrow is torch.bool:
        return not wide.is_complex
    return wide is torch.int64 and narrow in (torch.int8, torch.int16, torch.int32, torch.uint8)


def _where(forms: NormalForms, given: Given, shape: tuple[int, ...], dtype: torch.dtype) -> V | None:
    wide = [wider(forms, given[name], shape) for name in ("condition", "self", "other")]
    if None in wide or any(forms[v].dtype != dtype for v in wide[1:]):  # type: ignore[index]
        return None
    if wide[1] == wide[2]:
        return wide[1]
    mask = forms.atoms[_only_source(forms[wide[0]].elements) - 1] if _only_source(forms[wide[0]].elements) else None  # type: ignore[index]
    if isinstance(mask, Alone):
        return wide[1] if mask.number else wide[2]
    return forms.atom(Each(aten.where.self, tuple(wide)), shape, dtype)


def _only_source(elements: Elements) -> int:
    sources = {run.source for run in elements.runs}
    return next(iter(sources)) if len(sources) == 1 else 0


# ---- over dims ----------------------------------------------------------------------------------------------------


def _dims(given: Given, rank: int) -> list[int]:
    dims = given.get("dim")
    dims = [dims] if isinstance(dims, int) else list(dims) if dims else list(range(rank))
    return sorted({d % max(rank, 1) for d in dims}) if rank else []


def _reduce(kind: str) -> Known:
    def known(forms: NormalForms, given: Given, shape: tuple[int, ...], dtype: torch.dtype) -> V | None:
        of: V = given["self"]
        if forms[of].dtype != dtype and dtype is not torch.int64:
            return None
        dims = _dims(given, len(forms[of].shape))
        if kind != "mean":
            return reduced(forms, kind, of, dims, shape, dtype)
        count = math.prod(forms[of].shape[d] for d in dims)
        if not dtype.is_floating_point or not count:
            return None
        made = reduced(forms, "sum", of, dims, shape, dtype)
        return None if made is None else forms.sum(forms.as_sum(made).times(1 / count), shape, dtype)

    return known


def _padded(forms: NormalForms, given: Given, shape: tuple[int, ...], dtype: torch.dtype) -> V | None:
    of: V = given["self"]
    pads = list(given["pad"])
    for place in range(0, len(pads), 2):
        held = list(forms[of].shape)
        dim = len(held) - 1 - place // 2
        sharding = [max(-pads[place], 0), held[dim] - max(-pads[place + 1], 0)]
        parts = [forms.move(aten.slice.Tensor, (of, dim, *sharding), {})]
        if parts[0] is None:
            return None
        for before, size in ((True, pads[place]), (False, pads[place + 1])):
            if size > 0:
                filled = forms.constant(given["value"], [*held[:dim], size, *held[dim + 1 :]], dtype)
                parts = [filled, *parts] if before else [*parts, filled]
        joined = parts[0] if len(parts) == 1 else forms.move(aten.cat.default, (parts, dim), {})
        if joined is None:
            return None
        of = joined
    return of


KNOWN: dict[Any, Known] = {
    aten.constant_pad_nd.default: _padded,
    aten.add.Tensor: _added("self", "other", 1),
    aten.add.Scalar: _added("self", "other", 1),
    aten.sub.Tensor: _added("self", "other", -1),
    aten.sub.Scalar: _added("self", "other", -1),
    aten.rsub.Scalar: _added("other", "self", -1),
    aten.rsub.Tensor: _added("other", "self", -1),
    aten.neg.default: _neg,
    aten.mul.Tensor: _mul,
    aten.mul.Scalar: _mul,
    aten.div.Tensor: _div,
    aten.div.Scalar: _div,
    aten.reciprocal.default: _reciprocal,
    aten.pow.Tensor_Scalar: _pow,
    aten.full.default: _filled("fill_value"),
    aten.full_like.default: _filled("fill_value"),
    aten.new_full.default: _filled("fill_value"),
    aten.scalar_tensor.default: _filled("s"),
    **{op: _filled(0) for op in (aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default)},
    **{op: _filled(1) for op in (aten.ones.default, aten.ones_like.default, aten.new_ones.default)},
    aten._to_copy.default: _cast,
    aten.where.self: _where,
    **{op: _reduce("sum") for op in (aten.sum.default, aten.sum.dim_IntList)},
    **{op: _reduce("mean") for op in (aten.mean.default, aten.mean.dim)},
    aten.amax.default: _reduce("amax"),
    aten.amin.default: _reduce("amin"),
    aten.max.default: _reduce("amax"),
    aten.min.default: _reduce("amin"),
    **dict.fromkeys(DOTS, dot),
}
"""Ops by what makes their values."""
