"""The rules of ids of a table in 32 bits, and of rows of parts; and the law of lookups by narrow ids.

    embedding(w, narrow_ids(ids, size)) = embedding(w, ids)         of at most ``size`` rows; so is its gradient

An id beyond the table is beyond it as a narrow one, too: both lookups are the same error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from shardfx.ir.graph import Node, Value
from shardfx.ir.ops.computing.table_ids import GRADIENT, LOOKUP, narrow_ids, numbered_rows, numbered_sums, row_numbers
from shardfx.ir.ops.table import OwnOp
from shardfx.ir.rules.book import RuleEntry, rule
from shardfx.ir.rules.local import Emit, others_zero

aten = torch.ops.aten
Made = TypeVar("Made")


def own_sums(emit: Emit) -> Any:
    """The sums of a rank that has one part: the gradient of a lookup in it."""
    rows, numbers, size = emit.args
    if emit.operand_shape(1)[1] != 1:
        return emit.call(numbered_sums, rows, numbers, size)
    outside = emit.call(aten.le.Scalar, numbers, 0)
    index = emit.call(aten.masked_fill.Scalar, emit.call(aten.sub.Tensor, numbers, 1), outside, 0)
    return emit.call(GRADIENT, others_zero(emit, rows, outside, rows=True), index, size, -1, False)


RULES: tuple[RuleEntry, ...] = (
    rule(narrow_ids, "n.. -> n.."),
    rule(row_numbers, "n.. -> n.., n.."),
    rule(numbered_rows, "(p g!) h, d p e c -> d p e c h", linear="0"),
    rule(numbered_sums, "d p e c h, d p e c -> (p g!) h", linear="0", local=own_sums),
)


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
