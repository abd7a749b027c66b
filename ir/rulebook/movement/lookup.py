"""Lookups (embedding, gather, index, isin, searchsorted), and their gradients: scatter, index_put.

If the dim that is looked up is sharded, each rank looks up the indices in its own range and gives zeros for the
rest: the sum over the ranks is the result. That is the vocabulary-parallel embedding of Megatron-LM
(Shoeybi et al., 2019), here for every op of the kind.

The dims that are written to are replicated. If values are *added*, the index may be sharded nevertheless: each rank
adds its own values, the first one to the tensor and the others to zeros, and the sum over the ranks is the result. So
the gradient of a lookup may be sharded as the lookup is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from shardfx.ir.graph import Node, Value
from shardfx.ir.rulebook.dims import argument, at_dim, checked, given_tensors, packed, words
from shardfx.ir.rules.book import RuleEntry, replicated, rule
from shardfx.ir.rules.local import Emit, add_once, mine, nothing, others_zero
from shardfx.ir.rules.sharding_rule import ShardingRule
from shardfx.ir.rules.template import Template, has_argument, template

aten = torch.ops.aten


def untouched(node: Node) -> ShardingRule:
    """The rule of an op that counts through all elements: replicated, but all floats may be partial sums together."""
    floats = [str(i) for i, value in enumerate(node.operands) if value.type.dtype.is_floating_point]
    return replicated(node, "&".join(floats))


class Indexed(NamedTuple):
    """``x[indices]``: the templates of x and of the indices, the factors of the result, the unindexed dims of x."""

    table: str
    indices: str
    result: list[str]
    kept: list[int]


def indexed(node: Node, letter: str, mark: str = "") -> Indexed | None:
    """Templates in which indexed dims are replicated, and the (broadcast) dims of the indices free; None for masks.

    Args:
        letter: the prefix of factors of x.
        mark: ``!`` if the dims of the indices are replicated.
    """
    indices = argument(node, "indices")
    at = [i for i, index in enumerate(indices) if index is not None]
    if not at or any(indices[i].type.dtype in (torch.bool, torch.uint8) for i in at):
        return None
    ndim = len(torch.broadcast_shapes(*(indices[i].shape for i in at)))
    kept = [i for i in range(node.operands[0].type.ndim) if i not in at]
    first = [i for i in kept if i < at[0]] if at == list(range(at[0], at[0] + len(at))) else []
    own = [f"i{j}{mark}" for j in range(ndim)]
    result = [*(f"{letter}{i}" for i in first), *own, *(f"{letter}{i}" for i in kept if i not in first)]
    table = words((f"{letter}{i}" for i in range(node.operands[0].type.ndim)), {f"{letter}{i}" for i in at})
    return Indexed(table, ", ".join("~" if each is None else f"~{words(own)}" for each in indices), result, kept)


def own_part(at: int, *, rows: bool = False) -> Callable[[Emit], Any]:
    """The ``local`` function of an op that looks up its argument number ``at`` in one dim of its first operand."""

    def local(emit: Emit) -> Any:
        x = emit.node.operands[0]
        dim = 0 if rows else at_dim(emit, x)
        shard = emit.operand_shard(0, dim) if x.shape else None
        if shard is None or shard.is_full:
            return emit.call(emit.node.op, *emit.args, **emit.kwargs)
        if shard.length == 0:
            return nothing(emit, emit.args[0])
        index, outside = mine(emit, checked(emit, emit.args[at], x.shape[dim]), shard)
        return others_zero(emit, emit.call(emit.node.op, *emit.args[:at], index), outside, rows=rows)

    return local


def embedding_backward_local(emit: Emit) -> Any:
    """The gradient of this rank's rows of an embedding."""
    shard = emit.result_shard(0, 0)
    grad, index, _, padding, scale = emit.args[:5]
    if shard.is_full:
        return emit.call(emit.node.op, *emit.args)
    if shard.length == 0:
        return nothing(emit, grad)
    local, outside = mine(emit, index, shard)
    if padding >= 0:
        outside = emit.call(aten.logical_or.default, outside, emit.call(aten.eq.Scalar, index, padding))
    masked = others_zero(emit, grad, outside, rows=True)
    if not scale:
        return emit.call(aten.embedding_dense_backward.default, masked, local, shard.length, -1, False)
    local = emit.call(aten.masked_fill.Scalar, local, outside, shard.length)  # a row more, for what counts nowhere here
    rows = emit.call(aten.embedding_dense_backward.default, masked, local, shard.length + 1, -1, True)
    return emit.call(aten.slice.Tensor, rows, 0, 0, shard.length)


