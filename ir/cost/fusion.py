"""Fusion by Inductor: elementwise values that are never stored, and calls that share a kernel.

    %1 = mm(x, w)                     stored
    %2 = _to_copy(%1, float32)        computed in the kernels that load it
    %3 = sum(%2, [1])                 stored
    %4 = silu_backward(%2, %1)        in the kernel of %3: both load %1

A value is computed where it is used if its op is elementwise (up to statistics of rows) and all its users, views aside,
are elementwise ops or reductions, also those of the backward; with several users, if it loads few tensors. Its operands
live until its last use. All other elementwise calls and reductions are grouped into kernels (:func:`kernels`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from shardfx.ir.ops import memory_ops
from shardfx.ir.program.aliasing import view_source

from .fake_calls import TensorLayout
from .footprint import Storage

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
"""Elementwise ops without torch's pointwise tag, which Inductor inlines into their users."""
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
"""Reductions, which Inductor fuses with elementwise operands."""
BY_DIMS = {aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.var_mean.correction}
"""Reductions with an argument for the reduced dims."""
READS = 4
"""The maximum number of loads of an inlined value with several users: Inductor's
``realize_reads_threshold``."""
Loads = dict[fx.Node, None]
"""Values, or views of them, that a kernel loads, in order."""
Layouts = Callable[[fx.Node], Sequence[TensorLayout]]
"""The layouts of a node's result tensors."""


def inlined_values(nodes: Sequence[fx.Node]) -> dict[fx.Node, Loads]:
    """The values that are inlined into their users, and the loads of each."""
    found: dict[fx.Node, Loads] = {}
    for node in nodes:
        if is_elementwise(node) and view_source(node, None) is None:
            users, loads = {*_users(node)}, kernel_loads(node, found)
            if all(map(is_computed, users)) and (len(users) == 1 or len({*map(root, loads)}) <= READS):
                found[node] = loads
    return found


def kernel_loads(node: fx.Node, inside: Mapping[fx.Node, Loads]) -> Loads:
    """The loads of a kernel of one call: its operands, with those of inlined operands (``inside``) in their place."""
    return {each: None for used in node.all_input_nodes for each in inside.get(root(used), (used,))}


def root(node: fx.Node) -> fx.Node:
    """The base of a view; a node itself, if it is no view. Each result of a call is a value of its own."""
    while node.op == "call_function" and (source := view_source(node, None)) is not None:
        if node.target is operator.getitem and view_source(source, None) is None:
            break
        node = source
    return node


@dataclass(eq=False)
class FusionGroup:
    """A kernel: fused calls and their loads."""

    number: int
    size: Hashable
    calls: list[fx.Node] = field(default_factory=list)
    loads: Loads = field(default_factory=dict)
    stores: list[fx.Node] = field(default_factory=list)
    """The calls whose results are used outside the kernel."""
    before: int = 0
    """The numbers of all kernels that run before it, as a bit mask."""

    def touched(self, layouts: Layouts) -> int:
        """The bytes that it loads and stores: each value once, and no more of one than its views cover."""
        seen: dict[fx.Node, int] = {}
        for view in self.loads:
            if maker_of(value := root(view)) not in self.calls:
                seen[value] = seen.get(value, 0) + _nbytes(layouts(view))
        kernel_loads = sum(min(_nbytes(layouts(value)), much) for value, much in seen.items())
        return kernel_loads + sum(_nbytes(layouts(node)) for node in self.stores)


