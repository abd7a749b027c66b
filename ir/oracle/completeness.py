"""Completeness of a rule: every sharding that the search finds valid must be among the rule's strategies.

On one axis some operands may also be sharded while others are partial sums; each such placement is tried::

    aten.addmm(b[5], x[4, 6], w[6, 5])     +, 1, 0  ->  sum      each rank adds its term of b to its own product
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator

from shardfx.ir.dim_sharding import is_strided
from shardfx.ir.graph import Node
from shardfx.ir.mesh import Mesh
from shardfx.ir.rules.sharding_rule import Linear, ShardingRule
from shardfx.ir.rules.strategy import strategies

from .instance import Instance, is_float
from .recombine import Outcome, agreed
from .sharding_search import PARTIAL, Oracle, Placement

MOST = 1500
"""The maximum number of joint placements to try; further ones are skipped."""


def joint_placements(oracle: Oracle) -> list[Placement]:
    """The placements that shard some operands, and have others partial, that give the full result."""
    if any(r is not None and r.numel() == 0 for r in oracle.results) or not oracle.results:
        return []
    values = [each for each in (oracle.of, *oracle.variants) if all(r is None or r.isfinite().all() for r in each.kept)]
    tried = itertools.islice(_candidates(oracle), MOST)
    return [each for each in tried if agreed(_outcomes(oracle, of, each) for of in values) is not None]


def _candidates(oracle: Oracle) -> Iterator[Placement]:
    floats = {i for i, t in enumerate(oracle.of.tensors) if is_float(t) and t.numel() > 1}
    for choice in oracle.candidates():
        left = [i for i, d in enumerate(choice) if d is None and i in floats]
        for count in sorted({1, 2, len(left)} & set(range(1, len(left) + 1))):
            for group in itertools.combinations(left, count):
                yield tuple(PARTIAL if i in group else d for i, d in enumerate(choice))


def _outcomes(oracle: Oracle, of: Instance, each: Placement) -> tuple[frozenset[Outcome], ...] | None:
    """The ways in which the full results recombine from those of two ranks; None if some result does not recombine."""
    size, *others = {t.shape[d] for t, d in zip(of.tensors, each, strict=True) if isinstance(d, int)}
    if others or not oracle.fits(size, 2):
        return None
    if oracle.screen and oracle.shard_results(of, each, size, 2, op=oracle.screen) is None:
        return None
    found = oracle.outcomes(of, each, size, 2)
    return None if found is None else tuple(outcome - {"max", "min"} for outcome in found)


def missing_placements(
    rule: ShardingRule | None, node: Node, valid: Iterable[Placement], ignored: Collection[int]
) -> list[Placement]:
    """The valid placements, of shards and partial sums, that a node's strategies on a one-axis mesh lack, in contiguous
    shards. The placement of operands whose values do not matter is left open."""
    known: set[Placement] = set()
    for made in strategies(rule, node, Mesh(a=2)) if rule is not None else ():
        dims = [next((d for d, sharding in enumerate(spec.dims) if sharding.axes), None) for spec in made.operands]
        if not any(is_strided(sharding) for spec in made.operands for sharding in spec.dims):
            known.add(tuple(PARTIAL if spec.partial else d for d, spec in zip(dims, made.operands, strict=True)))
    offered = {_matters(each, ignored) for each in known}

    def allows(each: Placement) -> bool:
        matters = _matters(each, ignored)
        return each in known or (matters in offered and (PARTIAL in each or any(d is not None for d in matters)))

    return [each for each in valid if not allows(each)]


def _matters(placement: Placement, ignored: Collection[int]) -> Placement:
    return tuple(None if i in ignored else d for i, d in enumerate(placement))


def missing_sums(rule: ShardingRule | None, valid: Collection[Linear]) -> list[Linear]:
    """The linear sets of operands that the rule does not let be partial, or whose result it needlessly reduces."""

    def allows(each: Linear) -> bool:
        made = rule.passes("sum", each.operands) if rule is not None else None
        return made is not None and (bool(each.results) or not made)

    return [each for each in valid if not allows(each)]
