"""The rules that come with shardfx, by kind of op. A plugin's rules stand beside them (see docs/writing_rules.md)."""

from __future__ import annotations

from shardfx.ir.rules.book import RuleBook

from .arithmetic import attention, conv, linalg, loss, norm, pointwise, pool, reduce, resize
from .movement import lookup, slices, views

CATEGORIES = {
    module.__name__.rpartition(".")[2]: module.RULES
    for module in (
        *(pointwise, attention, linalg, reduce, norm, conv, pool, resize, loss),
        *(views, slices, lookup),
    )
}
"""The rules by kind of op, which is a file; ops that carry torch's pointwise tag, and those that make tensors of
nothing, have theirs beside them."""

BUILT_IN = tuple(entry for entries in CATEGORIES.values() for entry in entries)


def default_rules() -> RuleBook:
    """The built-in rule book."""
    return RuleBook({}, pointwise.POINTWISE, pointwise.MADE).extended(BUILT_IN)
