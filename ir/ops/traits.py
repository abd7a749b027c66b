"""What torch's schemas, tags and formulas say of an op: is it a view, is it heavy, does it draw random numbers."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from shardfx.ir.graph import Node, op_name

OWN = ("comm.", "memory.")


def base_name(node: Node) -> str:
    """The op without namespace and overload; one of our own in full."""
    return base_name_of(node.op)


@cache
def base_name_of(op: Any) -> str:
    name = op_name(op)
    return name if name.startswith(OWN) else name.removeprefix("aten.").partition(".")[0]


def is_own(node: Node) -> bool:
    """Whether the op is one of our own (``comm.*``, ``memory.*``), whose keywords say what it does."""
    return base_name_of(node.op).startswith(OWN)


@cache
def gives_alias(op: Any) -> bool:
    """Whether the op's results are views of its operand, as its schema says."""
    returns = op._schema.returns if isinstance(op, torch._ops.OpOverload) else ()
    return bool(returns) and all(each.alias_info is not None and not each.alias_info.is_write for each in returns)


def is_view(node: Node) -> bool:
    """Whether the node only changes how one tensor is looked at, and shows all of it (a slice does not)."""
    operands, results = node.operands, node.outs
    if not gives_alias(node.op) or len(operands) != 1 or len(results) != 1:
        return False
    return results[0].type.numel >= operands[0].type.numel


@cache
def is_heavy_op(op: Any) -> bool:
    """Whether torch has a formula for the op's arithmetic (products, convolutions), or it is a kind of attention."""
    return getattr(op, "overloadpacket", op) in flop_registry or "attention" in op_name(op)


def is_heavy(node: Node) -> bool:
    """Whether most of the arithmetic is in such ops."""
    return is_heavy_op(node.op)


def draws(op: Any) -> bool:
    """Whether the op draws random numbers from torch's generator, as its tag says."""
    return torch.Tag.nondeterministic_seeded in getattr(op, "tags", ())
