"""Writing into a tensor at places that an index names.

The dims that are written to are whole. Where values are *added*, the index may be sharded all the same: each rank adds
what it has, the first one to the tensor and the others to zeros, and the sum over the ranks is the answer. So
the gradient of a lookup may be sharded as the lookup is.
"""

from __future__ import annotations

from typing import Any

import torch

from shardfx.ir.graph import Node, Value
from shardfx.ir.rulebook.dims import argument, given_tensors, indexed, packed, untouched, words
from shardfx.ir.rules.book import RuleEntry, replicated, rule
from shardfx.ir.rules.local import Emit, add_once
from shardfx.ir.rules.sharding_rule import ShardingRule
from shardfx.ir.rules.template import Template, template

aten = torch.ops.aten
REDUCED = (aten.scatter_reduce, aten.index_reduce)
"""Ops that reduce values with what is there, by their argument ``reduce``."""
EXTREMES = {"amax": "max", "amin": "min"}


def scatter(node: Node) -> ShardingRule | Template:
    """``x[d..], index[i, d..], src[i, d..] -> y[d..]``: the scattered dim of x is whole, i is if nothing is added."""
    x, index, *src = (value.shape for value in node.operands)
    if not x:
        return replicated(node, together(node))
    dim = argument(node, "dim") % len(x)
    shared = [size == x[i] and i != dim for i, size in enumerate(index)]
    whole = {f"d{i}" for i, each in enumerate(shared) if not each} | {f"d{dim}"}
    other = not (adds(node) or takes_extreme(node)) or any(each != index for each in src)
    whole |= {f"i{i}" for i in range(len(index)) if i != dim or other}
    part = [f"d{i}" if each else f"i{i}" for i, each in enumerate(shared)]
    values = []
    for given in src:
        fits = [size == index[i] for i, size in enumerate(given)]
        values.append([part[i] if each else f"s{i}!" for i, each in enumerate(fits)])
        whole |= {part[i] for i, each in enumerate(fits) if not each}
    tensors = [words((f"d{i}" for i in range(len(x))), whole), words(part, whole), *(words(v, whole) for v in values)]
    free = f"i{dim}" not in whole
    kind = EXTREMES.get(argument(node, "reduce"), "sum")
    return template(f"{', '.join(tensors)} -> {tensors[0]}", together(node, "i" if free else ""), kind)


def adds(node: Node) -> bool:
    """Whether values are added to what is there."""
    packet = node.op.overloadpacket
    if packet in REDUCED:
        return argument(node, "reduce") == "sum" and includes_self(node)
    return bool(argument(node, "accumulate")) or packet in (aten.scatter_add, aten.index_add)


def takes_extreme(node: Node) -> bool:
    """Whether the largest or the smallest of the values and of what is there stays."""
    return argument(node, "reduce") in EXTREMES and includes_self(node)


def includes_self(node: Node) -> bool:
    """Whether what is there counts among the values that are reduced."""
    return bool(argument(node, "include_self"))


def together(node: Node, index: str = "") -> str:
    """Tensor and values may be partial sums together, unless more than moved or added; the tensor alone, where each
    rank adds a part of the values to it: over the axes that shard the dims of the ``index``.
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
    """``x[i!, d..], index[n..], values[n.., d..] -> y[i!, d..]``; n is whole if nothing is added."""
    indices, values = argument(node, "indices"), node.operands[-1].shape
    linear = f"0&{len(given_tensors(node)) - 1}{'|0*i' if adds(node) else ''}"
    masks = [i for i, each in enumerate(indices) if each is not None and each.type.dtype is torch.bool]
    if masks and sum(each is not None for each in indices) == 1:
        return template(masked(node, masks[0]), linear)
    found = indexed(node, "d", "" if adds(node) else "!")
    if found is None or len(values) > len(found.result):
        return replicated(node)
    return template(f"{found.table}, {found.indices}, ~{words(found.result)} -> {found.table}", linear)


def put(node: Node) -> ShardingRule | Template:
    """``x[d..], index[i..], values[i..] -> y[d..]``, at places in all of x; i is whole if nothing is added."""
    x, index, values = (value.shape for value in node.operands)
    if not adds(node) or index != values:
        return untouched(node)
    table, places = words(f"d{i}!" for i in range(len(x))), words(f"i{i}" for i in range(len(index)))
    return template(f"{table}, {places}, {places} -> {table}", "0&2|0*i")


def masked_index_put(node: Node) -> ShardingRule | Template:
    """``x[indices] += values`` where a mask says so, of indices by which each dim is named."""
    found = indexed(node, "d")
    if found is None or found.kept:
        return untouched(node)
    made = words(found.result)
    last = len(given_tensors(node)) - 1
    return template(f"{found.table}, ~{made}, {found.indices}, ~{made} -> {found.table}", f"0&{last}|0*i")


def masked(node: Node, at: int) -> str:
    """``x[.., mask, ..] = v``: v has one value for all that is masked, or the masked dims are whole."""
    x, values = (node.operands[i].type.ndim for i in (0, -1))
    mask = argument(node, "indices")[at].type.ndim
    dims = [f"d{i}" for i in range(x)]
    full = [*dims[:at], "m!", *dims[at + mask :]]
    place = at - len(full) + values
    each = place >= 0 and node.operands[-1].shape[place] != 1
    if not each:
        full[at] = "1"
    whole = set(dims[at : at + mask]) if each else set()
    given = ", ".join(["~"] * at + [words(dims[at : at + mask], whole)])
    return f"{words(dims, whole)}, {given}, ~{words(full)} -> {words(dims, whole)}"


def added(emit: Emit) -> Any:
    """Values are added to one rank's tensor; the largest or smallest are taken of every rank's."""
    return add_once(emit) if adds(emit.node) else emit.call(emit.node.op, *emit.args, **emit.kwargs)


RULES: tuple[RuleEntry, ...] = (
    rule((aten.scatter.src, aten.scatter.value), scatter),
    rule((aten.scatter_add, aten.scatter_reduce.two), scatter, local=added),
    rule((aten.index_put, aten._unsafe_index_put), index_put, local=add_once),
    rule((aten.index_add, aten.index_reduce), index_write, local=added),
    rule((aten.index_copy, aten.index_fill), index_write),
    rule(aten.put, put, local=add_once),
    rule((aten.masked_scatter, aten.masked_scatter_backward), untouched),
    rule(aten._unsafe_masked_index_put_accumulate, masked_index_put, local=add_once),
    packed(aten.as_strided_scatter, untouched),
)
