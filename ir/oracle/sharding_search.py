"""Search for the valid one-axis shardings of an op: each is run on shards and compared.

A candidate says for every operand which dim of it is sharded, if any. It is valid if every result on one device is the
shards' results concatenated, or their sum, maximum or minimum, or equal to each of them::

    aten.mm(x[4, 6], w[6, 5])     0, -  ->  joined along 0
                                  -, 1  ->  joined along 1
                                  1, 0  ->  sum

Arguments that are sizes (a shape, a number of groups) are divided like the sharded dim if the op is then valid.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._decomp import decomposition_table
from torch.utils._pytree import tree_flatten_with_path

from shardfx.ir.dim_sharding import chunk
from shardfx.ir.rules.sharding_rule import Linear
from shardfx.ir.rules.template import keeps_precision

from .draws import draws
from .instance import TRUSTING, UNCHECKED, Instance, Place, Results, is_float, runs
from .recombine import Outcome, agreed, magnitude, outcomes, same, split_sum

aten = torch.ops.aten

Choice = tuple[int | None, ...]
"""The sharded dim of each operand, or None."""
PARTIAL = "+"
Placement = tuple[int | str | None, ...]
"""The placement of each operand: its sharded dim, PARTIAL for a partial sum, or None."""
MOST = 600


@dataclass(frozen=True)
class ValidSharding:
    """A valid sharding: the sharded dim of each operand, and the outcomes of each result.

    ``size`` is the number of blocks to distribute (each sharded dim is a multiple of it); ``sized`` are the paths of
    the size arguments that follow the sharding.
    """

    operands: Choice
    results: tuple[frozenset[Outcome], ...]
    size: int
    sized: tuple[Place, ...] = ()


class Oracle:
    """Finds the valid shardings and the linear operands of one op instance.

    Args:
        trusted: whether the op checks its arguments; by default as known of torch's own. For one that does not, only
        candidates under which shapes agree are tried.
    """

    def __init__(self, of: Instance, seed: int = 0, trusted: bool | None = None) -> None:
        self.packet = getattr(of.node.op, "overloadpacket", None)
        unchecked = self.packet in UNCHECKED or "backward" in str(of.node.op) if trusted is None else not trusted
        checked = len(of.tensors) < 2 or torch.Tag.pointwise in getattr(of.node.op, "tags", ())
        self.screen = None if checked else decomposition_table.get(of.node.op)
        self.least = 1
        self.careful = unchecked and self.screen is None
        if self.careful and any(map(_is_index, of.tensors)):
            low = of.on([t.clamp(max=1) if _is_index(t) else t for t in of.tensors])
            if runs(low):
                self.least, of = 2, low
        self.of = of
        self.generator = torch.Generator().manual_seed(seed)
        self.shapes = [tuple(t.shape) for t in of.tensors]
        self.results = of.kept
        self.variants = list(draws(of, seed))
        if self.least > 1:  # with its indices, which lie within every shard
            self.variants = [
                each.on([own if _is_index(own) else t for t, own in zip(each.tensors, of.tensors, strict=True)])
                for each in self.variants
            ]
        self._numbers: dict[Place, int] = {
            at: arg
            for at, arg in tree_flatten_with_path(of.node.args)[0]
            if isinstance(arg, int) and not isinstance(arg, bool)
        }
        shapes = [*self.shapes, *(r.shape for r in self.results if r is not None), self._numbers.values()]
        self._sizes = {size for shape in shapes for size in shape if size > 1}

    def ignored(self) -> frozenset[int]:
        """The operands whose values do not matter (their shape or dtype may)."""
        found = []
        for i, tensor in enumerate(self.of.tensors):
            swapped = list(self.of.tensors)
            if tensor.is_floating_point():
                swapped[i] = torch.randn(tensor.shape, generator=self.generator).to(tensor.dtype)
            elif tensor.dtype is torch.bool:
                swapped[i] = ~tensor
            elif len(self.of.tensors) == 1:
                swapped[i] = torch.zeros_like(tensor)
            result = None if torch.equal(swapped[i], tensor) else self.of.attempt(swapped)
            if result is not None and all(map(same, self.of.keep(result), self.results)):
                found.append(i)
        return frozenset(found)

    def shardings(self) -> dict[Choice, ValidSharding]:
        """The valid shardings of operands. Operands whose values do not matter are replicated if they can be."""
        if any(r is not None and r.numel() == 0 for r in self.results) or not self.results:
            return {}
        ignored = self.ignored()
        found: dict[Choice, ValidSharding] = {}
        known: set[Choice] = set()
        for choice in sorted(self.candidates(), key=lambda c: sum(c[i] is not None for i in ignored)):
            matters = tuple(None if i in ignored else d for i, d in enumerate(choice))
            if matters in known or (not any(d is not None for d in matters) and len(ignored) < len(self.shapes)):
                continue
            valid = self.try_choice(choice)
            if valid is not None:
                found[choice] = valid
                if any(d is not None for d in matters):
                    known.add(matters)
        return found

    def candidates(self) -> Iterator[Choice]:
        """The candidates to try: all, or (of many operands) those over dims of one size, alike for equal shapes."""
        options: list[list[int | None]] = [[None, *(d for d, s in enumerate(shape) if s > 1)] for shape in self.shapes]
        if self.packet in TRUSTING:
            batch = min(map(len, self.shapes)) - 1
            yield from ((d,) * len(self.shapes) for d in range(batch) if all(s[d] > 1 for s in self.shapes))
            return
        if self.careful:
            yield from self._agreeing()
            return
        if math.prod(map(len, options)) <= MOST:
            yield from (c for c in itertools.product(*options) if any(d is not None for d in c))
            return
        alike = list(dict.fromkeys(self.shapes))
        for size in sorted(self._sizes):
            by_shape = [[None, *(d for d, s in enumerate(shape) if s == size)] for shape in alike]
            for chosen in itertools.islice(itertools.product(*by_shape), 4 * MOST):
                if any(d is not None for d in chosen):
                    yield tuple(chosen[alike.index(shape)] for shape in self.shapes)

    def _agreeing(self) -> Iterator[Choice]:
        """The choices that shard, at one index, all operands of one size there; or all whose dims up to there are
        equal."""
        found: dict[Choice, None] = {}
        for shape in self.shapes:
            for d, size in enumerate(shape):
                if size > 1:
                    found[tuple(d if len(s) > d and s[d] == size else None for s in self.shapes)] = None
                    found[tuple(d if s[: d + 1] == shape[: d + 1] else None for s in self.shapes)] = None
        yield from found

    def try_choice(self, choice: Choice) -> ValidSharding | None:
        """The sharding of a choice, if it is valid for some number of blocks to distribute."""
        common = math.gcd(*(shape[d] for shape, d in zip(self.shapes, choice, strict=True) if d is not None))
        for size in sorted((s for s in self._sizes if common % s == 0 and self.fits(s, 2)), reverse=True):
            trials = [
                (self.of, 2),
                *((self.of, 3) for _ in range(self.fits(size, 3))),
                *((v, 2) for v in self.variants),
            ]
            for sized in self._sized(size):
                if self.screen is None or self.outcomes(self.of, choice, size, 2, sized, self.screen) is not None:
                    found = agreed(self.outcomes(of, choice, size, count, sized) for of, count in trials)
                    if found is not None:
                        return ValidSharding(choice, found, size, sized)
        return None

    def fits(self, size: int, count: int) -> bool:
        """Whether each of ``count`` shards of ``size`` has the minimum length."""
        return chunk(size, count, count - 1)[1] >= self.least

    def outcomes(
        self,
        of: Instance,
        choice: Placement,
        size: int,
        count: int,
        sized: tuple[Place, ...] = (),
        op: Callable[..., Any] | None = None,
    ) -> tuple[frozenset[Outcome], ...] | None:
        """The ways in which the results (of ``op`` instead) recombine from those of ``count`` shards; None if some
        result does not."""
        parts = self.shard_results(of, choice, size, count, sized, op)
        if parts is None or any(len(p) != len(of.kept) or any(r is None for r in p) for p in parts):
            return None
        lengths = [chunk(size, count, k)[1] for k in range(count)]
        found = []
        for full, results in zip(of.kept, zip(*parts, strict=True), strict=True):
            assert full is not None
            outcome = outcomes(results, full, lengths, size)
            if len(of.kept) > 1 and PARTIAL not in choice:
                outcome -= {"mean"}  # a mean beside what it was divided by is one only where nothing is left out of it
            found.append(outcome)
        return tuple(found) if all(found) else None

    def shard_results(
        self,
        of: Instance,
        choice: Placement,
        size: int,
        count: int,
        sized: tuple[Place, ...] = (),
        op: Callable[..., Any] | None = None,
    ) -> list[Results] | None:
        """The results of each of ``count`` shards; None if the op (or ``op``) rejects one of them."""
        shards: list[Sequence[torch.Tensor]] = []
        for t, d in zip(of.tensors, choice, strict=True):
            if isinstance(d, int):
                block = t.shape[d] // size
                boxes = (chunk(size, count, k) for k in range(count))
                shards.append([t.narrow(d, start * block, length * block).clone() for start, length in boxes])
            else:
                shards.append([t] * count if d is None else split_sum(t, count, self.generator))
        found = []
        for k, tensors in enumerate(zip(*shards, strict=True)):
            change = {place: self._numbers[place] * chunk(size, count, k)[1] // size for place in sized}
            results = of.attempt(tensors, change, op)
            if results is None:
                return None
            found.append(of.keep(results))
        return found

    def _sized(self, size: int) -> Iterator[tuple[Place, ...]]:
        """Sets of size arguments that may follow a sharding: none, a shape's entry, 1 or 2 multiples of ``size``."""
        yield ()
        arguments = self.of.node.op._schema.arguments
        found = [
            at
            for at, number in self._numbers.items()
            if number > 1
            and number % size == 0
            and "dim" not in arguments[at[0].idx].name
            and "int" in str(arguments[at[0].idx].type).lower()
        ]
        yield from ((at,) for at in sorted(found, key=len, reverse=True))
        yield from itertools.islice(itertools.combinations((at for at in found if len(at) == 1), 2), 6)

    def linear(self) -> list[Linear]:
        """The minimal sets of operands that may be partial sums together: those whose results on terms add up to the
        full results."""
        of, tensors, results = self.of, self.of.tensors, self.of.kept
        numbers = [r for r, value in enumerate(of.node.results) if value is not None]
        floats = [i for i, t in enumerate(tensors) if is_float(t)]
        if not results or not any(tensors[i].numel() > 1 for i in floats):
            return []  # over a single number many an op is linear
        values = [each for each in (of, *self.variants) if all(map(_shows, each.kept))]
        found: list[Linear] = []
        counts = sorted({1, 2, 3, len(floats)} & set(range(1, len(floats) + 1)))
        for count in counts if values else ():
            for group in map(frozenset, itertools.islice(itertools.combinations(floats, count), 60)):
                if any(known.operands <= group for known in found):
                    continue
                shown = agreed(_shown(each, group, self.generator) for each in values)
                if shown is None or not _keeps_laws(of, group, shown):
                    continue
                added = [i for i, each in enumerate(shown) if KEPT not in each]
                dtypes = [made.dtype for i in added if (made := results[i]) is not None]
                if all(keeps_precision(tensors[j].dtype, dtype) for dtype in dtypes for j in group):
                    found.append(Linear(group, frozenset(numbers[i] for i in added)))
        return found