def gather(node: Node) -> ShardingRule | str:
    """``x[v, n..], index[i, n..] -> y[i, n..]`` at the gathered dim; v is looked up."""
    x, index = (value.shape for value in node.operands)
    if not x:
        return replicated(node, "0")
    dim = argument(node, "dim") % len(x)
    other = [i for i in range(len(x)) if x[i] != index[i] and i != dim]
    table = (f"v{i}!" if i in other else f"v{i}" if i == dim else f"d{i}" for i in range(len(x)))
    result = words(f"d{i}!" if i in other else f"d{i}" for i in range(len(x)))
    return f"{words(table)}, {result} -> {result}"


def index_tensor(node: Node) -> str | None:
    """``x[i, j]``: indexed dims are replicated, the dims of the (broadcast) index and the other dims may be sharded."""
    found = indexed(node, "x")
    return f"{found.table}, {found.indices} -> {words(found.result)}" if found is not None else None


def isin(node: Node) -> Template:
    """Membership in a table is the maximum (or, inverted, the minimum) over the shards of the table."""
    return template("d.., t.. -> d..", reduce="min" if argument(node, "invert") else "max")


def searchsorted(node: Node) -> str:
    """One table for all, or one per row; it is replicated, as the position among sorted numbers depends on all."""
    table, x = (value.type.ndim for value in node.operands[:2])
    return "t!, d.., t! -> d.." if table == 1 and x != 1 else "d.. t!, d.. k, d.. t! -> d.. k"


def histc(node: Node) -> str:
    """Counts are sums over the shards, unless the bins depend on the values."""
    return "d.. -> bins!" if argument(node, "min") != argument(node, "max") else "d..! -> bins!"


# ---- writing into a tensor at places that an index names -------------------------------------------------------------


ADDING = (aten.scatter_add, aten.index_add, aten._unsafe_masked_index_put_accumulate)
REDUCED = (aten.scatter_reduce, aten.index_reduce)
"""Ops that reduce values with the tensor's own, by their argument ``reduce``."""
EXTREMES = {"amax": "max", "amin": "min"}


def scatter(node: Node) -> ShardingRule | Template:
    """``x[d..], index[i, d..], src[i, d..] -> y[d..]``: the scattered dim is replicated, and i unless values add up."""
    x, index, *src = (value.shape for value in node.operands)
    if not x:
        return replicated(node, together(node))
    dim = argument(node, "dim") % len(x)
    shared = [size == x[i] and i != dim for i, size in enumerate(index)]
    full = {f"d{i}" for i, each in enumerate(shared) if not each} | {f"d{dim}"}
    other = not (adds(node) or takes_extreme(node)) or any(each != index for each in src)
    own = [f"i{i}" if i == dim else f"j{i}" for i in range(len(index))]
    full |= {own[i] for i in range(len(index)) if i != dim or other}
    part = [f"d{i}" if each else own[i] for i, each in enumerate(shared)]
    values = []
    for operand in src:
        fits = [size == index[i] for i, size in enumerate(operand)]
        values.append([part[i] if each else f"s{i}!" for i, each in enumerate(fits)])
        full |= {part[i] for i, each in enumerate(fits) if not each}
    tensors = [words((f"d{i}" for i in range(len(x))), full), words(part, full), *(words(v, full) for v in values)]
    free = f"i{dim}" not in full
    kind = EXTREMES.get(argument(node, "reduce"), "sum")
    return template(f"{', '.join(tensors)} -> {tensors[0]}", together(node, "i" if free else ""), kind)


def adds(node: Node) -> bool:
    """Whether values are added to the tensor's own."""
    packet = node.op.overloadpacket
    if packet in REDUCED:
        return argument(node, "reduce") == "sum" and includes_self(node)
    return bool(argument(node, "accumulate")) or packet in ADDING


def takes_extreme(node: Node) -> bool:
    """Whether the op takes the maximum or minimum of the values and the tensor's own."""
    return argument(node, "reduce") in EXTREMES and includes_self(node)


def includes_self(node: Node) -> bool:
    """Whether the tensor's own elements are included in the reduction."""
    return bool(argument(node, "include_self"))


def together(node: Node, index: str = "") -> str:
    """The operands that may be partial: tensor and values together, if they are moved or added; the tensor alone, if
    each rank adds its own values to it: over the axes that shard the dims of the ``index``.
    """
    return "|".join(filter(None, (_together(node), f"0*{index}" if index and adds(node) else "")))


