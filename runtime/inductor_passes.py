"""A pass of Inductor for whole training steps: values that are stored once, and updates where their gradients are.

Inductor runs it on the graph of a compiled program (``post_grad_custom_post_pass``), which is functional but for the
``copy_`` into inputs at its end. Two things differ from a forward or a backward graph, for which its defaults are made:

- A value of the forward that the backward reads is no output, so Inductor would compute it again in each kernel that
  reads it. Where loading the value takes fewer bytes than loading what it is computed from, it is stored once.
- Updates of parameters stand behind the whole backward. Each moves to where its gradient is and the parameter is not
  read any more: the gradient is still in the cache of the device, and its memory is free at once. One that ranks reduce
  stays behind the backward, during which it travels.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch._inductor.inductor_prims
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

from shardfx.ir.cost.fusion import is_computed, is_elementwise

aten, prims = torch.ops.aten, torch.ops.prims
WRITE = aten.copy_.default
LOWERED = {prims.convert_element_type.default, aten.gather.default, aten.embedding.default}
"""Elementwise for Inductor, beside the ops of programs (``is_elementwise``)."""
SOFTMAX = torch._inductor.inductor_prims.prepare_softmax_online
"""The maxima and sums of a softmax, which Inductor computes in one reduction."""
STORED = "inductor_realize_to_strides"
"""A key of ``node.meta`` by which Inductor stores a value, in the strides of ``meta["val"]``."""


class WholeStep(CustomGraphPass):
    """Stores values that many kernels read, and updates parameters as soon as possible."""

    def __call__(self, graph: fx.Graph) -> None:
        """Change a graph in place."""
        store_once(graph)
        write_early(graph)

    def uuid(self) -> Any:
        """By which Inductor's cache of compiled graphs knows this pass."""
        return get_hash_for_files((__file__,))


OPTIONS: dict[str, Any] = {
    "reorder_for_locality": False,
    "score_fusion_memory_threshold": 1024,
    "post_grad_custom_post_pass": WholeStep(),
}
"""Options of Inductor for whole steps. Products of weights' gradients stay where the backward has them: in a graph
without autograd it would move each in front of the update, its only user, and keep all activations until then. Updates
share no kernel for the few bytes of their rates."""


def store_once(graph: fx.Graph) -> None:
    """Mark the elementwise values that take fewer bytes to load in each kernel than to compute there."""
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    segment = dict(_segments(graph.nodes))
    read_in: dict[fx.Node, set[int]] = {}
    for node in reversed(nodes):
        read_in[node] = set()
        for user in node.users:
            inside = _is_inlined(user) and (_is_view(user) or not _is_stored(user))
            read_in[node] |= read_in[user] if inside else {segment[user]}
    loads: dict[fx.Node, set[fx.Node]] = {}
    for node in nodes:
        if not _is_inlined(node):
            continue
        loads[node] = set().union(*(loads.get(used, {used}) for used in node.all_input_nodes))
        if _is_view(node) or _is_stored(node):
            loads[node] = loads[node] if _is_view(node) else {node}
            continue
        kernels, stored, computed = len(read_in[node]), _nbytes(node), sum(map(_nbytes, loads[node]))
        if kernels * stored < (kernels - 1) * computed:
            node.meta[STORED] = True
            loads[node] = {node}


def write_early(graph: fx.Graph) -> None:
    """Move writes into inputs, with what only they need, behind the last value and read that they wait for."""
    nodes = list(graph.nodes)
    place = {node: i for i, node in enumerate(nodes)}
    updates = [update for update in _updates(nodes) if not any(map(_communicates, update))]
    moved = set().union(*updates)
    waits = [{used for node in update for used in _before(node)} - moved for update in updates]
    waiting: dict[fx.Node, list[int]] = {}
    for i, needed in enumerate(waits):
        for node in needed:
            waiting.setdefault(node, []).append(i)
    order: dict[fx.Node, None] = {}
    for node in nodes:
        if node.op == "output":
            order.update(dict.fromkeys(each for each in nodes if each in moved))
        if node in moved:
            continue
        order[node] = None
        for i in waiting.get(node, ()):
            waits[i].discard(node)
            if not waits[i]:
                order.update(dict.fromkeys(sorted(updates[i], key=place.__getitem__)))
    for node, following in itertools.pairwise(order):
        node.append(following)


