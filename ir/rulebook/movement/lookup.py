"""Lookups: embedding, gather, index, and the loss over class indices.

Where the dim that is looked up is cut, each rank finds what lies in its own range and gives nothing for the
rest: the sum over the ranks is the answer. That is the vocabulary-parallel embedding of Megatron-LM
(Shoeybi et al., 2019), here for every op of the kind.
"""

from __future__ import annotations

from typing import Any

import torch

from shardfx.ir.graph import Node, Value
from shardfx.ir.rulebook.dims import argument
from shardfx.ir.rules.book import Contiguous, RuleEntry, replicated, rule
from shardfx.ir.rules.local import Emit
from shardfx.ir.rules.sharding_rule import Dim, ShardingRule
from shardfx.ir.rules.template import Template

aten = torch.ops.aten


def _mine(emit: Emit, index: Any, start: int, length: int) -> tuple[Any, Any]:
    """The index within this rank's range (clamped), and where it lies outside."""
    local = emit.call(aten.sub.Tensor, index, start) if start else index
    low = emit.call(aten.lt.Scalar, local, 0)
    high = emit.call(aten.ge.Scalar, local, length)
    return emit.call(aten.clamp.default, local, 0, max(length - 1, 0)), emit.call(aten.logical_or.default, low, high)


def embedding_local(emit: Emit) -> Any:
    start, length = emit.operand_bounds(0, 0)
    weight, index = emit.args[:2]
    if length == emit.node.operands[0].shape[0]:
        return emit.call(emit.node.op, *emit.args, **emit.kwargs)
    if length == 0:
        return emit.call(aten.new_zeros.default, weight, list(emit.result_shape(0)))
    local, outside = _mine(emit, index, start, length)
    found = emit.call(aten.embedding.default, weight, local)
    return emit.call(aten.masked_fill.Scalar, found, emit.call(aten.unsqueeze.default, outside, -1), 0)


def embedding_backward(node: Node) -> ShardingRule:
    """``n.. d, n.. -> v d``; where gradients are divided by how often an index occurs, n is whole."""
    n = "n..!" if argument(node, "scale_grad_by_freq") else "n.."
    return Template(f"{n} d, {n} -> v d", linear="0")(node)


def embedding_backward_local(emit: Emit) -> Any:
    start, length = emit.result_bounds(0, 0)
    grad, index, rows, padding, scale = emit.args[:5]
    if length == rows:
        return emit.call(emit.node.op, *emit.args)
    if length == 0:
        return emit.call(aten.new_zeros.default, grad, list(emit.result_shape(0)))
    local, outside = _mine(emit, index, start, length)
    masked = emit.call(aten.masked_fill.Scalar, grad, emit.call(aten.unsqueeze.default, outside, -1), 0)
    inside = padding - start if start <= padding < start + length else -1
    return emit.call(aten.embedding_dense_backward.default, masked, local, length, inside, scale)


def gather(node: Node) -> ShardingRule:
    """``x[v, n..], index[i, n..] -> y[i, n..]`` at the gathered dim; v is looked up."""
    x, index = (v.shape for v in node.operands)
    dim = node.args[1] % max(len(x), 1)
    names: list[Dim] = [(f"d{i}",) for i in range(len(x))]
    sizes = {f"d{i}": s for i, s in enumerate(index)}
    whole = {f"d{i}" for i in range(len(x)) if i != dim and x[i] != index[i]}
    operand = list(names)
    for i in range(len(x)):
        if i == dim or x[i] != index[i]:
            operand[i] = (f"v{i}",)
            sizes[f"v{i}"] = x[i]
            if i != dim:
                whole.add(f"v{i}")
    return ShardingRule((tuple(operand), tuple(names)), (tuple(names),), sizes, frozenset(whole), (frozenset({0}),))


def gather_local(emit: Emit) -> Any:
    x = emit.node.operands[0].shape
    dim = emit.node.args[1] % max(len(x), 1)
    start, length = emit.operand_bounds(0, dim) if x else (0, 0)
    if not x or length == x[dim]:
        return emit.call(emit.node.op, *emit.args, **emit.kwargs)
    if length == 0:
        return emit.call(aten.new_zeros.default, emit.args[0], list(emit.result_shape(0)))
    local, outside = _mine(emit, emit.args[2], start, length)
    found = emit.call(aten.gather.default, emit.args[0], dim, local)
    return emit.call(aten.masked_fill.Scalar, found, outside, 0)


