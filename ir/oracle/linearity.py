"""Which operands of an op may be partial sums? The op is run on terms of them, and the results are added."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch

from .instance import Instance
from .recombine import magnitude, same, split_sum


def linear_groups(of: Instance, variants: Sequence[Instance], generator: torch.Generator) -> list[frozenset[int]]:
    """The smallest sets of operands that may be partial sums together, on all values of ``variants`` too."""
    tensors, results = of.tensors, of.kept
    floats = [i for i, t in enumerate(tensors) if t.is_floating_point() or t.is_complex()]
    if not results or not any(tensors[i].numel() > 1 for i in floats):
        return []  # over a single number many an op is linear
    shown = [each for each in (of, *variants) if all(map(_shows, each.kept))]
    found: list[frozenset[int]] = []
    counts = sorted({1, 2, 3, len(floats)} & set(range(1, len(floats) + 1)))
    for count in counts if shown else ():
        for group in map(frozenset, itertools.islice(itertools.combinations(floats, count), 60)):
            precise = all(r is not None and _digits(r) >= _digits(tensors[i]) for r in results for i in group)
            if (
                precise
                and not any(known <= group for known in found)
                and all(_is_linear(each, group, generator) for each in shown)
            ):
                found.append(group)
    return found


def _is_linear(of: Instance, group: frozenset[int], generator: torch.Generator) -> bool:
    terms = {i: split_sum(of.tensors[i], 2, generator) for i in group}
    total: list[torch.Tensor] = []
    scale = 1.0
    for k in range(2):
        try:
            given = of.keep(of.call([terms[i][k] if i in group else t for i, t in enumerate(of.tensors)]))
        except Exception:  # values that the op does not take
            return False
        tensors = [g for g in given if g is not None]
        scale = max(scale, magnitude(tensors))
        total = [a + b for a, b in zip(total, tensors, strict=True)] if total else tensors
    return all(same(a, b, scale) for a, b in zip(total, of.kept, strict=True))


def _shows(tensor: torch.Tensor | None) -> bool:
    """Whether a result can show that an op is linear: a NaN, a zero, or nothing at all would show anything."""
    if tensor is None or not (tensor.is_floating_point() or tensor.is_complex()):
        return False
    return bool(torch.isfinite(tensor).all()) and bool((tensor != 0).any())


def _digits(tensor: torch.Tensor) -> float:
    return -math.log2(torch.finfo(tensor.dtype).eps)
