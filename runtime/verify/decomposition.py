"""Decompositions of ops, by torch or the rule book, compared with the op on random numbers."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch._decomp import core_aten_decompositions, decomposition_table

from shardfx.ir.builder import trace_on_meta, types_of
from shardfx.ir.errors import DOES_NOT_RUN, Error
from shardfx.ir.graph import Node, Value, op_name, substitute
from shardfx.ir.node import draw_slot
from shardfx.ir.ops.alike import alike
from shardfx.ir.ops.traits import draws
from shardfx.ir.oracle.draws import FLOATS, Draw
from shardfx.ir.oracle.instance import bind
from shardfx.ir.rules.book import RuleBook
from shardfx.ir.shards import wide
from shardfx.ir.spec import TensorType

aten = torch.ops.aten
DECOMPOSITIONS: Mapping[Any, Callable[..., Any]] = {
    op: decomposition_table[op]
    for op in (*core_aten_decompositions(), aten.addmv.default, aten.gelu.default)
    if op in decomposition_table
} | {aten.addmm.default: lambda x, a, b, *, beta=1, alpha=1: alpha * torch.mm(a, b) + beta * x}
"""Torch's own of ``addmm`` expands its first operand since torch 2.15."""
CHECKED_NUMEL = 1 << 22
"""The most elements of an op's tensors for which its decomposition is compared with it."""
TOLERANCE = 1e-9


class Unjustified(Exception):
    """A decomposition that differs from the op, or cannot be traced."""


@dataclass(frozen=True)
class _Alike:
    """A structural key of a node: equal for nodes that are alike and draw the same random numbers."""

    key: Hashable
    node: Node = field(compare=False)

    @staticmethod
    def of(node: Node) -> _Alike:
        drawn = draw_slot(node)
        return _Alike((alike(node), None if drawn is None else node.args[drawn]), _copy(node, lambda type: type))


def _copy(node: Node, change: Callable[[TensorType], TensorType]) -> Node:
    def value(of: Value) -> Value:
        return Value(change(of.type))

    kwargs = {name: substitute(arg, value) for name, arg in node.kwargs.items()}
    return Node(node.op, substitute(node.args, value), kwargs, [v and value(v) for v in node.results])


def justified(node: Node, expand: Any) -> torch.fx.GraphModule:
    """The decomposition of a node, traced, after a comparison with the op on random numbers: once for alike nodes."""
    return _justified(_Alike.of(node), expand if callable(expand) else decomposition_table[node.op])


@lru_cache(1024)
def _justified(of: _Alike, decomposition: Callable[..., Any]) -> torch.fx.GraphModule:
    traced = _traced(of.node, decomposition)
    if small(of.node):
        _compare(of.node, decomposition)
    return traced


def decomposed(node: Node, book: RuleBook) -> torch.fx.GraphModule | None:
    """The decomposition of a node, traced; None where there is none, or none that is justified.

    It is taken as in float64, in which torch's compute without casts, and is then traced in the dtypes of the node.
    """
    op, entry = node.op, book.entry(node.op)
    if not isinstance(op, torch._ops.OpOverload) or draws(op) or not node.operands:
        return None
    own = entry.expand if entry is not None else None
    decomposition = DECOMPOSITIONS.get(op) or own or (op if op._can_decompose() else None)
    zero_times = 0 in (node.kwargs.get("alpha"), node.kwargs.get("beta"))  # what is taken so may be infinite
    return None if decomposition is None or zero_times else _decomposed(_Alike.of(node), decomposition)


@lru_cache(1024)
def _decomposed(of: _Alike, decomposition: Any) -> torch.fx.GraphModule | None:
    wide = _copy(of.node, lambda type: TensorType(type.shape, widened(type.dtype)))
    wide.args, wide.kwargs = widened(wide.args), widened(wide.kwargs)
    try:
        traced = trace_on_meta(justified(wide, decomposition), [value.type for value in of.node.operands])
    except (Unjustified, Error, *DOES_NOT_RUN):
        return None
    results = next(each for each in traced.graph.nodes if each.op == "output").args[0]
    types = types_of([each and each.meta["val"] for each in results])
    calls = [each.target for each in traced.graph.nodes if isinstance(each.target, torch._ops.OpOverload)]
    same = types == [v and v.type for v in of.node.results] and not any(call._schema.is_mutable for call in calls)
    return traced if same else None


def _traced(node: Node, decomposition: Callable[..., Any]) -> torch.fx.GraphModule:
    def function(*tensors: torch.Tensor) -> Any:
        args, kwargs = bind(node, tensors)
        made = zip(_as_tuple(decomposition(*args, **kwargs)), node.results, strict=False)
        return tuple(x if x is None or v is None else x.to(v.type.dtype) for x, v in made)  # what the op itself gives

    return trace_on_meta(function, [value.type for value in node.operands])


def _compare(node: Node, decomposition: Callable[..., Any]) -> None:
    """Raise if a decomposition is not the op, on values of both signs, zeros and ties, as far as the op takes them."""
    random = torch.Generator().manual_seed(0)
    least = min((size for v in node.operands for size in v.shape), default=2)
    refused: list[Exception] = []
    for draw in FLOATS:
        args, kwargs = map(widened, bind(node, [_random(v.type, draw, random, min(least, 2)) for v in node.operands]))
        with torch.no_grad():
            try:
                expected = _as_tuple(node.op(*args, **kwargs))
            except RuntimeError as error:  # of numbers that the op does not take, such as a probability of -1
                refused.append(error)
                continue
            got = _as_tuple(decomposition(*args, **kwargs))
        for a, b, value in zip(expected, got, node.results, strict=False):
            asked = value is not None and a is not None  # an output mask leaves some out
            if asked and (b is None or not _close(a, b)):
                what = f"the decomposition of {op_name(node.op)} gives other numbers than the op"
                raise Unjustified(f"{what}, of {(draw.__doc__ or '').lower().rstrip('.')}")
    if len(refused) == len(FLOATS):
        raise Unjustified(f"{op_name(node.op)} took no numbers to compare its decomposition on: {refused[-1]}")


def _as_tuple(out: Any) -> tuple[Any, ...]:
    return tuple(out) if isinstance(out, (tuple, list)) else (out,)


def small(node: Node) -> bool:
    """Whether the node is small enough to be run for a comparison."""
    return sum(v.type.numel for v in [*node.operands, *node.outs]) <= CHECKED_NUMEL


def widened(arg: Any) -> Any:
    """A nest of arguments with float64 for every floating-point dtype among them, and complex128 for complex ones."""
    if isinstance(arg, torch.dtype) and (arg.is_floating_point or arg.is_complex):
        return torch.complex128 if arg.is_complex else torch.float64
    if isinstance(arg, (list, tuple)):
        return type(arg)(widened(a) for a in arg)
    if isinstance(arg, dict):
        return {k: widened(a) for k, a in arg.items()}
    return arg


def _random(type: TensorType, draw: Draw, random: torch.Generator, indices: int) -> torch.Tensor:
    """Random numbers; integers below ``indices``, as they may be indices."""
    if type.dtype.is_floating_point:
        return draw(type.shape, random)
    if type.dtype.is_complex:
        return torch.complex(draw(type.shape, random), draw(type.shape, random))
    if type.dtype is torch.bool:
        return torch.rand(type.shape, generator=random) < 0.5
    return torch.randint(0, max(indices, 1), type.shape, generator=random).to(type.dtype)


def _close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(wide(a), wide(b), rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True)
