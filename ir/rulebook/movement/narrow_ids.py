"""The rule of ids of a table in 32 bits, and the law of lookups by them.

    embedding(w, narrow_ids(ids, size)) = embedding(w, ids)         of at most ``size`` rows; so is its gradient

An id beyond the table is beyond it as a narrow one, too: both lookups are the same error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from shardfx.ir.graph import Node, Value
from shardfx.ir.ops.computing.table_ids import GRADIENT, LOOKUP, narrow_ids
from shardfx.ir.ops.table import OwnOp
from shardfx.ir.rules.book import RuleEntry, rule

Made = TypeVar("Made")
RULES: tuple[RuleEntry, ...] = (rule(narrow_ids, "n.. -> n.."),)


def wide_ids(node: Node, of: Callable[[Value], Made]) -> Callable[[Value], Made]:
    """What is ``of`` the operands of a node, where that is a lookup by narrow ids, or its gradient: of the ids
    themselves."""
    if node.op not in (LOOKUP, GRADIENT):
        return of
    rows: Any = node.operands[0].shape[0] if node.op is LOOKUP else node.args[2]

    def wide(value: Value) -> Made:
        source = value
        while source.node is not None and isinstance(source.node.op, OwnOp):
            source = source.node.operands[source.index]
        if value is node.operands[1] and source.node is not None and source.node.op is narrow_ids:
            ids, size = source.node.args
            return of(ids if size >= rows else value)
        return of(value)

    return wide
