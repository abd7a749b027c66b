"""Writing into a tensor at places that an index names.

The dims that are written to are whole. Where values are *added*, the index may be cut all the same: each rank adds
what it has, the first one to the tensor and the others to zeros, and the sum over the ranks is the answer. So
the gradient of a lookup may be cut as the lookup is.
"""

from __future__ import annotations

from typing import Any

import torch

from shardfx.ir.graph import Node
from shardfx.ir.rulebook.dims import argument, names
from shardfx.ir.rules.book import RuleEntry, replicated, rule
from shardfx.ir.rules.local import Emit
from shardfx.ir.rules.sharding_rule import Dim, ShardingRule

aten = torch.ops.aten

BOTH = (frozenset({0, 1}),)


def scatter(node: Node) -> ShardingRule:
    """``x[d..], index[i, d..], src[i, d..] -> y[d..]``: the scattered dim of x is whole, i is if nothing is added."""
    x = node.operands[0].shape
    if not x:
        return replicated(node)
    dim = node.args[1] % len(x)
    dims, sizes = names(x)
    whole: set[str] = {f"d{dim}"}
    index, *src = node.operands[1:]
    short: list[Dim] = list(dims) if index.shape else []
    for i, size in enumerate(index.shape):
        if i == dim or size != x[i]:
            sizes[f"i{i}"] = size
            short[i] = (f"i{i}",)
            whole.add(f"d{i}")
            if i != dim or not adds(node) or any(v.shape != index.shape for v in src):
                whole.add(f"i{i}")
    operands: list[tuple[Dim, ...]] = [tuple(dims), tuple(short)]
    for t, value in enumerate(src):
        own: list[Dim] = []
        for i, size in enumerate(value.shape):
            fits = size == index.shape[i]
            own.append(short[i] if fits else (f"s{t}_{i}",))
            if not fits:
                sizes[f"s{t}_{i}"] = size
                whole |= {f"s{t}_{i}", *short[i]}
        operands.append(tuple(own))
    return ShardingRule(tuple(operands), (tuple(dims),), sizes, frozenset(whole), _linear(node))


def adds(node: Node) -> bool:
    """Whether values are added to what is there."""
    if argument(node, "accumulate"):
        return True
    return node.op.overloadpacket in (aten.scatter_add, aten.index_add)


def _linear(node: Node) -> tuple[frozenset[int], ...]:
    """Tensor and values may be partial sums together, unless more than moved or added."""
    packet = node.op.overloadpacket
    if packet in (aten.scatter_reduce, aten.index_reduce):
        return (frozenset({0, 2}),) if argument(node, "reduce") in ("sum", "mean") else ()
    last = len(node.operands) - 1
    value = argument(node, "value")
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return (frozenset({0}),) if value == 0 else ()
    return (frozenset({0, last}),)


def add_once(emit: Emit) -> Any:
    """What is added to is added by the rank that holds the first part of the index; the others add to zeros."""
    if not any(_index_starts(emit)):
        return emit.call(emit.node.op, *emit.args, **emit.kwargs)
    zeros = emit.call(aten.zeros_like.default, emit.args[0])
    return emit.call(emit.node.op, zeros, *emit.args[1:], **emit.kwargs)


def _index_starts(emit: Emit) -> list[int]:
    """Where this rank's part of the values begins, in the dims that the tensor has not."""
    makers = {aten.index_put: index_put, aten._unsafe_index_put: index_put, aten.index_add: index_write}
    made = makers.get(emit.node.op.overloadpacket, scatter)(emit.node)
    own = {f for dim in made.operands[0] for f in dim}
    starts = []
    for t, dims in enumerate(made.operands[1:], 1):
        for d, dim in enumerate(dims):
            if any(f not in own for f in dim):
                starts.append(emit.operand_bounds(t, d)[0])
    return starts


def index_put(node: Node) -> ShardingRule:
    """``x[i!, d..], index[n..], values[n.., d..] -> y[i!, d..]``; n is whole if nothing is added."""
    x, values = node.operands[0].shape, node.operands[-1].shape
    indices = node.args[1]
    at = [i for i, index in enumerate(indices) if index is not None]
    if len(at) == 1 and indices[at[0]].type.dtype is torch.bool:
        return masked_put(node, at[0], indices[at[0]].shape)
    if not at or any(indices[i].type.dtype in (torch.bool, torch.uint8) for i in at):
        return replicated(node)
    kept = [i for i in range(len(x)) if i not in at]
    shape = torch.broadcast_shapes(*(indices[i].shape for i in at))
    dims, sizes = names(x)
    index_dims, index_sizes = names(shape, "i")
    sizes.update(index_sizes)
    together = at == list(range(at[0], at[0] + len(at)))
    lead = [i for i in kept if i < at[0]] if together else []
    full = [*(dims[i] for i in lead), *index_dims, *(dims[i] for i in kept if i not in lead)]
    extent = [sizes[d[0]] for d in full]
    skip = len(full) - len(values)
    if skip < 0:
        return replicated(node)
    operands: list[tuple[Dim, ...]] = [tuple(dims)]
    for i in at:
        own = indices[i].shape
        gap = len(shape) - len(own)
        operands.append(tuple(() if s == 1 and shape[gap + j] != 1 else index_dims[gap + j] for j, s in enumerate(own)))
    operands.append(tuple(() if s == 1 and extent[skip + j] != 1 else full[skip + j] for j, s in enumerate(values)))
    whole = {f"d{i}" for i in at}
    if not adds(node):
        whole |= set(index_sizes)
    last = len(node.operands) - 1
    return ShardingRule(tuple(operands), (tuple(dims),), sizes, frozenset(whole), (frozenset({0, last}),))


