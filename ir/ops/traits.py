"""What torch's schemas and tags say of an op: is it a view, is it heavy."""

from __future__ import annotations

from functools import cache
from typing import Any

from shardfx.ir.graph import Node, op_name

OWN = ("comm.", "memory.")
VIEWS = frozenset("view _unsafe_view reshape t transpose permute expand unsqueeze squeeze alias detach clone".split())
"""Ops that only change how a tensor is looked at."""
HEAVY = ("mm", "bmm", "addmm", "baddbmm", "matmul", "linear", "einsum")


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


def is_view(node: Node) -> bool:
    return base_name(node) in VIEWS and len(node.operands) == 1


def is_heavy(node: Node) -> bool:
    """Whether most of the arithmetic is in such ops."""
    name = base_name(node)
    return name in HEAVY or "conv" in name or "attention" in name
