"""The rules that come with shardfx, by kind of op. A plugin's rules stand beside them (see docs/writing_rules.md)."""

from __future__ import annotations

from ..rules import RuleBook
from . import attention, conv, create, index, linalg, matmul, moves, norm, pointwise, pool, reduce, scatter, views

BUILT_IN = (
    *pointwise.RULES,
    *views.RULES,
    *matmul.RULES,
    *reduce.RULES,
    *norm.RULES,
    *linalg.RULES,
    *conv.RULES,
    *pool.RULES,
    *index.RULES,
    *scatter.RULES,
    *moves.RULES,
    *attention.RULES,
    *create.RULES,
)


def default_rules() -> RuleBook:
    """The built-in rule book."""
    return RuleBook(BUILT_IN, pointwise.POINTWISE)
