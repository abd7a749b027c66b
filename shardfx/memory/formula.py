"""The memory of a peak as a formula in batch, sequence and the mesh's axes.

What a storage's bytes depend on is found out by planning again: with three times the batch, with half the sequence
(or another length, where another plan is cheaper for that), and with both. Each storage of the peak is then a number
times powers of batch and sequence, or a sum ``a + b*batch + c*sequence + d*batch*sequence`` (a bucket); the axes that
sharded the value stand below.

    >>> pm.memory().formula
    8192*batch*sequence/dp + 3145728/tp + ...
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import product
from math import prod
from typing import Any, NamedTuple

import sympy
import torch
import torch.utils._pytree as pytree

from shardfx.hints import Hints
from shardfx.ir.errors import Error
from shardfx.ir.graph import Value
from shardfx.ir.mesh import Mesh
from shardfx.ir.spec import Spec

TIMES = Fraction(3)
"""The factor by which the batch is scaled."""
PARTS = Fraction(1, 2), Fraction(2), Fraction(5, 4), Fraction(3, 4)
"""The factors by which the sequence is scaled, in order of trial; for a longer one a model may have no positions."""
POWERS = range(4)
ONE = Fraction(1)


class PeakStorage(NamedTuple):
    """A storage live at the peak: its bytes, and the placement of its value, if it has one."""

    nbytes: int
    spec: Spec | None = None


@dataclass(frozen=True)
class Sizes:
    """Batch and sequence of the first example: its leading dim, and the next one where it is a sequence (token ids
    ``[batch, sequence]`` or features ``[batch, sequence, channels]``); 0 for what there is not."""

    batch: int = 0
    sequence: int = 0
    part: Fraction = Fraction(1, 2)
    """The factor by which the sequence is scaled."""

    @staticmethod
    def of(hints: Hints) -> Sizes:
        """The sizes of the first argument that is a tensor with dims."""
        for leaf in pytree.tree_leaves((hints.args, dict(hints.kwargs))):
            if isinstance(leaf, torch.Tensor) and leaf.ndim:
                tokens = leaf.ndim == (3 if leaf.is_floating_point() else 2)
                return Sizes(leaf.shape[0], leaf.shape[1] if tokens else 0)
        return Sizes()

    @property
    def named(self) -> dict[str, int]:
        """The nonzero sizes, by name."""
        return {name: size for name, size in (("batch", self.batch), ("sequence", self.sequence)) if size}

    @property
    def tries(self) -> Iterator[Sizes]:
        """These with each length that may be planned for: with another one another plan may be cheaper."""
        parts = PARTS if self.sequence else PARTS[:1]  # which nothing depends on where there is none
        yield from (replace(self, part=part) for part in parts if self.sequence % part.denominator == 0)

    @property
    def ratios(self) -> list[dict[str, Fraction]]:
        """The scaling of batch and sequence in each further plan; the last one changes both."""
        by = {name: ratio for name, ratio in (("batch", TIMES), ("sequence", self.part)) if name in self.named}
        both = [dict(zip(by, each, strict=True)) for each in product(*((ONE, ratio) for ratio in by.values()))]
        return both[1:]

    def changed(self, hints: Hints, by: dict[str, Fraction]) -> Hints:
        """The same hints, for examples of other sizes, without content."""

        def other(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            shape = tuple(self._size(leaf, dim, by) for dim in range(leaf.ndim))
            return torch.empty(shape, dtype=leaf.dtype, device="meta")

        nests = (hints.args, dict(hints.kwargs), hints.targets)
        args, kwargs, targets = (pytree.tree_map(other, nest) for nest in nests)
        return replace(hints, args=args, kwargs=kwargs, targets=targets, memory=None)

    def _size(self, leaf: torch.Tensor, dim: int, by: dict[str, Fraction]) -> int:
        size, scale = leaf.shape[dim], ONE
        if dim == 0 and self.batch and size == self.batch:
            scale = by["batch"]
        elif dim == 0 and self.sequence and size == self.batch * self.sequence:
            scale = prod(by.values(), start=ONE)
        elif dim and self.sequence and size == self.sequence:
            scale = by["sequence"]
        return int(size * scale)


def formula(
    here: Sequence[PeakStorage], changed: Sequence[Sequence[PeakStorage]], sizes: Sizes, mesh: Mesh
) -> sympy.Expr:
    """The sum of the terms, in batch and sequence, over the axes that shard each.

    Args:
        here: the storages of a peak.
        changed: the same storages, for each of :attr:`Sizes.ratios`.

    Raises:
        Error: a storage's bytes are neither a product of powers nor such a sum.
    """
    total: sympy.Expr = sympy.Integer(0)
    for mine, *others in zip(here, *changed, strict=True):
        made = _power(mine, others, sizes) if mine.nbytes else sympy.Integer(0)
        made = _sum(mine, others, sizes) if made is None else made
        for axis in mine.spec.axes if mine.spec is not None else ():
            made *= sympy.Integer(mesh[axis].size) / sympy.Symbol(axis)
        total += made
    return total


def _power(term: PeakStorage, others: Sequence[PeakStorage], sizes: Sizes) -> sympy.Expr | None:
    """A number times powers of batch and sequence, if the bytes are that."""
    for powers in product(POWERS, repeat=len(sizes.named)):
        if all(
            other.nbytes == term.nbytes * prod((r**p for r, p in zip(by.values(), powers, strict=True)), start=ONE)
            for by, other in zip(sizes.ratios, others, strict=True)
        ):
            made: sympy.Expr = sympy.Integer(term.nbytes)
            for (name, size), power in zip(sizes.named.items(), powers, strict=True):
                made *= (sympy.Symbol(name) / size) ** power
            return made
    return None


def _sum(term: PeakStorage, others: Sequence[PeakStorage], sizes: Sizes) -> sympy.Expr:
    """A sum of a number, batch, sequence and their product, each with a factor."""
    plain = [1, *(sympy.Symbol(name) for name in sizes.named), sympy.prod(map(sympy.Symbol, sizes.named))]
    basis = [sympy.sympify(each) for each in dict.fromkeys(plain)]
    points = [dict.fromkeys(sizes.named, ONE), *sizes.ratios]
    rows = [
        [each.subs({name: sympy.Rational(point[name] * size) for name, size in sizes.named.items()}) for each in basis]
        for point in points
    ]
    found = sympy.Matrix(rows).LUsolve(sympy.Matrix([term.nbytes, *(other.nbytes for other in others)]))
    if any(factor < 0 for factor in found):
        raise no_formula(f"{term.nbytes} bytes, which become {', '.join(str(other.nbytes) for other in others)}")
    return sum((factor * each for factor, each in zip(found, basis, strict=True)), sympy.Integer(0))


def no_formula(got: str) -> Error:
    """The error that there is no formula, and why."""
    return Error(
        "the memory of this plan has no formula in batch and sequence",
        where="pm.memory().formula",
        expected="bytes that are products of sizes, and the same program for another batch and sequence",
        got=got,
    )


def spec_of(values: Iterable[Value], nbytes: int, mesh: Mesh) -> Spec | None:
    """The placement of the one of the values that has so many bytes on a rank, where all ranks hold as much."""
    for value in values:
        if value.spec is not None and value.local_bytes(mesh) == nbytes:
            return value.spec if value.type.nbytes == nbytes * mesh.extent(value.spec.axes) else None
    return None
