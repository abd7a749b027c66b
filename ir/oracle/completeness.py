"""Does a rule allow all that is valid? What the search finds is looked for among the rule's strategies.

On one axis some operands may also be sharded while others are partial sums; each such placement is tried::

    aten.addmm(b[5], x[4, 6], w[6, 5])     +, 1, 0  ->  sum      each rank adds its term of b to its own product
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from shardfx.ir.dim_sharding import chunk
from shardfx.ir.graph import Strategy
from shardfx.ir.rules.sharding_rule import Linear, ShardingRule

from .instance import Instance
from .recombine import Outcome, split_sum
from .sharding_search import Choice, Oracle

MOST = 1500
"""Of more placements the first ones are tried."""


@dataclass(frozen=True)
class Joint:
    """For every operand the dim that is sharded, or None; and those that are partial sums over the same axis."""

    dims: Choice
    partial: frozenset[int]

    def __str__(self) -> str:
        """``+, 1, 0``: a partial sum, dim 1 and dim 0 of the others sharded."""
        words = ("+" if i in self.partial else "-" if d is None else str(d) for i, d in enumerate(self.dims))
        return ", ".join(words)


def joint_placements(oracle: Oracle) -> list[Joint]:
    """The placements that shard some operands, and have others partial, that give the whole result."""
    of = oracle.of
    if any(r is not None and r.numel() == 0 for r in oracle.results) or not oracle.results:
        return []
    values = [of, *oracle.variants]
    values = [each for each in values if all(r is None or bool(r.isfinite().all()) for r in each.kept)]
    return [each for each in itertools.islice(_candidates(oracle), MOST) if values and _holds(oracle, each, values)]


def _candidates(oracle: Oracle) -> Iterator[Joint]:
    floats = {i for i, t in enumerate(oracle.of.tensors) if (t.is_floating_point() or t.is_complex()) and t.numel() > 1}
    for choice in oracle.candidates():
        left = [i for i, d in enumerate(choice) if d is None and i in floats]
        for count in sorted({1, 2, len(left)} & set(range(1, len(left) + 1))):
            yield from (Joint(choice, frozenset(group)) for group in itertools.combinations(left, count))


def _holds(oracle: Oracle, each: Joint, values: Iterable[Instance]) -> bool:
    common: list[frozenset[Outcome]] | None = None
    for of in values:
        found = _outcomes(oracle, of, each)
        if found is None:
            return False
        common = found if common is None else [a & b for a, b in zip(common, found, strict=True)]
        if not all(common):
            return False
    return common is not None


def _outcomes(oracle: Oracle, of: Instance, each: Joint) -> list[frozenset[Outcome]] | None:
    """What the results are of those of two ranks; None if some is nothing of the kind."""
    size, *others = {t.shape[d] for t, d in zip(of.tensors, each.dims, strict=True) if d is not None}
    if others or chunk(size, 2, 1)[1] < oracle.least:
        return None
    terms = {i: split_sum(of.tensors[i], 2, oracle.generator) for i in each.partial}
    if oracle.screen and oracle.shard_results(of, each.dims, size, 2, op=oracle.screen, terms=terms) is None:
        return None
    found = [outcome - {"max", "min"} for outcome in oracle.outcomes(of, each.dims, size, 2, terms=terms) or ()]
    return found if found and all(found) else None


def missing_joints(offered: Iterable[Strategy], valid: Iterable[Joint], ignored: frozenset[int]) -> list[Joint]:
    """The valid placements that no strategy on a mesh of one axis has. How operands are placed whose values do not
    matter is left open."""
    known = []
    for made in offered:
        dims = tuple(next((d for d, sharding in enumerate(spec.dims) if sharding.axes), None) for spec in made.operands)
        known.append(Joint(dims, frozenset(i for i, spec in enumerate(made.operands) if spec.partial)))

    def bare(each: Joint) -> tuple[Choice, frozenset[int]]:
        return tuple(None if i in ignored else d for i, d in enumerate(each.dims)), each.partial - ignored

    matters = {bare(each) for each in known}
    return [each for each in valid if each not in known and bare(each) not in matters]


def choices(rule: ShardingRule, operands: int) -> set[Choice]:
    """For every factor that may be sharded: which dim of each operand is then sharded, in one contiguous range a rank.

    A factor behind another one in a dim is no such sharding: a rank would have many small ranges.
    """
    found = set()
    for factor, where in rule.factors.items():
        if (factor in rule.whole and rule.together(factor, frozenset()) is None) or rule.sizes[factor] < 2:
            continue
        dims: list[int | None] = [None] * operands
        plain = True
        for is_operand, tensor, dim, place in where:
            if not is_operand:
                continue
            before = rule.operands[tensor][dim][:place]
            plain = plain and dims[tensor] is None and all(rule.sizes[f] == 1 for f in before)
            dims[tensor] = dim
        if plain and any(d is not None for d in dims):
            found.add(tuple(dims))
    return found


def missing_shardings(rule: ShardingRule | None, valid: Collection[Choice], ignored: Collection[int]) -> list[Choice]:
    """The valid shardings that the rule does not allow, however operands are placed whose values do not matter."""
    if rule is None:
        return list(valid)
    allowed = choices(rule, len(rule.operands))
    matters = {tuple(None if i in ignored else d for i, d in enumerate(choice)) for choice in allowed}
    left = []
    for choice in valid:
        bare = tuple(None if i in ignored else d for i, d in enumerate(choice))
        if choice not in allowed and (bare not in matters or not any(d is not None for d in bare)):
            left.append(choice)
    return left


def missing_sums(rule: ShardingRule | None, valid: Collection[Linear]) -> list[Linear]:
    """The sets of operands that may be partial sums, and by the rule may not, or need not be summed, and by it must."""
    return [each for each in valid if rule is None or not _lets(rule, each)]


def _lets(rule: ShardingRule, valid: Linear) -> bool:
    made = rule.passes("sum", valid.operands)
    return made is not None and (bool(valid.results) or not made)
