"""What the calls of a program are: collectives of which group, memory, and what they were made of."""

from __future__ import annotations

import operator

import torch
from torch import fx

from shardfx.ir.graph import Value
from shardfx.ir.ops.fused_attention import attention, attention_backward
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
    """The name of what is called, for machines that know how long it takes: ``mm``, ``gelu``, ``time.add_product``;
    attention that leaves out later keys is another kind, for its operations are counted as if it did not."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return called(node)
    at = MASKED.get(node.target)
    causal = at is not None and (node.args[at] if at < len(node.args) else node.kwargs.get("causal"))
    return f"{CAUSAL if causal else ''}{base_name_of(node.target)}"


CAUSAL = "causal "
MASKED = {attention: 4, attention_backward: 7}
"""By kind of attention: the place of its argument ``causal``."""


def changed_by(node: fx.Node) -> list[fx.Node]:
    """The operands that a call reads and writes over, as a fused step of an optimizer does; destinations apart."""
    row, target = row_of(node.target), node.target
    if row is not None:
        into = row.destination(node)
        return [into] if into is not None and row.reads_into else []
    if not isinstance(target, torch._ops.OpOverload) or not target._schema.is_mutable:
        return []
    found: list[fx.Node] = []
    for place, argument in enumerate(target._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write and not argument.is_out:
            given = node.args[place] if place < len(node.args) else node.kwargs.get(argument.name)
            fx.map_arg(given, found.append)
    return found


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
