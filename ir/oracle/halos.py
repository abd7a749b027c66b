"""Which part of a dim does a piece of a result need? Found by changing one index at a time and looking what follows.

A convolution needs of its input a little more than the rows of its piece: a *halo*. Row ``i`` of the result depends on
the rows ``i * stride - before`` to ``i * stride + after`` of the operand, as far as there are such::

    >>> halos(instance(aten.convolution.default, (x, w, None, [1], [1], [1], False, [0], 1)))
    [Halo(operand=0, dim=2, result=0, result_dim=2, stride=1, before=1, after=1)]

What needs its own row only is no halo but a cut (:mod:`.cut_search`), and what needs all rows is neither.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

import torch

from .instance import Instance

TRIES = 3
"""How often an index is changed: by small numbers, by large ones, by large ones below zero (which a maximum sees)."""
STRIDES = (*(Fraction(n) for n in range(1, 9)), *(Fraction(1, n) for n in range(2, 9)))


@dataclass(frozen=True)
class Halo:
    """Row ``i`` of a result's dim needs the rows ``i * stride - before .. i * stride + after`` of an operand's dim."""

    operand: int
    dim: int
    result: int
    result_dim: int
    stride: int | Fraction
    before: int
    after: int


def halos(of: Instance, seed: int = 0) -> list[Halo]:
    """The halos of an op instance, over all dims of its floating-point operands and results."""
    draw = torch.Generator().manual_seed(seed)
    found = []
    for operand, tensor in enumerate(of.tensors):
        if not tensor.is_floating_point():
            continue
        for dim, size in enumerate(tensor.shape):
            if size > 2:
                for result, result_dim, needs in dependence(of, operand, dim, draw):
                    fitted = fit(needs, size)
                    if fitted is not None:
                        stride, before, after = fitted
                        plain = int(stride) if stride.denominator == 1 else stride
                        found.append(Halo(operand, dim, result, result_dim, plain, before, after))
    return found


def dependence(
    of: Instance, operand: int, dim: int, draw: torch.Generator
) -> Iterator[tuple[int, int, list[list[int]]]]:
    """For every dim of every result: which indices of the operand's dim each of its indices depends on."""
    changed: list[list[torch.Tensor | None]] = []
    for index in range(of.tensors[operand].shape[dim]):
        seen: list[torch.Tensor | None] = [None] * len(of.results)
        for attempt in range(TRIES):
            given = of.call(
                [*of.tensors[:operand], _changed(of, operand, dim, index, attempt, draw), *of.tensors[operand + 1 :]]
            )
            for r, (now, whole) in enumerate(zip(given, of.results, strict=True)):
                if now is None or whole is None or now.shape != whole.shape:
                    continue
                differs = ~torch.isclose(now, whole, rtol=1e-9, atol=1e-9, equal_nan=True)
                known = seen[r]
                seen[r] = differs if known is None else known | differs
        changed.append(seen)
    for r, whole in enumerate(of.results):
        columns = [seen[r] for seen in changed]
        if whole is None or any(c is None for c in columns):
            continue
        for d, length in enumerate(whole.shape):
            rows = [c.movedim(d, 0).reshape(length, -1).any(1) for c in columns if c is not None]
            if length > 2:
                yield r, d, [[j for j, row in enumerate(rows) if bool(row[i])] for i in range(length)]


def _changed(of: Instance, operand: int, dim: int, index: int, attempt: int, draw: torch.Generator) -> torch.Tensor:
    tensor = of.tensors[operand].clone()
    row = tensor.select(dim, index)
    noise = torch.rand(row.shape, generator=draw, dtype=row.dtype) + 0.5
    row.add_(noise if attempt == 0 else noise * 100 if attempt == 1 else noise * -100)
    return tensor


def fit(needs: list[list[int]], size: int) -> tuple[Fraction, int, int] | None:
    """The stride and the smallest halo that cover what each row needs; None if it is no halo."""
    rows = [(i, row[0], row[-1]) for i, row in enumerate(needs) if row]
    if len(rows) < 3 or rows[0][1] == rows[-1][1] or rows[0][2] == rows[-1][2]:
        return None
    best: tuple[Fraction, int, int] | None = None
    for stride in STRIDES:
        before = max(int(i * stride) - low for i, low, _ in rows)
        after = max(high - int(i * stride) for i, _, high in rows)
        if best is None or before + after < best[1] + best[2]:
            best = (stride, before, after)
    assert best is not None
    stride, before, after = best
    wide = before + after + 1
    if wide <= max(stride, Fraction(1)) and before <= 0:  # windows side by side: a cut
        return None
    return best if wide < size else None
