"""One rank's version of a node: its shard of every tensor, and the call of the local op.

Code generation writes that call into a program, the oracle (:mod:`shardfx.ir.oracle`) executes it: both by
:func:`perform`, so that the checked code is the code that runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

from shardfx.ir.dim_sharding import Coords, DimSharding, is_strided
from shardfx.ir.errors import Error
from shardfx.ir.graph import Node, Value, op_name
from shardfx.ir.mesh import Mesh
from shardfx.ir.spec import Spec

from .sharding_rule import SAME, ShardingRule

aten = torch.ops.aten


TARGETS: dict[Any, Any] = {aten.view.default: aten.reshape.default, aten._unsafe_view.default: aten.reshape.default}
"""Ops that replace views: a local shard's strides may not allow a view."""


class SubRange(NamedTuple):
    """A rank's contiguous range of a sub-dim of ``size`` elements."""

    size: int
    start: int
    length: int


@dataclass(frozen=True)
class DimShard:
    """A rank's shard of a dim: a range of each of its sub-dims, major first; one, if the dim is sharded plainly."""

    ranges: tuple[SubRange, ...]

    @staticmethod
    def of(sharding: DimSharding, size: int, mesh: Mesh, coords: Coords) -> DimShard:
        """The shard of a dim of ``size`` elements on the rank at ``coords``."""
        pairs = zip(sharding.sub(size), sharding.spans(size, mesh, coords), strict=True)
        return DimShard(tuple(SubRange(part.size, *span) for part, span in pairs))

    @property
    def first(self) -> int:
        """The index of the shard's first element: it differs between shards."""
        found = 0
        for each in self.ranges:
            found = found * each.size + each.start
        return found

    @property
    def length(self) -> int:
        """The number of elements of the shard."""
        return math.prod(each.length for each in self.ranges)

    @property
    def is_full(self) -> bool:
        """Whether the shard is the full dim."""
        return all(each.length == each.size for each in self.ranges)

    @property
    def numbers(self) -> list[int]:
        """Size, start and length of each range, as a flat list."""
        return [number for each in self.ranges for number in each]


@dataclass
class NodeShard:
    """The shards of a node's tensors on the rank at ``coords``, by the node's strategy."""

    node: Node
    mesh: Mesh
    coords: Coords

    def shape(self, value: Value, spec: Spec) -> tuple[int, ...]:
        """The local shape of a value with a spec."""
        return spec.local_shape(value.shape, self.mesh, self.coords)

    def operand_shape(self, operand: int) -> tuple[int, ...]:
        """The local shape of an operand."""
        return self.shape(*self._operand(operand))

    def result_shape(self, result: int) -> tuple[int, ...]:
        """The local shape of a result."""
        return self.shape(*self._result(result))

    def operand_shard(self, operand: int, dim: int) -> DimShard:
        """This rank's shard of a dim of an operand."""
        return self._dim(*self._operand(operand), dim)

    def result_shard(self, result: int, dim: int) -> DimShard:
        """This rank's shard of a dim of a result."""
        return self._dim(*self._result(result), dim)

    def operand_bounds(self, operand: int, dim: int) -> tuple[int, int]:
        """Start and length of this rank's contiguous range of a dim of an operand.

        Raises:
            Error: the dim is sharded so that ranks have several ranges.
        """
        return self._bounds(*self._operand(operand), dim)

    def result_bounds(self, result: int, dim: int) -> tuple[int, int]:
        """Start and length of this rank's contiguous range of a dim of a result."""
        return self._bounds(*self._result(result), dim)

    def _operand(self, operand: int) -> tuple[Value, Spec]:
        assert self.node.strategy is not None
        return self.node.operands[operand], self.node.strategy.operands[operand]

    def _result(self, result: int) -> tuple[Value, Spec]:
        assert self.node.strategy is not None
        return self.node.outs[result], self.node.strategy.results[result]

    def _dim(self, value: Value, spec: Spec, dim: int) -> DimShard:
        return DimShard.of(spec.dims[dim], value.shape[dim], self.mesh, self.coords)

    def _bounds(self, value: Value, spec: Spec, dim: int) -> tuple[int, int]:
        if is_strided(spec.dims[dim]):
            raise Error(
                f"{op_name(self.node.op)} is written for a rank that has one contiguous range of a dim",
                where=str(self.node.where),
                expected=f"dim {dim} sharded plainly",
                got=spec.text(value.shape),
                remedy="hint a plain sharding; in a rule's local function ask for operand_shard or result_shard",
            )
        found = self._dim(value, spec, dim)
        return found.first, found.length