def index_tensor(node: Node) -> ShardingRule:
    """``x[i, j]``: indexed dims are whole, the dims of the (broadcast) index and the other dims may be cut."""
    x = node.operands[0].shape
    indices = node.args[1]
    at = [i for i, index in enumerate(indices) if index is not None]
    kept = [i for i in range(len(x)) if i not in at]
    if any(index.type.dtype in (torch.bool, torch.uint8) for index in indices if index is not None):
        raise NotImplementedError
    sizes = {f"x{i}": s for i, s in enumerate(x)}
    shape = torch.broadcast_shapes(*(indices[i].shape for i in at))
    sizes.update({f"i{j}": s for j, s in enumerate(shape)})
    together = at == list(range(at[0], at[0] + len(at)))
    lead = [i for i in kept if i < at[0]] if together else []
    broadcast: tuple[Dim, ...] = tuple((f"i{j}",) for j in range(len(shape)))
    result = (
        *((f"x{i}",) for i in lead),
        *broadcast,
        *((f"x{i}",) for i in kept if i not in lead),
    )
    operands: list[tuple[Dim, ...]] = [tuple((f"x{i}",) for i in range(len(x)))]
    for i in at:
        own = indices[i].shape
        skip = len(shape) - len(own)
        operands.append(tuple(() if s == 1 and shape[skip + j] != 1 else (f"i{skip + j}",) for j, s in enumerate(own)))
    whole = frozenset(f"x{i}" for i in at)
    return ShardingRule(tuple(operands), (result,), sizes, whole, (frozenset({0}),), moves_only=True)


def index_select(node: Node) -> ShardingRule:
    x = node.operands[0].shape
    if not x:
        return replicated(node)
    dim = node.args[1] % len(x)
    names: list[Dim] = [(f"d{i}",) for i in range(len(x))]
    sizes = {f"d{i}": s for i, s in enumerate(x)}
    sizes["i"] = node.operands[1].type.numel
    result = tuple(("i",) if i == dim else n for i, n in enumerate(names))
    return ShardingRule(
        (tuple(names), (("i",),) * node.operands[1].type.ndim),
        (result,),
        sizes,
        frozenset({f"d{dim}"}),
        (frozenset({0}),),
    )


NOTHING = -100
"""The index that a local loss ignores: never a class of the rank's."""


def nll_forward_local(emit: Emit) -> Any:
    dim = 1 if emit.node.operands[0].type.ndim > 1 else 0
    start, length = emit.operand_bounds(0, dim)
    logp, target, weight, reduction, ignore = emit.args[:5]
    if length == emit.node.operands[0].shape[dim]:
        return emit.call(emit.node.op, *emit.args)
    local = _nll_local_target(emit, target, start, length, ignore)
    return emit.call(emit.node.op, logp, local, weight, reduction, NOTHING)


def _nll_local_target(emit: Emit, target: Any, start: int, length: int, ignore: int) -> Any:
    local, outside = _mine(emit, target, start, length)
    ignored = emit.call(aten.eq.Scalar, target, ignore)
    return emit.call(aten.masked_fill.Scalar, local, emit.call(aten.logical_or.default, outside, ignored), NOTHING)


def nll_backward_local(emit: Emit) -> Any:
    dim = 1 if emit.node.operands[1].type.ndim > 1 else 0
    start, length = emit.operand_bounds(1, dim)
    grad, logp, target, weight, reduction, ignore, total = emit.args[:7]
    if length == emit.node.operands[1].shape[dim]:
        return emit.call(emit.node.op, *emit.args)
    local = _nll_local_target(emit, target, start, length, ignore)
    return emit.call(emit.node.op, grad, logp, local, weight, reduction, NOTHING, total)