def _is_index(tensor: torch.Tensor) -> bool:
    return tensor.dtype in (torch.int32, torch.int64)


# ---- partial sums ----------------------------------------------------------------------------------------------------

ADDED, KEPT = "added", "kept"
LARGE = 5e3
"""A number whose exponential, and two to the power of it, are infinite."""
Tensors = dict[int, torch.Tensor]
Shown = tuple[frozenset[str], ...]
"""For each result whether it is ADDED (the sum of the terms' results), or KEPT (the same for each term)."""


def _shown(of: Instance, group: frozenset[int], generator: torch.Generator) -> Shown | None:
    terms = {i: split_sum(of.tensors[i], 2, generator) for i in group}
    first, second = (_run(of, {i: each[k] for i, each in terms.items()}) for k in range(2))
    if first is None or second is None:
        return None
    scale = magnitude(r for r in (*first, *second) if r is not None)
    found = []
    for full, a, b in zip(of.kept, first, second, strict=True):
        kept = same(a, full) and same(b, full)
        added = is_float(full) and same(_sum(a, b), full, scale)
        found.append(frozenset([KEPT] * kept + [ADDED] * added))
    return tuple(found)


def _keeps_laws(of: Instance, group: frozenset[int], shown: Shown) -> bool:
    """Check the laws of linearity on special values: zeros give zeros; zeros beside a one, twice the result of halves
    (exactly); a term that is not finite, a sum that is not finite; and coefficients of terms are finite where other
    operands are zero, one or large.
    """
    ones = {i: torch.ones_like(of.tensors[i]) for i in group}
    zero = {i: torch.zeros_like(of.tensors[i]) for i in group}
    for result, full, each in zip(_run(of, zero) or (), of.kept, shown, strict=False):
        if not (same(result, full) if KEPT in each else result is not None and not bool((result != 0).any())):
            return False
    for alone in group if len(group) > 1 else ():
        half = zero | {alone: ones[alone] / 2}
        if not _holds(of, group, half, half, shown, exact=True):
            return False
    terms = [({i: _with(of.tensors[i], number) for i in group}, ones) for number in (torch.inf, -torch.inf, torch.nan)]
    others = [i for i, t in enumerate(of.tensors) if i not in group and is_float(t)]
    for number in (0.0, -1.0, 1.0, LARGE):
        at = {i: _with(of.tensors[i], number) for i in others}
        terms.append(({i: 3 * each for i, each in ones.items()} | at, {i: -each for i, each in ones.items()} | at))
    return all(_holds(of, group, a, b, shown) for a, b in terms)


