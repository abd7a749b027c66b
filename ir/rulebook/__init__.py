"""The rules that come with shardfx, by kind of op. A plugin's rules stand beside them (see docs/writing_rules.md)."""

from __future__ import annotations

from ..rules import RuleBook
from . import attention, conv, create, index, linalg, matmul, moves, norm, pointwise, pool, reduce, scatter, views

CATEGORIES = {
    "pointwise": pointwise.RULES,
    "views": views.RULES,
    "matmul": matmul.RULES,
    "reduce": reduce.RULES,
    "norm": norm.RULES,
    "linalg": linalg.RULES,
    "conv": conv.RULES,
    "pool": pool.RULES,
    "index": index.RULES,
    "scatter": scatter.RULES,
    "moves": moves.RULES,
    "attention": attention.RULES,
    "create": create.RULES,
}
"""The rules by kind of op; ops that carry torch's pointwise tag have theirs beside them."""

BUILT_IN = tuple(entry for entries in CATEGORIES.values() for entry in entries)


def default_rules() -> RuleBook:
    """The built-in rule book."""
    return RuleBook(BUILT_IN, pointwise.POINTWISE)