def masked_put(node: Node, at: int, mask: tuple[int, ...]) -> ShardingRule:
    """``x[.., mask, ..] = v``: v has one value for all that is masked, or the masked dims are whole."""
    x, values = node.operands[0].shape, node.operands[-1].shape
    dims, sizes = names(x)
    full = [*dims[:at], None, *dims[at + len(mask) :]]
    given: list[Dim] = []
    whole = frozenset[str]()
    for own, size in zip(full[len(full) - len(values) :], values, strict=True):
        if own is None and size != 1:
            sizes["masked"] = size
            own = ("masked",)
            whole = frozenset({"masked", *(f"d{at + i}" for i in range(len(mask)))})
        given.append(() if size == 1 or own is None else own)
    operands = (tuple(dims), tuple(dims[at : at + len(mask)]), tuple(given))
    return ShardingRule(operands, (tuple(dims),), sizes, whole, (frozenset({0, 2}),))


def index_write(node: Node) -> ShardingRule:
    """``x[d.., i!], index[n], values[d.., n] -> y``: index_add, index_copy, index_fill, index_reduce."""
    x = node.operands[0].shape
    if not x:
        return replicated(node)
    dim = node.args[1] % len(x)
    dims, sizes = names(x)
    sizes["n"] = node.operands[1].type.numel
    whole = {f"d{dim}"}
    index: tuple[Dim, ...] = (("n",),) * node.operands[1].type.ndim
    operands: list[tuple[Dim, ...]] = [tuple(dims), index]
    for value in node.operands[2:]:
        operands.append(tuple(("n",) if i == dim else n for i, n in enumerate(dims)) if value.shape else ())
    if not adds(node) or not index:
        whole.add("n")
    return ShardingRule(tuple(operands), (tuple(dims),), sizes, frozenset(whole), _linear(node))


def written(node: Node) -> ShardingRule:
    """``select_scatter``, ``slice_scatter``: the dim that is written to is whole."""
    x, src = node.operands[0].shape, node.operands[1].shape
    dim = int(argument(node, "dim")) % len(x)
    dims, sizes = names(x)
    part: list[Dim] = [n for i, n in enumerate(dims) if i != dim]
    whole = {f"d{dim}"}
    if len(src) == len(x):
        sizes["s"] = src[dim]
        part.insert(dim, ("s",))
        whole.add("s")
    return ShardingRule((tuple(dims), tuple(part)), (tuple(dims),), sizes, frozenset(whole), BOTH, moves_only=True)


def flat(node: Node) -> ShardingRule:
    """Ops that count through all elements: nothing is cut, but tensor and values may be partial sums together."""
    base = replicated(node)
    floats = [i for i, value in enumerate(node.operands) if value.type.dtype.is_floating_point]
    return ShardingRule(base.operands, base.results, base.sizes, base.whole, (frozenset(floats),))


def take(node: Node) -> ShardingRule:
    """The whole of x is looked up, flat; the index may be cut."""
    x, index = (value.shape for value in node.operands)
    dims, sizes = names(x)
    places, more = names(index, "i")
    whole = frozenset(sizes)
    return ShardingRule((tuple(dims), tuple(places)), (tuple(places),), {**sizes, **more}, whole, (frozenset({0}),))


def masked_index(node: Node) -> ShardingRule:
    """``x[indices]`` where a mask says so, else a number."""
    x, mask = node.operands[0].shape, node.operands[1].shape
    indices = node.args[2]
    at = [i for i, index in enumerate(indices) if index is not None]
    if len(at) != len(x):
        return replicated(node)
    shape = node.outs[0].shape
    dims, sizes = names(x)
    result, more = names(shape, "i")

    def lying(own: tuple[int, ...]) -> tuple[Dim, ...]:
        gap = len(shape) - len(own)
        return tuple(() if s == 1 and shape[gap + j] != 1 else result[gap + j] for j, s in enumerate(own))

    operands = (tuple(dims), lying(mask), *(lying(indices[i].shape) for i in at))
    linear = (frozenset({0}),) if argument(node, "fill") == 0 else ()
    return ShardingRule(operands, (tuple(result),), {**sizes, **more}, frozenset(sizes), linear)


RULES: tuple[RuleEntry, ...] = (
    rule((aten.scatter.src, aten.scatter.value, aten.scatter_reduce.two), scatter),
    rule(aten.scatter_add, scatter, local=add_once),
    rule((aten.index_put, aten._unsafe_index_put), index_put, local=add_once),
    rule(aten.index_add, index_write, local=add_once),
    rule((aten.index_copy, aten.index_fill, aten.index_reduce), index_write),
    rule((aten.select_scatter, aten.slice_scatter), written),
    rule(aten.take, take),
    rule(aten._unsafe_masked_index, masked_index),
    rule((aten.put, aten.masked_scatter, aten._unsafe_masked_index_put_accumulate), flat),
    rule((aten.diagonal_scatter, aten.as_strided_scatter), flat),
    rule(aten.masked_scatter_backward, flat),
)