@dataclass
class Emit(NodeShard):
    """The context of a rule's ``local`` function: code generation writes its calls into a program, the oracle executes
    them."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def call(self, op: Any, *args: Any, **kwargs: Any) -> Any:
        """Write a call; returns its result, for further calls."""
        raise NotImplementedError


@cache
def gives_list(op: Any) -> bool:
    """Whether an op returns a list of tensors, even if of one."""
    returns = op._schema.returns if isinstance(op, torch._ops.OpOverload) else ()
    return len(returns) == 1 and str(returns[0].type) == "List[Tensor]"


def is_sharded(node: Node) -> bool:
    """Whether any tensor of the node is sharded: otherwise the op runs unchanged."""
    assert node.strategy is not None
    return any(spec.axes for spec in (*node.strategy.operands, *node.strategy.results))


def reshaped(emit: Emit) -> Any:
    """A reshape of the shard to its local shape, for an op that would misread local sizes."""
    return emit.call(aten.reshape.default, emit.args[0], list(emit.result_shape(0)))


def mine(emit: Emit, index: Any, shard: DimShard) -> tuple[Any, Any]:
    """The local index (clamped) of a global one, and whether it lies outside this rank's shard."""
    place, outside, stride, below = None, None, 1, 1
    for i, part in reversed(list(enumerate(shard.ranges))):
        digit = emit.call(aten.floor_divide.Scalar, index, below) if below > 1 else index
        if i:
            digit = emit.call(aten.remainder.Scalar, digit, part.size)
        if part.length < part.size:
            digit = emit.call(aten.sub.Tensor, digit, part.start)  # also of 0: all ranks run one program
            low, high = emit.call(aten.lt.Scalar, digit, 0), emit.call(aten.ge.Scalar, digit, part.length)
            digit = emit.call(aten.clamp.default, digit, 0, max(part.length - 1, 0))
            beside = emit.call(aten.logical_or.default, low, high)
            outside = emit.call(aten.logical_or.default, outside, beside) if outside is not None else beside
        digit = emit.call(aten.mul.Tensor, digit, stride) if stride > 1 else digit
        place = emit.call(aten.add.Tensor, place, digit) if place is not None else digit
        stride, below = stride * part.length, below * part.size
    return place, outside


def others_zero(emit: Emit, found: Any, outside: Any, *, rows: bool = False) -> Any:
    """Lookup results within this rank's range, and zeros for the rest: the sum over the ranks is the full result."""
    where = emit.call(aten.unsqueeze.default, outside, -1) if rows else outside
    return emit.call(aten.masked_fill.Scalar, found, where, 0)


def box_of(emit: Emit, full: Any, shards: Sequence[DimShard]) -> Any:
    """This rank's shard of a full tensor that it has computed, by the shard of each dim."""
    ranges = [part for each in shards for part in each.ranges]
    if all(part.length == part.size for part in ranges):
        return full
    box = emit.call(aten.view.default, full, [part.size for part in ranges]) if len(ranges) > len(shards) else full
    for dim, (size, start, length) in enumerate(ranges):
        if length < size:
            box = emit.call(aten.slice.Tensor, box, dim, start, start + length)
    return emit.call(aten.reshape.default, box, [each.length for each in shards]) if len(ranges) > len(shards) else box


def nothing(emit: Emit, like: Any) -> Any:
    """Zeros of the local shape, for a rank with an empty shard."""
    return emit.call(aten.new_zeros.default, like, list(emit.result_shape(0)))


