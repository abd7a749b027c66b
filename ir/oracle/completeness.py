"""Does a rule allow all that is valid? What the search finds is looked for among the rule's factors."""

from __future__ import annotations

from collections.abc import Collection

from shardfx.ir.rules.sharding_rule import Linear, ShardingRule

from .cut_search import Choice


def choices(rule: ShardingRule, operands: int) -> set[Choice]:
    """For every factor that may be cut: which dim of each operand is then cut, in one piece a rank.

    A factor that stands behind another one in a dim is no such cut: a rank would hold many small pieces.
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


def missing_cuts(rule: ShardingRule | None, valid: Collection[Choice], ignored: Collection[int]) -> list[Choice]:
    """The valid cuts that the rule does not allow. How operands lie whose values do not matter is left open."""
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