def kernels(
    nodes: Sequence[fx.Node],
    inside: Mapping[fx.Node, Loads],
    layouts: Layouts,
    loop: Callable[[fx.Node], Hashable],
) -> list[FusionGroup]:
    """The kernels of a program, as Inductor's scheduler fuses them: elementwise calls and reductions over equally many
    elements in one ``loop`` share a kernel if one uses the other's result, or both load a value of so many elements,
    and no other kernel has to run between them. Uses of a sum over rows, or over all elements, are in another kernel; a
    ``write`` of what a kernel computes is the kernel's store."""
    found: list[FusionGroup] = []
    kernel_of: dict[fx.Node, FusionGroup] = {}
    loaders: dict[fx.Node, list[FusionGroup]] = {}
    """The kernels of elementwise calls and reductions that load each value."""
    used_in: dict[fx.Node, set[int]] = {}
    for node in nodes:
        if node in inside or view_source(node, None) is not None:
            continue
        loads, computes = kernel_loads(node, inside), is_computed(node)
        values = dict.fromkeys(map(root, loads))
        makers = {value: kernel_of[maker_of(value)] for value in values if maker_of(value) in kernel_of}
        sized = node.all_input_nodes if node.target in REDUCTIONS else (node,)
        elements = max((_numel(layouts(each)) for each in sized), default=0)
        size = (elements, loop(node)) if computes else None
        if node.target is memory_ops.write and is_computed(maker_of(value := root(node.all_input_nodes[-1]))):
            kernel, loads = makers[value], {}
        else:
            ended = {makers[value] for value in makers if _ends_kernel(maker_of(value), layouts)}
            beside = [each for value in values if _numel(layouts(value)) >= elements for each in loaders.get(value, ())]
            fits = (
                each
                for each in (*makers.values(), *reversed(beside))
                if each.size == size is not None
                and each not in ended
                and not any(other.before >> each.number & 1 for other in makers.values())
            )
            kernel = next(fits, None) or FusionGroup(len(found), size)
        if kernel.number == len(found):
            found.append(kernel)
        kernel.calls.append(node)
        kernel.loads |= loads
        kernel_of[node] = kernel
        _run_before(kernel, makers.values(), found)
        for value in values:
            used_in.setdefault(maker_of(value), set()).add(kernel.number)
            if computes:
                loaders.setdefault(value, []).append(kernel)
    results = {maker_of(root(result)) for result in nodes[0].graph.output_node().all_input_nodes} if nodes else ()
    for node, kernel in kernel_of.items():
        if node in results or used_in.get(node, set()) - {kernel.number}:
            kernel.stores.append(node)
    return found


def _run_before(kernel: FusionGroup, makers: Iterable[FusionGroup], found: Iterable[FusionGroup]) -> None:
    """Record that ``makers`` and their predecessors run before a kernel and its successors."""
    before = kernel.before
    for each in makers:
        if each is not kernel:
            before |= each.before | 1 << each.number
    if before != kernel.before:
        kernel.before = before
        for each in found:
            if each.before >> kernel.number & 1:
                each.before |= before


def maker_of(value: fx.Node) -> fx.Node:
    """The call that returns a value."""
    maker = value.args[0] if value.target is operator.getitem else value
    assert isinstance(maker, fx.Node)
    return maker


def _ends_kernel(node: fx.Node, layouts: Layouts) -> bool:
    """Whether a call is a reduction whose result needs the full kernel, unlike one over rows."""
    if node.target not in REDUCTIONS:
        return False
    operand, dims = (*node.args, None)[:2]
    if node.target not in BY_DIMS or not isinstance(dims, Sequence) or not isinstance(operand, fx.Node):
        return True
    (rank,) = (len(layout.shape) for layout in layouts(operand))
    reduced = {dim % rank for dim in dims if isinstance(dim, int)}
    return len(reduced) in (0, rank) or reduced != {*range(rank - len(reduced), rank)}


def _numel(layouts: Iterable[TensorLayout]) -> int:
    return max((layout.numel for layout in layouts), default=0)


def _nbytes(layouts: Iterable[TensorLayout]) -> int:
    return sum(layout.nbytes for layout in layouts)


def drop_inlined_values(nodes: Sequence[fx.Node], storages: Callable[[fx.Node], Iterator[Storage]]) -> None:
    """Set the bytes of inlined values to 0, and extend the live intervals of their operands to their last uses."""
    inside = inlined_values(nodes)
    for node in reversed(nodes):
        if node not in inside:
            continue
        for storage in storages(node):
            for used in node.all_input_nodes:
                for source in storages(used):
                    source.last = max(source.last, storage.last)
                    source.uses |= {place: max(at, source.uses.get(place, at)) for place, at in storage.uses.items()}
            storage.nbytes = 0


def _users(node: fx.Node) -> Iterator[fx.Node]:
    """The users of a value and of its views."""
    for user in node.users:
        if user.op == "call_function" and view_source(user, None) is node:
            yield from _users(user)
        else:
            yield user


def is_elementwise(node: fx.Node) -> bool:
    """Whether Inductor can inline a call's result into its users."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    return target in ELEMENTWISE or torch.Tag.pointwise in target.tags


def is_computed(node: fx.Node) -> bool:
    """Whether Inductor generates the call's kernel: an elementwise op or a reduction."""
    return is_elementwise(node) or node.target in REDUCTIONS
