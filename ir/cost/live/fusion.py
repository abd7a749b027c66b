"""What a fusing compiler does not store: elementwise values that its kernels compute where they are used.

    %1 = mm(x, w)                     stored
    %2 = _to_copy(%1, float32)        computed in the kernels that take it
    %3 = sum(%2, [1])                 stored

A value is computed where it is used if its op is elementwise (up to statistics of rows) and all that use it, views
aside, are elementwise ops or reductions, also those of the backward. Its operands are there until its last use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import fx

from shardfx.ir.program.sharing import lies_in

from .blocks import Block

aten = torch.ops.aten

ELEMENTWISE = {
    aten._to_copy.default,
    aten.cat.default,
    aten._softmax.default,
    aten._softmax_backward_data.default,
    aten._log_softmax.default,
    aten._log_softmax_backward_data.default,
    aten.nll_loss_backward.default,
}
"""Ops of which Inductor computes each element where it is used, beside those that torch tags as pointwise."""
REDUCTIONS = {
    aten.sum.default,
    aten.sum.dim_IntList,
    aten.mean.default,
    aten.mean.dim,
    aten.amax.default,
    aten.var_mean.correction,
    aten.nll_loss_forward.default,
    aten.embedding_dense_backward.default,
}
"""Ops whose kernels compute elementwise operands."""


def fused(nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """The values that are computed where they are used."""
    own = (node for node in nodes if _is_elementwise(node) and lies_in(node, None) is None)
    return {node for node in own if all(map(_computes, _users(node)))}


def loaded(node: fx.Node, inside: set[fx.Node]) -> set[fx.Node]:
    """What a kernel loads: the operands of a call, and of those that are computed ``inside`` it their own."""
    found, todo = set[fx.Node](), [*node.all_input_nodes]
    while todo:
        used = todo.pop()
        while (source := lies_in(used, None)) is not None and used.op == "call_function":
            used = source
        if used in inside:
            todo += used.all_input_nodes
        else:
            found.add(used)
    return found


def fuse(nodes: Sequence[fx.Node], blocks: Callable[[fx.Node], Iterator[Block]]) -> None:
    """Let values that are computed where they are used hold nothing. ``blocks`` are those in which a value lies."""
    inside = fused(nodes)
    for node in reversed(nodes):
        if node not in inside:
            continue
        for block in blocks(node):
            for used in node.all_input_nodes:
                for source in blocks(used):
                    source.last = max(source.last, block.last)
                    source.uses |= {place: max(at, source.uses.get(place, at)) for place, at in block.uses.items()}
            block.nbytes = 0


def _users(node: fx.Node) -> Iterator[fx.Node]:
    """The calls that use a value, or a view of it."""
    for user in node.users:
        if user.op == "call_function" and lies_in(user, None) is node:
            yield from _users(user)
        else:
            yield user


def _is_elementwise(node: fx.Node) -> bool:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    return target in ELEMENTWISE or torch.Tag.pointwise in target.tags


def _computes(node: fx.Node) -> bool:
    return _is_elementwise(node) or node.target in REDUCTIONS