def _together(node: Node) -> str:
    if node.op.overloadpacket in REDUCED:
        product = "0>0" if argument(node, "reduce") == "prod" and includes_self(node) else ""
        return "0&2" if argument(node, "reduce") in ("sum", "mean") else product
    value = argument(node, "value")
    number = value is not None and not isinstance(value, Value)
    return "0&2" if not number else "0" if value == 0 else ""


def index_write(node: Node) -> Template:
    """``x[d.., i!], index[n], values[d.., n] -> y``: index_add, index_copy, index_fill, index_reduce."""
    index = "~n" if (adds(node) or takes_extreme(node)) and node.operands[1].shape else "~n!"
    kind = EXTREMES.get(argument(node, "reduce"), "sum")
    values = ("d.. n@dim" if value.shape else "~" for value in node.operands[2:])
    return template(f"{', '.join(['d.. v@dim!', index, *values])} -> d.. v@dim", together(node, "n"), kind)


def index_put(node: Node) -> ShardingRule | Template:
    """``x[i!, d..], index[n..], values[n.., d..] -> y[i!, d..]``; n is replicated unless values are added. A mask
    ``[n..]`` may select the values, if each dim has an index."""
    indices, values = argument(node, "indices"), node.operands[-1].shape
    linear = f"0&{len(given_tensors(node)) - 1}{'|0*i' if adds(node) else ''}"
    masks = [i for i, each in enumerate(indices) if each is not None and each.type.dtype is torch.bool]
    if masks and sum(each is not None for each in indices) == 1:
        return template(masked(node, masks[0]), linear)
    found = indexed(node, "d", "" if adds(node) else "!")
    where = has_argument(node.op, "mask")
    if found is None or len(values) > len(found.result) or (where and found.kept):
        return replicated(node)
    made = f"~{words(found.result)}"
    chosen = f"{made}, {found.indices}" if where else found.indices
    return template(f"{found.table}, {chosen}, {made} -> {found.table}", linear)


def masked(node: Node, at: int) -> str:
    """``x[.., mask, ..] = v``: v has one value for all masked elements, or the masked dims are replicated."""
    x, values = (node.operands[i].type.ndim for i in (0, -1))
    mask = argument(node, "indices")[at].type.ndim
    dims = [f"d{i}" for i in range(x)]
    full = [*dims[:at], "m!", *dims[at + mask :]]
    place = at - len(full) + values
    each = place >= 0 and node.operands[-1].shape[place] != 1
    if not each:
        full[at] = "1"
    entire = set(dims[at : at + mask]) if each else set()
    mask_dims = ", ".join(["~"] * at + [words(dims[at : at + mask], entire)])
    return f"{words(dims, entire)}, {mask_dims}, ~{words(full)} -> {words(dims, entire)}"


def added(emit: Emit) -> Any:
    """Add values to one rank's tensor; a maximum or minimum is taken of every rank's."""
    return add_once(emit) if adds(emit.node) else emit.call(emit.node.op, *emit.args, **emit.kwargs)


RULES: tuple[RuleEntry, ...] = (
    rule(aten.embedding.default, "v d, n.. -> n.. d", linear="0", local=own_part(1, rows=True)),
    # Where gradients are divided by how often an index occurs, n is replicated.
    rule(
        aten.embedding_dense_backward.default,
        "n..!scale_grad_by_freq d, n.. -> v d",
        linear="0",
        local=embedding_backward_local,
    ),
    rule(aten.gather.default, gather, linear="0", local=own_part(2)),
    rule(aten.index.Tensor, index_tensor, linear="0", moves_only=True),
    rule(aten.index_select.default, "d.. v@dim!, ~i -> d.. i@dim", linear="0"),
    rule(aten.take, "x..!, i.. -> i..", linear="0"),
    rule(aten.isin.Tensor_Tensor, isin),
    rule(aten.bucketize.Tensor, "d.., t! -> d.."),
    rule(aten.searchsorted.Tensor, searchsorted),
    rule(aten.histc, histc),
    rule(aten.nonzero_static, "d..! -> k! n!"),
    rule(aten.repeat_interleave.Tensor, "d! -> k!"),
    rule((aten.scatter.src, aten.scatter.value), scatter),
    rule((aten.scatter_add, aten.scatter_reduce.two), scatter, local=added),
    rule((aten.index_put, aten._unsafe_index_put, aten._unsafe_masked_index_put_accumulate), index_put, local=add_once),
    rule((aten.index_add, aten.index_reduce), index_write, local=added),
    rule((aten.index_copy, aten.index_fill), index_write),
    rule((aten.masked_scatter, aten.masked_scatter_backward), untouched),
    packed(aten.as_strided_scatter, untouched),
)