def _updates(nodes: Sequence[fx.Node]) -> list[set[fx.Node]]:
    """Writes with the calls that only they need: those that share a value, other than a number, together."""
    writes = {node for node in nodes if node.target is WRITE and node.args[0].op == "placeholder"}  # type: ignore[union-attr]
    only = set(writes)
    for node in reversed(nodes):
        if _is_inlined(node) and node.users and only.issuperset(node.users):
            only.add(node)
    read = {node for write in writes for node in _reads(write.args[0])}  # type: ignore[arg-type]
    only |= {node for node in nodes if _is_opaque(node) and node.users and only.issuperset(node.users)} - read
    found: list[set[fx.Node]] = []
    for write in nodes:
        if write in writes:
            update, todo = set[fx.Node](), [write]
            while todo:
                node = todo.pop()
                if node in only and node not in update:
                    update.add(node)
                    todo += _before(node) if _is_inlined(node) or node in writes else ()
            apart = [other for other in found if not any(_numel(node) > 1 for node in other & update)]
            found = [*apart, update.union(*(other for other in found if other not in apart))]
    return found


def _communicates(node: fx.Node) -> bool:
    """Whether a call, or an operand of it, comes of other ranks: for those nobody waits earlier than at the end."""
    return any(
        isinstance(each.target, torch._ops.OpOverload) and each.target.namespace == "_c10d_functional"
        for each in (node, *node.all_input_nodes)
    )


def _before(node: fx.Node) -> Iterator[fx.Node]:
    """The calls that a call stands behind: those that make its operands and, of a write, those that read its input."""
    yield from (used for used in node.all_input_nodes if used.op == "call_function")
    if node.target is WRITE:
        yield from _reads(node.args[0])  # type: ignore[arg-type]


def _reads(given: fx.Node) -> Iterator[fx.Node]:
    """The calls in which an input is read: those that take it, or what is computed of it in their kernels."""
    found, todo = set[fx.Node](), [given]
    while todo:
        for user in todo.pop().users:
            if user.op == "call_function" and user.target is not WRITE and user not in found:
                found.add(user)
                todo += [user] if _numel(given) > 1 and _is_inlined(user) and STORED not in user.meta else ()
                yield user


def _is_stored(node: fx.Node) -> bool:
    """Whether a value is stored in any case, for a call that is no part of a kernel of Inductor's reads it."""
    return any(_is_stored(user) if _is_view(user) else _is_opaque(user) for user in node.users)


def _segments(nodes: Iterable[fx.Node]) -> Iterator[tuple[fx.Node, int]]:
    """For each call, how many calls stand before it that Inductor fuses nothing with."""
    count = 0
    for node in nodes:
        yield node, count
        count += _is_opaque(node)


def _is_inlined(node: fx.Node) -> bool:
    """Whether Inductor computes a value where it is used."""
    return not _mutates(node) and (is_elementwise(node) or node.target in LOWERED or _is_view(node))


def _is_opaque(node: fx.Node) -> bool:
    """Whether a call is no part of a kernel that Inductor generates: products, attention, collectives."""
    inside = _is_inlined(node) or is_computed(node) or node.target in (SOFTMAX, WRITE, operator.getitem)
    return node.op == "call_function" and not inside


def _is_view(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target.is_view


def _mutates(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _numel(node: fx.Node) -> int:
    """Elements of a value; 0 where sizes are symbolic, of which nothing may be asked."""
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor) and all(isinstance(n, int) for n in value.shape):
        return value.numel()
    return 0


def _nbytes(node: fx.Node) -> int:
    return _numel(node) * node.meta["val"].element_size() if _numel(node) else 0
