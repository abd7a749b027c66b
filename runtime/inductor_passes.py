"""An Inductor pass for full training steps: materialize values that many kernels would recompute.

Inductor runs it on the graph of a compiled program (``post_grad_custom_post_pass``), which is functional but for the
``copy_`` into inputs at its end. An activation that the backward reads is no output here, as it is of a forward graph,
so Inductor would recompute it in each kernel that reads it. Where loading the value takes fewer bytes than loading the
operands of that computation, it is materialized. The order of kernels, updates of parameters among them, is Inductor's
own, for the least memory.
"""

from __future__ import annotations

import math
import operator
from itertools import accumulate
from typing import Any

import torch
import torch._inductor.inductor_prims
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

from shardfx.ir.cost.fusion import is_computed, is_elementwise

aten, prims = torch.ops.aten, torch.ops.prims
WRITE = aten.copy_.default
LOWERED = {prims.convert_element_type.default, aten.gather.default, aten.embedding.default}
"""Ops that Inductor lowers elementwise, beside those of ``is_elementwise``."""
SOFTMAX = torch._inductor.inductor_prims.prepare_softmax_online
"""The maxima and sums of a softmax, which Inductor computes in one reduction."""
STORED = "inductor_realize_to_strides"
"""A key of ``node.meta`` by which Inductor stores a value, in the strides of ``meta["val"]``."""


class WholeStep(CustomGraphPass):
    """The pass: marks values to be materialized, where Inductor would inline them into many kernels."""

    def __call__(self, graph: fx.Graph) -> None:
        """Mark the elementwise values that take fewer bytes to load in each kernel than to compute there."""
        nodes = [node for node in graph.nodes if node.op == "call_function"]
        segment = dict(zip(graph.nodes, accumulate(map(_is_opaque, graph.nodes), initial=0), strict=False))
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

    def uuid(self) -> Any:
        """The key of this pass in Inductor's cache of compiled graphs."""
        return get_hash_for_files((__file__,))


OPTIONS: dict[str, Any] = {
    "reorder_for_locality": False,
    "score_fusion_memory_threshold": 1024,
    "post_grad_custom_post_pass": WholeStep(),
}
"""Options of Inductor for full steps. Weight-gradient matmuls keep their order in the backward: in a graph without
autograd it would move each in front of the update, its only user, and keep all activations until then. Updates are not
fused for the few bytes of their rates."""


def _is_stored(node: fx.Node) -> bool:
    """Whether a value is materialized in any case, as a call outside Inductor's kernels reads it."""
    return any(_is_stored(user) if _is_view(user) else _is_opaque(user) for user in node.users)


def _is_inlined(node: fx.Node) -> bool:
    """Whether Inductor inlines the computation of a value into its users."""
    if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable:
        return False
    return is_elementwise(node) or node.target in LOWERED or _is_view(node)


def _is_opaque(node: fx.Node) -> bool:
    """Whether a call is outside the kernels that Inductor generates: products, attention, collectives."""
    inside = _is_inlined(node) or is_computed(node) or node.target in (SOFTMAX, WRITE, operator.getitem)
    return node.op == "call_function" and not inside


def _is_view(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target.is_view


def _nbytes(node: fx.Node) -> int:
    """The bytes of a value; 0 where sizes are symbolic, which must not be read."""
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor) and all(isinstance(n, int) for n in value.shape):
        return math.prod(value.shape) * value.itemsize  # its strides may be symbolic
    return 0
