"""Which operands of an op may be partial sums? The op is run on terms of them, and the results are added."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch

from shardfx.ir.rules.sharding_rule import Linear

from .instance import Instance, Results
from .recombine import magnitude, same, split_sum

ADDED, KEPT = "added", "kept"
LARGE = 5e3
"""Of which the exponential, and two to the power of it, are infinite."""
Tensors = dict[int, torch.Tensor]
Shown = tuple[frozenset[str], ...]
"""For each result whether it is the sum of the terms' results, or the same for each term."""


def linear_groups(
    of: Instance, variants: Sequence[Instance], generator: torch.Generator, singular: bool = True
) -> list[Linear]:
    """The smallest sets of operands that may be partial sums together, on all values of ``variants`` too.

    Args:
        singular: where other operands are zero as well, for there a quotient is not finite.
    """
    tensors, results = of.tensors, of.kept
    numbers = [r for r, value in enumerate(of.node.results) if value is not None]
    floats = [i for i, t in enumerate(tensors) if t.is_floating_point() or t.is_complex()]
    if not results or not any(tensors[i].numel() > 1 for i in floats):
        return []  # over a single number many an op is linear
    values = [each for each in (of, *variants) if all(map(_shows, each.kept))]
    found: list[Linear] = []
    counts = sorted({1, 2, 3, len(floats)} & set(range(1, len(floats) + 1)))
    for count in counts if values else ():
        for group in map(frozenset, itertools.islice(itertools.combinations(floats, count), 60)):
            if any(known.operands <= group for known in found):
                continue
            shown = _on_all(values, group, generator)
            if shown is None or not _keeps_laws(of, group, shown, singular):
                continue
            added = [i for i, each in enumerate(shown) if KEPT not in each]
            if all(_digits(results[i]) >= _digits(tensors[j]) for i in added for j in group):
                found.append(Linear(group, frozenset(numbers[i] for i in added)))
    return found


def _on_all(values: Sequence[Instance], group: frozenset[int], generator: torch.Generator) -> Shown | None:
    """What each result is of the terms' results, on all values; None if it is nothing of the kind on some."""
    shown: Shown | None = None
    for each in values:
        found = _shown(each, group, generator)
        if found is not None and shown is not None:
            found = tuple(a & b for a, b in zip(found, shown, strict=True))
        if found is None or not all(found):
            return None
        shown = found
    return shown


def _shown(of: Instance, group: frozenset[int], generator: torch.Generator) -> Shown | None:
    terms = {i: split_sum(of.tensors[i], 2, generator) for i in group}
    first, second = (_run(of, {i: each[k] for i, each in terms.items()}) for k in range(2))
    if first is None or second is None:
        return None
    scale = magnitude(r for r in (*first, *second) if r is not None)
    found = []
    for whole, a, b in zip(of.kept, first, second, strict=True):
        kept = same(a, whole) and same(b, whole)
        added = _is_float(whole) and same(_sum(a, b), whole, scale)
        found.append(frozenset([KEPT] * kept + [ADDED] * added))
    return tuple(found)


def _keeps_laws(of: Instance, group: frozenset[int], shown: Shown, singular: bool) -> bool:
    """What ordinary numbers do not tell, as far as the op takes others: of zeros a linear op makes zeros, and of zero
    beside one, however little it is, twice that of halves; what is not finite in a term is not finite in the sum; and
    what terms are multiplied by is finite where others are zero, one or large.
    """
    ones = {i: torch.ones_like(of.tensors[i]) for i in group}
    zero = {i: torch.zeros_like(of.tensors[i]) for i in group}
    for given, whole, each in zip(_run(of, zero) or (), of.kept, shown, strict=False):
        if not (same(given, whole) if KEPT in each else given is not None and not bool((given != 0).any())):
            return False
    for alone in group if len(group) > 1 else ():
        if not _scales(of, zero | {alone: ones[alone]}, shown):
            return False
    terms = [({i: _with(of.tensors[i], number) for i in group}, ones) for number in (torch.inf, -torch.inf, torch.nan)]
    others = [i for i, t in enumerate(of.tensors) if i not in group and _is_float(t)]
    for number in (0.0, -1.0, 1.0, LARGE) if singular else ():
        at = {i: _with(of.tensors[i], number) for i in others}
        terms.append(({i: 3 * each for i, each in ones.items()} | at, {i: -each for i, each in ones.items()} | at))
    return all(_holds(of, group, a, b, shown) for a, b in terms)


def _scales(of: Instance, given: Tensors, shown: Shown) -> bool:
    """Whether of halves the op gives halves, to the last digit but a few; or what it gives of others."""
    halves = _run(of, {i: each / 2 for i, each in given.items()})
    for half, whole, all_, each in zip(halves or (), _run(of, given) or (), of.kept, shown, strict=False):
        if KEPT in each:
            if not same(half, all_):
                return False
        elif half is not None and whole is not None and whole.numel():
            off = (whole - 2 * half).abs().nan_to_num(0.0, 0.0, 0.0).max()
            if float(off) > 1e-6 * float(whole.abs().nan_to_num(0.0, 0.0, 0.0).max()):
                return False
    return True


def _holds(of: Instance, group: frozenset[int], a: Tensors, b: Tensors, shown: Shown) -> bool:
    """Whether the results of two terms are as they were shown to be."""
    given = (_run(of, a), _run(of, b), _run(of, {i: a[i] + b[i] if i in group else each for i, each in a.items()}))
    for x, y, whole, each in zip(*(results or () for results in given), shown, strict=False):
        scale = magnitude(t for t in (x, y) if t is not None)
        if not (same(x, whole) and same(y, whole) if KEPT in each else same(_sum(x, y), whole, scale)):
            return False
    return True


def _sum(a: torch.Tensor | None, b: torch.Tensor | None) -> torch.Tensor | None:
    return a + b if a is not None and b is not None and a.shape == b.shape else None


def _with(tensor: torch.Tensor, number: float) -> torch.Tensor:
    """A tensor whose first element is this number."""
    changed = tensor.clone().flatten()
    changed[:1] = number
    return changed.reshape(tensor.shape)


def _run(of: Instance, changed: Tensors) -> Results | None:
    """The results with some operands replaced; None if the op does not take them."""
    try:
        return of.keep(of.call([changed.get(i, t) for i, t in enumerate(of.tensors)]))
    except Exception:  # whatever an op says of its arguments
        return None


def _is_float(tensor: torch.Tensor | None) -> bool:
    return tensor is not None and (tensor.is_floating_point() or tensor.is_complex())


def _shows(tensor: torch.Tensor | None) -> bool:
    """Whether a result can show what becomes of terms: NaN, or nothing at all, would show anything."""
    if tensor is None or tensor.numel() == 0:
        return False
    return not _is_float(tensor) or bool(torch.isfinite(tensor).all())


def _digits(tensor: torch.Tensor | None) -> float:
    if tensor is None or not _is_float(tensor):
        return math.inf
    return -math.log2(torch.finfo(tensor.dtype).eps)