def nll(node: Node) -> ShardingRule:
    """The *summed* negative log likelihood (capture makes the mean a quotient).

    ``x[n c s..], t[n s..] -> sum, weight``
    """
    x = node.operands[0].shape
    names: list[Dim] = [(f"d{i}",) for i in range(len(x))]
    sizes = {f"d{i}": s for i, s in enumerate(x)}
    dim = 1 if len(x) > 1 else 0
    target = tuple(n for i, n in enumerate(names) if i != dim)
    operands: list[tuple[Dim, ...]] = [tuple(names), target]
    if len(node.operands) > 2:
        operands.append((names[dim],))
    reduction = node.args[3]
    loss = target if reduction == 0 else ()
    whole = frozenset() if reduction != 1 else frozenset(sizes)
    linear: tuple[frozenset[int], ...] = (frozenset({0}),) if reduction == 0 and len(x) > 1 else ()
    if len(operands) > 2 and reduction != 1:
        linear += (frozenset({2}),)
    return ShardingRule(tuple(operands), (loss, ()), sizes, whole, linear)


def nll_backward(node: Node) -> ShardingRule:
    """``grad, x[n c s..], t[n s..], total -> gx[n c s..]``: every row on its own, given the total weight."""
    x = node.operands[1].shape
    names: list[Dim] = [(f"d{i}",) for i in range(len(x))]
    sizes = {f"d{i}": s for i, s in enumerate(x)}
    dim = 1 if len(x) > 1 else 0
    target = tuple(n for i, n in enumerate(names) if i != dim)
    grad = target if node.operands[0].type.ndim else ()
    operands: list[tuple[Dim, ...]] = [grad, tuple(names), target]
    if len(node.operands) > 4:
        operands.append((names[dim],))
    operands.append(())
    linear = (frozenset({0}), frozenset({3})) if len(node.operands) > 4 else (frozenset({0}),)
    return ShardingRule(tuple(operands), (tuple(names),), sizes, linear=linear)


def margin_loss(backward: bool) -> Any:
    """``multi_margin_loss``, ``multilabel_margin_loss``: every row on its own; in a mean the number of rows counts."""

    def make(node: Node) -> ShardingRule:
        base = replicated(node)
        x = node.operands[1 if backward else 0].shape
        weight = 2 if node.op.overloadpacket is aten.multi_margin_loss else 3
        weighted = node.op.overloadpacket in (aten.multi_margin_loss, aten.multi_margin_loss_backward)
        linear: tuple[frozenset[int], ...] = (frozenset({0}),) if backward else ()
        if weighted and len(node.operands) > weight:
            linear += (frozenset({weight}),)
        if len(x) < 2 or argument(node, "reduction") == 1:
            return ShardingRule(base.operands, base.results, base.sizes, base.whole, linear)
        rows = {"n": x[0], **base.sizes}

        def dims(value: Value, own: tuple[Dim, ...]) -> tuple[Dim, ...]:
            return (("n",), *own[1:]) if value.shape and value.shape[0] == x[0] and value.type.ndim <= 2 else own

        operands = tuple(
            own if weighted and i == weight else dims(value, own)
            for i, (value, own) in enumerate(zip(node.operands, base.operands, strict=True))
        )
        results = tuple(
            dims(v, own) if v is not None and own is not None else None
            for v, own in zip(node.results, base.results, strict=True)
        )
        return ShardingRule(operands, results, rows, base.whole, linear)

    make.__name__ = "margin_loss"
    return make


RULES: tuple[RuleEntry, ...] = (
    rule(aten.embedding.default, "v d, n.. -> n.. d", linear="0", local=embedding_local),
    rule(aten.embedding_dense_backward.default, embedding_backward, local=embedding_backward_local),
    rule(aten.gather.default, gather, local=gather_local),
    rule(aten.index.Tensor, index_tensor),
    rule(aten.index_select.default, index_select),
    rule((aten.nll_loss_forward.default, aten.nll_loss2d_forward.default), nll, local=nll_forward_local),
    rule(
        (aten.nll_loss_backward.default, aten.nll_loss2d_backward.default),
        nll_backward,
        local=nll_backward_local,
        contiguous=Contiguous.ALL,
    ),
    rule((aten.multi_margin_loss, aten.multilabel_margin_loss_forward), margin_loss(backward=False)),
    rule((aten.multi_margin_loss_backward, aten.multilabel_margin_loss_backward), margin_loss(backward=True)),
)
