"""Does a rule allow all that is valid? What the search finds is looked for among the rule's strategies.

On one axis some operands may also be sharded while others are partial sums; each such placement is tried::

    aten.addmm(b[5], x[4, 6], w[6, 5])     +, 1, 0  ->  sum      each rank adds its term of b to its own product
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator

from shardfx.ir.graph import Strategy
from shardfx.ir.rules.sharding_rule import Linear, ShardingRule

from .instance import Instance
from .recombine import Outcome, agreed
from .sharding_search import PARTIAL, Choice, Oracle, Placement

MOST = 1500
"""Of more placements the first ones are tried."""


def joint_placements(oracle: Oracle) -> list[Placement]:
    """The placements that shard some operands, and have others partial, that give the whole result."""
    if any(r is not None and r.numel() == 0 for r in oracle.results) or not oracle.results:
        return []
    values = [each for each in (oracle.of, *oracle.variants) if all(r is None or r.isfinite().all() for r in each.kept)]
    tried = itertools.islice(_candidates(oracle), MOST)
    return [each for each in tried if agreed(_outcomes(oracle, of, each) for of in values) is not None]


def _candidates(oracle: Oracle) -> Iterator[Placement]:
    floats = {i for i, t in enumerate(oracle.of.tensors) if (t.is_floating_point() or t.is_complex()) and t.numel() > 1}
    for choice in oracle.candidates():
        left = [i for i, d in enumerate(choice) if d is None and i in floats]
        for count in sorted({1, 2, len(left)} & set(range(1, len(left) + 1))):
            for group in itertools.combinations(left, count):
                yield tuple(PARTIAL if i in group else d for i, d in enumerate(choice))


def _outcomes(oracle: Oracle, of: Instance, each: Placement) -> tuple[frozenset[Outcome], ...] | None:
    """What the results are of those of two ranks; None if some is nothing of the kind."""
    size, *others = {t.shape[d] for t, d in zip(of.tensors, each, strict=True) if isinstance(d, int)}
    if others or not oracle.fits(size, 2):
        return None
    if oracle.screen and oracle.shard_results(of, each, size, 2, op=oracle.screen) is None:
        return None
    found = oracle.outcomes(of, each, size, 2)
    return None if found is None else tuple(outcome - {"max", "min"} for outcome in found)


def missing_joints(
    offered: Iterable[Strategy], valid: Iterable[Placement], ignored: Collection[int]
) -> list[Placement]:
    """The valid placements that no strategy on a mesh of one axis has. How operands are placed whose values do not
    matter is left open."""
    known: set[Placement] = set()
    for made in offered:
        dims = (next((d for d, sharding in enumerate(spec.dims) if sharding.axes), None) for spec in made.operands)
        known.add(tuple(PARTIAL if spec.partial else d for d, spec in zip(dims, made.operands, strict=True)))
    matters = {_bare(each, ignored) for each in known}
    return [each for each in valid if each not in known and _bare(each, ignored) not in matters]


def _bare(placement: Placement, ignored: Collection[int]) -> Placement:
    """A placement but for the operands whose values do not matter."""
    return tuple(None if i in ignored else d for i, d in enumerate(placement))


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
    matters = {_bare(choice, ignored) for choice in allowed} - {(None,) * len(rule.operands)}
    return [choice for choice in valid if choice not in allowed and _bare(choice, ignored) not in matters]


def missing_sums(rule: ShardingRule | None, valid: Collection[Linear]) -> list[Linear]:
    """The sets of operands that may be partial sums, and by the rule may not, or need not be summed, and by it must."""

    def allows(each: Linear) -> bool:
        made = rule.passes("sum", each.operands) if rule is not None else None
        return made is not None and (bool(each.results) or not made)

    return [each for each in valid if not allows(each)]
