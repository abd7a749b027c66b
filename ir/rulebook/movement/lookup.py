"""Lookups: embedding, gather, index; what is in a table, and where in a sorted one.

Where the dim that is looked up is sharded, each rank finds what lies in its own range and gives nothing for the
rest: the sum over the ranks is the answer. That is the vocabulary-parallel embedding of Megatron-LM
(Shoeybi et al., 2019), here for every op of the kind.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shardfx.ir.graph import Node
from shardfx.ir.rulebook.dims import argument, at_dim, checked, given_tensors, indexed, packed, words
from shardfx.ir.rules.book import RuleEntry, replicated, rule
from shardfx.ir.rules.local import Emit, mine, nothing, others_zero
from shardfx.ir.rules.sharding_rule import SAME, ShardingRule
from shardfx.ir.rules.template import Template, template

aten = torch.ops.aten


def own_part(at: int, *, rows: bool = False) -> Callable[[Emit], Any]:
    """The local call of an op that looks up its argument number ``at`` in one dim of its first operand."""

    def local(emit: Emit) -> Any:
        x = emit.node.operands[0]
        dim = 0 if rows else at_dim(emit, x)
        held = emit.operand_shard(0, dim) if x.shape else None
        if held is None or held.is_whole:
            return emit.call(emit.node.op, *emit.args, **emit.kwargs)
        if held.length == 0:
            return nothing(emit, emit.args[0])
        index, outside = mine(emit, checked(emit, emit.args[at], x.shape[dim]), held)
        return others_zero(emit, emit.call(emit.node.op, *emit.args[:at], index), outside, rows=rows)

    return local


def embedding_backward_local(emit: Emit) -> Any:
    """The gradient of the rank's own rows."""
    held = emit.result_shard(0, 0)
    grad, index, _, padding, scale = emit.args[:5]
    if held.is_whole:
        return emit.call(emit.node.op, *emit.args)
    if held.length == 0:
        return nothing(emit, grad)
    local, outside = mine(emit, index, held)
    masked = others_zero(emit, grad, outside, rows=True)
    inside = held.find(padding)
    own_padding = -1 if inside is None else inside
    if not scale:
        return emit.call(aten.embedding_dense_backward.default, masked, local, held.length, own_padding, False)
    local = emit.call(aten.masked_fill.Scalar, local, outside, held.length)  # a row more, for what counts nowhere here
    rows = emit.call(aten.embedding_dense_backward.default, masked, local, held.length + 1, own_padding, True)
    return emit.call(aten.slice.Tensor, rows, 0, 0, held.length)


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
    """``x[i, j]``: indexed dims are whole, the dims of the (broadcast) index and the other dims may be sharded."""
    found = indexed(node, "x")
    return f"{found.table}, {found.indices} -> {words(found.result)}" if found is not None else None


def masked_index(node: Node) -> ShardingRule | Template:
    """``x[indices]`` where a mask says so, else a number."""
    found = indexed(node, "d")
    if found is None or found.kept:
        return replicated(node)
    result = words(found.result)
    return template(
        f"{found.table}, ~{result}, {found.indices} -> {result}", "0" if argument(node, "fill") == 0 else ""
    )


def isin(node: Node) -> Template:
    """What is in any part of a table is in it."""
    return template("d.., t.. -> d..", reduce="min" if argument(node, "invert") else "max")


def searchsorted(node: Node) -> str:
    """One table for all, or one for each row; a place among sorted numbers needs all of them."""
    table, x = (value.type.ndim for value in node.operands[:2])
    return "t!, d.., t! -> d.." if table == 1 and x != 1 else "d.. t!, d.. k, d.. t! -> d.. k"


def histc(node: Node) -> str:
    """Counts add up, if the bins do not depend on the values."""
    return "d.. -> bins!" if argument(node, "min") != argument(node, "max") else "d..! -> bins!"


def embedding_bag(node: Node) -> Template:
    """``w[v!, d], ... -> y[b!, d]`` and what the bags are, which every rank has; d may be sharded."""
    columns = node.operands[0].shape[1]
    results = (
        f"r{i}! d" if len(value.shape) == 2 and value.shape[1] == columns else f"r{i}_..!"
        for i, value in enumerate(node.outs)
    )
    text = f"v! d, {', '.join(f'o{i}!' for i in range(len(given_tensors(node)) - 1))} -> {', '.join(results)}"
    return template(text, "0>0|3>0" if argument(node, "mode") in (0, 1) else "", SAME)


def embedding_bag_backward(node: Node) -> Template:
    """The gradient of the table, by what bag each index is in: the indices may be sharded, as counts and maxima may
    not."""
    summed = argument(node, "mode") in (0, 1) and not argument(node, "scale_grad_by_freq")
    i = "i" if summed else "i!"
    most = node.operands[5]
    weighted = len(node.operands) > 6
    text = f"b! d, {i}, o!, {i}, s!, {'b! d' if most.shape == node.operands[0].shape else 'm..!'}, {i} -> v! d"
    return template(text, "0|6" if weighted else "0")


RULES: tuple[RuleEntry, ...] = (
    rule(aten.embedding.default, "v d, n.. -> n.. d", linear="0", local=own_part(1, rows=True)),
    # Where gradients are divided by how often an index occurs, n is whole.
    rule(
        aten.embedding_dense_backward.default,
        "n..!scale_grad_by_freq d, n.. -> v d",
        linear="0",
        local=embedding_backward_local,
    ),
    packed((aten._embedding_bag, aten._embedding_bag_forward_only), embedding_bag),
    packed(aten._embedding_bag_per_sample_weights_backward, "b! d, v! d, i, o!, i -> i", linear="0|1"),
    packed(aten._embedding_bag_backward, embedding_bag_backward),
    rule(aten.gather.default, gather, linear="0", local=own_part(2)),
    rule(aten.index.Tensor, index_tensor, linear="0", moves_only=True),
    rule(aten.index_select.default, "d.. v@dim!, ~i -> d.. i@dim", linear="0"),
    rule(aten.take, "x..!, i.. -> i..", linear="0"),
    rule(aten._unsafe_masked_index, masked_index),
    rule(aten.isin.Tensor_Tensor, isin),
    rule(aten.bucketize.Tensor, "d.., t! -> d.."),
    rule(aten.searchsorted.Tensor, searchsorted),
    rule(aten.histc, histc),
    rule(aten.nonzero_static, "d..! -> k! n!"),
    rule(aten.repeat_interleave.Tensor, "d! -> k!"),
)
