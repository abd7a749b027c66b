"""Reductions, in one step or in several, and products of matrices, whichever way they lie."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from shardfx.runtime.verify.proof.strided_runs import BITS, by_dim

from .arithmetic import Product, Sum, rounded, total
from .forms import NormalForms
from .values import Each, V

aten = torch.ops.aten
DOTS = (aten.mm.default, aten.bmm.default, aten.mv.default, aten.dot.default)


def reduced(
    forms: NormalForms, kind: str, of: V, dims: Sequence[int], shape: Sequence[int], dtype: torch.dtype
) -> V | None:
    """The sum, or largest or least, over some dims of a value, in a shape."""
    held = forms[of].shape
    if not math.prod(held):
        return None
    if kind == "sum" and isinstance(what := forms.all_of(of), Sum) and forms[of].dtype == dtype and _divides(dtype):
        count = math.prod(held[d] for d in dims)
        parts = [(reduced(forms, kind, V(value), dims, shape, dtype), by) for value, by in what.parts]
        if all(part is not None for part, _ in parts):
            found = [forms.as_sum(part).times(by) for part, by in parts if part is not None]
            return forms.sum(total([Sum(what.constant * count, ()), *found]), shape, dtype)
    order, kept = _order(forms, of, dims)
    sizes = [math.prod(held[d] for d in part) for part in (order[:kept], order[kept:])]
    moved = _view(forms, of, order, sizes)
    if moved is None:
        return None
    made = _rows(forms, kind, moved, dtype)
    back = [held[d] for d in order[:kept]]
    there = sorted(range(kept), key=lambda place: order[place])
    made = forms.move(aten.reshape.default, (made, back), {})
    made = made and forms.move(aten.permute.default, (made, there), {})
    return _as(forms, made, shape)


def _divides(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point


def _order(forms: NormalForms, of: V, dims: Sequence[int]) -> tuple[list[int], int]:
    """The dims that are kept, then those that are not; each in the order in which they lie, however they are written.
    And how many are kept."""
    strides = _strides(forms, of)
    rank = range(len(forms[of].shape))

    def key(dim: int) -> Any:
        return [[-stride for stride in each[dim]] for each in strides], dim

    kept = sorted((d for d in rank if d not in dims), key=key)
    return [*kept, *sorted(dims, key=key)], len(kept)


def _strides(forms: NormalForms, of: V) -> list[list[list[int]]]:
    """For each tensor that a value is made of, element by element, how far apart the rows of each dim lie."""
    found, front, seen = [], [of], set()
    while front:
        each = front.pop()
        if each in seen:
            continue
        seen.add(each)
        what = forms.all_of(each)
        if isinstance(what, (Sum, Product, Each)):
            front += forms.operands(what)
            continue
        elements = forms[each].elements
        loops = by_dim(elements.runs[0], elements.shape) if len(elements.runs) == 1 else None
        if loops is not None:
            source = elements.runs[0].source
            found.append((source, [[stride for _, stride in loop] for loop in loops]))
    return [loops for _, loops in sorted(found, key=lambda each: each[0])]


def _view(forms: NormalForms, of: V, order: Sequence[int], shape: Sequence[int]) -> V | None:
    made = forms.move(aten.permute.default, (of, list(order)), {})
    made = made and forms.move(aten.reshape.default, (made, list(shape)), {})
    return made if isinstance(made, V) else None


def _rows(forms: NormalForms, kind: str, of: V, dtype: torch.dtype) -> V:
    """What each row of a matrix comes to."""
    rows, columns = forms[of].shape
    if columns == 1 and forms[of].dtype == dtype:
        made = forms.move(aten.reshape.default, (of, [rows]), {})
        if isinstance(made, V):
            return made
    number = forms.number(of)
    if number is not None and dtype.is_floating_point:
        return forms.constant(number * columns if kind == "sum" else number, (rows,), dtype)
    inner = _inner(forms, kind, of) if forms[of].dtype == dtype else None
    if inner is not None:
        return _rows(forms, kind, inner, dtype) if forms[inner].shape[0] == rows else inner
    return forms.atom(("reduce", kind, of), (rows,), dtype)


def _inner(forms: NormalForms, kind: str, of: V) -> V | None:
    """The matrix whose rows come to the same, where ``of`` is made of such sums itself."""
    elements = forms[of].elements
    rows, _ = elements.shape
    if len(elements.runs) != 1 or not elements.runs[0].source:
        return None
    run = elements.runs[0]
    what = forms.atoms[run.source - 1]
    if not isinstance(what, tuple) or what[:2] != ("reduce", kind) or run.base & ((1 << BITS) - 1):
        return None
    matrix: V = what[2]
    if forms[matrix].shape[0] != elements.numel() or forms[matrix].dtype != forms[of].dtype:
        return None
    loops = run.loops
    outer = sorted(range(len(loops)), key=lambda i: -loops[i][1])
    step = elements.numel()
    for place in outer:
        count, stride = loops[place]
        if step != count * stride:
            return None
        step = stride
    columns = forms[matrix].shape[1]
    split = [*(loops[i][0] for i in outer), columns]
    made = forms.move(aten.reshape.default, (matrix, split), {})
    back = [*(outer.index(place) for place in range(len(loops))), len(loops)]
    made = made and forms.move(aten.permute.default, (made, back), {})
    made = made and forms.move(aten.reshape.default, (made, [rows, elements.numel() // rows, columns]), {})
    if not isinstance(made, V):
        return None
    order, kept = _order(forms, made, (1, 2))
    return None if kept != 1 else _view(forms, made, order, [rows, elements.numel() // rows * columns])


def dot(forms: NormalForms, given: Mapping[str, Any], shape: tuple[int, ...], dtype: torch.dtype) -> V | None:
    """A product of matrices, of batches of them, or of vectors."""
    a, b = given["self"], next(given[name] for name in ("mat2", "vec", "tensor", "other") if name in given)
    if not forms[a].dtype == forms[b].dtype == dtype or not dtype.is_floating_point:
        return None
    left, right = forms[a].shape, forms[b].shape
    wide = [1] * (3 - len(left)) + list(left)
    high = list(right) if len(right) == 3 else [1, *right, *([1] if len(right) == 1 else [])]
    if not math.prod(wide) * math.prod(high):
        return None
    return _batched(forms, _as(forms, a, wide), _as(forms, b, high), shape, dtype)


def _as(forms: NormalForms, of: V | None, shape: Sequence[int]) -> V | None:
    made: V | None = of and forms.move(aten.reshape.default, (of, list(shape)), {})
    return made


def _turned(forms: NormalForms, of: V | None) -> V | None:
    made: V | None = of and forms.move(aten.permute.default, (of, [0, 2, 1]), {})
    return made


def _batched(forms: NormalForms, a: V | None, b: V | None, shape: Sequence[int], dtype: torch.dtype) -> V | None:
    factor: int | float = 1
    turned = _turned(forms, b), _turned(forms, a)
    if a is None or b is None or turned[0] is None or turned[1] is None:
        return None
    (by, one), (times, other) = forms.scaled(a), forms.scaled(b)
    if rounded(by * times) != 1 and one is not None and other is not None:
        factor = by * times
        made = _batched(forms, one, other, shape, dtype)
        return None if made is None else forms.sum(forms.as_sum(made).times(factor), shape, dtype)
    batch, rows, columns = forms[a].shape[0], forms[a].shape[1], forms[b].shape[2]
    if (turned[0].number, turned[1].number) < (a.number, b.number):
        made = forms.atom(("dot", *turned), (batch, columns, rows), dtype)
        return _as(forms, _turned(forms, made), shape)
    return _as(forms, forms.atom(("dot", a, b), (batch, rows, columns), dtype), shape)