def add_once(emit: Emit) -> Any:
    """The op with its first operand added once: by the rank with the first shard of the values; others add to zeros.
    If the operand is a partial sum over the same axes, each rank adds to its own term."""
    made = emit.node.strategy
    assert made is not None
    axes = (*made.operands[0].axes, *made.operands[0].partial_axes)
    apart = [
        (t, d)
        for t, spec in enumerate(made.operands[1:], 1)
        for d, sharding in enumerate(spec.dims)
        if not set(sharding.axes) <= set(axes)
    ]
    if not apart:
        return emit.call(emit.node.op, *emit.args, **emit.kwargs)
    others = any(emit.operand_shard(t, d).first for t, d in apart)  # a number: all ranks and iterations run one program
    away = emit.call(aten.full.default, [], int(others), dtype=torch.bool)
    once = emit.call(aten.masked_fill.Scalar, emit.args[0], away, 0)
    return emit.call(emit.node.op, once, *emit.args[1:], **emit.kwargs)


# ---- empty shards: a rank with an empty shard of a factor has an empty shard of results with the factor, and the
# neutral element of a reduction over it; so the rule gives the rank's results for every op, without its kernel


def may_lack(node: Node, mesh: Mesh) -> bool:
    """Whether some rank may have an empty shard of a node's tensor."""
    made = node.strategy
    if made is None:
        return False
    pairs = (*zip(node.operands, made.operands, strict=False), *zip(node.outs, made.results, strict=False))
    return any(_may_lack(spec, value.shape, mesh) for value, spec in pairs)


def _may_lack(spec: Spec, shape: Sequence[int], mesh: Mesh) -> bool:
    for sharding, size in zip(spec.dims, shape, strict=True):
        if sharding.axes and size > 0:
            small = any(part.size < mesh.extent(part.axes) for part in sharding.sub(size))
            if small or sharding.rows is not None:
                return True
    return False


def results_of_empty_shard(rule: ShardingRule | None, emit: Emit) -> Any:
    """A call that creates a rank's results if its shard of a sharded factor is empty; None if no shard is empty, or if
    a result is neither empty nor reduced."""
    lost = _lacking(rule, emit) if rule is not None else frozenset[str]()
    if rule is None or not lost or not emit.node.operands:
        return None
    shapes, values, dtypes = [], [], []
    for i, (value, kind) in enumerate(zip(emit.node.results, rule.reductions, strict=True)):
        shape, dtype = [0], emit.node.outs[0].type.dtype
        if value is not None:
            shape, dtype = list(emit.result_shape(emit.node.outs.index(value))), value.type.dtype
            if 0 not in shape and (kind == SAME or any(i in rule.unread.get(f, ()) for f in lost)):
                return None
        shapes.append(shape)
        values.append(_neutral(kind, dtype))
        dtypes.append(dtype)
    pairs = zip(tree_leaves(emit.node.args), tree_leaves(emit.args), strict=True)
    like = next((written for arg, written in pairs if isinstance(arg, Value)), None)
    if len(shapes) == 1 and not gives_list(emit.node.op):
        return emit.call(aten.new_full.default, like, shapes[0], values[0], dtype=dtypes[0])
    flat, dims = [n for shape in shapes for n in shape], [len(shape) for shape in shapes]
    return emit.call(torch.ops.shardfx.no_share.default, like, flat, dims, dtypes, values)


def _lacking(rule: ShardingRule, emit: Emit) -> frozenset[str]:
    """The sharded factors of which this rank's shard is empty."""
    node, found = emit.node, set[str]()
    assert node.strategy is not None
    shared = {factor for factor, axes in node.strategy.shardings if axes}
    made = [dims for dims in rule.results if dims is not None]
    for values, specs, tensors, shape in (
        (node.operands, node.strategy.operands, rule.operands, emit.operand_shape),
        (node.outs, node.strategy.results, made, emit.result_shape),
    ):
        for i, (value, spec, dims) in enumerate(zip(values, specs, tensors, strict=True)):
            if 0 in value.shape or not _may_lack(spec, value.shape, emit.mesh):
                continue
            for stored, factors in zip(shape(i), dims, strict=True):
                if stored == 0:
                    found.update(shared.intersection(factors))
    return frozenset(found)


def _neutral(kind: str, dtype: torch.dtype) -> float:
    """The neutral element of a reduction."""
    if kind in ("max", "min") and dtype is not torch.bool:
        most = math.inf if dtype.is_floating_point else float(torch.iinfo(dtype).max)
        return -most if kind == "max" else most
    return float(kind in ("product", "min"))
