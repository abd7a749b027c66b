"""What the calls of a program are: collectives of which group, memory, and what they were made of."""

from __future__ import annotations

import operator

import torch
from torch import fx

from shardfx.ir.graph import Value
from shardfx.ir.ops.local_ops import row_of
from shardfx.ir.ops.table import OwnOp
from shardfx.ir.ops.traits import base_name_of


def group_of(node: fx.Node) -> str | None:
    """The group that a call starts a collective in; None for any other call."""
    row = row_of(node.target)
    return str(node.args[row.group]) if row is not None and row.group is not None else None


def is_memory(node: fx.Node) -> bool:
    """Whether a call gives memory, and no value: nothing is read or written."""
    row = row_of(node.target)
    return row is not None and row.memory and not row.filled


def called(node: fx.Node) -> str:
    """What programs call a collective."""
    row = row_of(node.target)
    return row.name if row is not None else str(node.target)


def kind_of(node: fx.Node) -> str:
    """The name of what is called, for machines that know how long it takes: ``mm``, ``gelu``, ``time.add_product``."""
    return base_name_of(node.target) if isinstance(node.target, torch._ops.OpOverload) else called(node)


def before_communication(node: fx.Node, seen: set[fx.Node]) -> list[fx.Node]:
    """The values that communication (and putting away) made this one of: itself, if it is no result of such. What was
    ``seen`` before is left out."""
    found: dict[fx.Node, None] = {}
    todo = [node]
    while todo:
        each = todo.pop()
        if each in seen:
            continue
        seen.add(each)
        maker = each.args[0] if each.target is operator.getitem else each
        planned = maker.meta.get("shardfx") if isinstance(maker, fx.Node) else None
        if planned is not None and isinstance(planned.op, OwnOp):
            todo += [used for used in each.all_input_nodes if used.op != "placeholder"]
        else:
            found[each] = None
    return list(found)


def source_of(value: Value) -> Value:
    """The value of the graph before any communication, and before it was put away and fetched."""
    while value.node is not None and isinstance(value.node.op, OwnOp):
        operands = value.node.operands
        value = operands[value.index if len(operands) > 1 else 0]
    return value
