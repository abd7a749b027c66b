"""The built-in rules, by kind of op. Plugins may add more (see docs/writing_rules.md)."""

from __future__ import annotations

from shardfx.ir.rules.book import RuleBook

from .arithmetic import attention, conv, linalg, loss, norm, pointwise, pool, reduce, resize, ring
from .movement import experts, lookup, slices, table_lookups, views

CATEGORIES = {
    module.__name__.rpartition(".")[2]: module.RULES
    for module in (
        *(pointwise, attention, ring, linalg, reduce, norm, conv, pool, resize, loss),
        *(views, slices, lookup, table_lookups, experts),
    )
}
"""The rules by kind of op (the name of their file); ops with torch's pointwise tag, and ops that create tensors, share
one rule each besides."""

BUILT_IN = tuple(entry for entries in CATEGORIES.values() for entry in entries)


def default_rules() -> RuleBook:
    """The built-in rule book."""
    return RuleBook({}, pointwise.POINTWISE, pointwise.MADE).extended(BUILT_IN)
