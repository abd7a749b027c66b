"""The rules that come with shardfx, by kind of op. A plugin's rules stand beside them (see docs/writing_rules.md)."""

from __future__ import annotations

from shardfx.ir.rulebook.arithmetic import attention, conv, create, linalg, matmul, norm, pointwise, pool, reduce
from shardfx.ir.rulebook.movement import lookup, rearrange, scatter, views
from shardfx.ir.rules.book import RuleBook

CATEGORIES = {
    "pointwise": pointwise.RULES,
    "views": views.RULES,
    "matmul": matmul.RULES,
    "reduce": reduce.RULES,
    "norm": norm.RULES,
    "linalg": linalg.RULES,
    "conv": conv.RULES,
    "pool": pool.RULES,
    "index": lookup.RULES,
    "scatter": scatter.RULES,
    "moves": rearrange.RULES,
    "attention": attention.RULES,
    "create": create.RULES,
}
"""The rules by kind of op; ops that carry torch's pointwise tag have theirs beside them."""

BUILT_IN = tuple(entry for entries in CATEGORIES.values() for entry in entries)


def default_rules() -> RuleBook:
    """The built-in rule book."""
    return RuleBook(BUILT_IN, pointwise.POINTWISE)
