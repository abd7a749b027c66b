"""Traits of ops from torch's schemas, tags and formulas: arguments by name, view, heavy, random."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from shardfx.ir.graph import Node, Value, op_name
from shardfx.ir.registry import GRAPH_OPS

aten = torch.ops.aten

KINDS = ("attention", "shardfx.grouped_", "shardfx.routed_")
"""Parts of the names of heavy ops that torch has no FLOP formula for."""


def with_defaults(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments by their names in the op's schema, with defaults."""
    names, defaults = _names_and_defaults(op)
    return {**defaults, **dict(zip(names, args, strict=False)), **kwargs}


@cache
def _names_and_defaults(op: Any) -> tuple[list[str], dict[str, Any]]:
    schema = op._schema.arguments
    defaults = {each.name: each.default_value for each in schema if each.has_default_value()}
    return [each.name for each in schema], defaults


def positional(op: Any, values: Mapping[str, Any]) -> tuple[Any, ...]:
    """Arguments by name in the order of the op's schema, without trailing defaults."""
    schema = list(op._schema.arguments)
    while schema and schema[-1].has_default_value():
        name, default = schema[-1].name, schema[-1].default_value
        if name in values and not (type(values[name]) is type(default) and values[name] == default):
            break
        schema.pop()
    return tuple(values.get(each.name, each.default_value) for each in schema)


OF_MEMORY = (aten.as_strided, aten.as_strided_copy, aten.as_strided_scatter)
"""Ops that read the memory of a dense operand from its first element on. Their ``storage_offset`` counts from the
start of the storage, which a value may share with others: graphs and programs leave it out."""


def storage_offset(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The storage offset at which a call reads memory; None if it is its operand's, or it reads none."""
    if getattr(op, "overloadpacket", None) not in OF_MEMORY:
        return None
    return with_defaults(op, args, kwargs)["storage_offset"]


def base_name(node: Node) -> str:
    """The op's name without namespace and overload; that of an own op in full."""
    return base_name_of(node.op)


@cache
def base_name_of(op: Any) -> str:
    """The name of an op without namespace and overload: ``mm``, ``add``; that of an own op in full."""
    name = op_name(op)
    return name.split(".")[1] if isinstance(op, torch._ops.OpOverload) else name


def is_own(node: Node) -> bool:
    """Whether the op is in the registry (``comm.*``, ``memory.*``): its keywords say what it does."""
    return op_name(node.op) in GRAPH_OPS


@cache
def gives_alias(op: Any) -> bool:
    """Whether the op's results are views of its operand, as its schema says."""
    returns = op._schema.returns if isinstance(op, torch._ops.OpOverload) else ()
    return bool(returns) and all(each.alias_info is not None and not each.alias_info.is_write for each in returns)


def is_view(node: Node) -> bool:
    """Whether the node is a view of all elements of one tensor (a slice is not)."""
    operands, results = node.operands, node.outs
    if not gives_alias(node.op) or len(operands) != 1 or len(results) != 1:
        return False
    return results[0].type.numel >= operands[0].type.numel


def is_cast(node: Node) -> bool:
    """Whether the node casts its one tensor to another dtype."""
    return node.op is torch.ops.aten._to_copy.default and node.operands[0].type.dtype is not node.outs[0].type.dtype


def narrows(node: Node) -> bool:
    """Whether the node casts its one tensor to a dtype of fewer bytes."""
    return is_cast(node) and node.outs[0].type.nbytes < node.operands[0].type.nbytes


def uncast(value: Value) -> Value:
    """The source of a cast; a value itself, if it is none."""
    while value.node is not None and is_cast(value.node):
        value = value.node.operands[0]
    return value


def unviewed(value: Value) -> Value:
    """The value that a view is of, also through several; a value itself, if it is no view."""
    while value.node is not None and is_view(value.node):
        value = value.node.operands[0]
    return value


@cache
def is_heavy_op(op: Any) -> bool:
    """Whether torch has a formula for the op's arithmetic (products, convolutions), or it is a kind of attention or of
    product by group."""
    return getattr(op, "overloadpacket", op) in flop_registry or any(kind in op_name(op) for kind in KINDS)


def is_heavy(node: Node) -> bool:
    """Whether the node's op is heavy: most FLOPs are in such ops."""
    return is_heavy_op(node.op)


def draws(op: Any) -> bool:
    """Whether the op draws random numbers from torch's generator, as its tag says."""
    return torch.Tag.nondeterministic_seeded in getattr(op, "tags", ())


COPIES = {aten.clone.default, aten.alias.default, aten.contiguous.default, aten.detach.default}
"""Ops that return their operand unchanged, at most in other memory."""
NEUTRAL = {
    **dict.fromkeys((aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar, aten.pow.Tensor_Scalar), 1),
    **dict.fromkeys((aten.add.Tensor, aten.add.Scalar, aten.sub.Tensor, aten.sub.Scalar), 0),
    **dict.fromkeys((aten.softshrink.default, aten.hardshrink.default), 0),
}
"""The neutral number of ops, with which they return their first operand unchanged."""


def is_neutral(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an op's number is its neutral one, so that it returns its first operand unchanged."""
    plain = not kwargs and len(args) == 2 and isinstance(args[1], (int, float))
    return plain and not isinstance(args[0], (int, float)) and bool(args[1] == NEUTRAL.get(op))