def _holds(of: Instance, group: frozenset[int], a: Tensors, b: Tensors, shown: Shown, exact: bool = False) -> bool:
    """Whether the results of two terms combine as shown; ``exact``: with no absolute tolerance."""
    runs = (_run(of, a), _run(of, b), _run(of, {i: a[i] + b[i] if i in group else each for i, each in a.items()}))
    for x, y, full, each in zip(*(results or () for results in runs), shown, strict=False):
        scale = 0.0 if exact else magnitude(t for t in (x, y) if t is not None)
        if not (same(x, full) and same(y, full) if KEPT in each else same(_sum(x, y), full, scale)):
            return False
    return True


def _sum(a: torch.Tensor | None, b: torch.Tensor | None) -> torch.Tensor | None:
    return a + b if a is not None and b is not None and a.shape == b.shape else None


def _with(tensor: torch.Tensor, number: float) -> torch.Tensor:
    """A tensor with its first element replaced by a number."""
    changed = tensor.clone().flatten()
    changed[:1] = number
    return changed.reshape(tensor.shape)


def _run(of: Instance, changed: Tensors) -> Results | None:
    """The results with some operands replaced; None if the op rejects them."""
    result = of.attempt([changed.get(i, t) for i, t in enumerate(of.tensors)])
    return None if result is None else of.keep(result)


def _shows(tensor: torch.Tensor | None) -> bool:
    """Whether a result can reveal linearity: an empty one, or one that is not finite, would pass any check."""
    if tensor is None or tensor.numel() == 0:
        return False
    return not is_float(tensor) or bool(torch.isfinite(tensor).all())
