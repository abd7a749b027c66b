"""rematerialize: the backward recomputes pointwise values of the forward where that saves memory.

    s = aten.silu.default(g)                         s = aten.silu.default(g)
    h = aten.mul.Tensor(s, u)                        h = aten.mul.Tensor(s, u)            s is in no memory
    y = aten.mm.default(h, w)                        y = aten.mm.default(h, w)
    ...                                              ...
    gw = aten.mm.default(gy, h)                ->    gw = aten.mm.default(gy, h)
    gu = aten.mul.Tensor(gh, s)                      silu_1 = aten.silu.default(g)
                                                     gu = aten.mul.Tensor(gh, silu_1)

For programs that ``torch.compile`` runs: it fuses the copies into the kernels of the backward. Which values are saved
is a minimum cut of the forward, by bytes, between what is not pointwise and what the backward reads, as in the
partitioner of AOTAutograd (``torch._functorch.partitioners.min_cut_rematerialization_partition``); among minimum shards
the one that recomputes least. What a product of the backward reads is in memory in any case, and is saved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow
from torch import fx

from shardfx.ir.cost.fusion import is_computed
from shardfx.ir.cost.replay import values
from shardfx.ir.graph import Phase
from shardfx.ir.ops.traits import draws
from shardfx.ir.program.aliasing import view_source
from shardfx.ir.program.loops.loop_regions import regions
from shardfx.ir.program.rank_program import RankProgram, planned_node

from .rank_pass import RankContext, RankPass

TOTAL = 2**29
"""The sum of all capacities of the flow network, within the 32 bits of scipy."""
UNSHARDED = 2**30
"""An infinite capacity, which no cut contains."""
SOURCE, SINK = 0, 1
"""Source and sink of the flow network; each value has two more vertices, with its bytes as capacity between."""
CAST = torch.ops.aten._to_copy.default
"""Elementwise, though torch does not tag it so."""


@dataclass(frozen=True)
class Rematerialize(RankPass):
    """Recompute pointwise values in the backward, by a minimum cut of the saved bytes."""

    name: ClassVar[str] = "rematerialize"

    def run(self, program: RankProgram, context: RankContext) -> bool:
        nodes = list(program.graph.nodes)
        recomputed = _recomputed(nodes, program)
        copies: dict[fx.Node, fx.Node] = {}
        for node in nodes if recomputed else ():
            if _is_late(node):
                for used in node.all_input_nodes:
                    if used in recomputed:
                        node.replace_input_with(used, _copied(used, node, recomputed, copies))
        return bool(copies)


def _copied(value: fx.Node, before: fx.Node, recomputed: set[fx.Node], copies: dict[fx.Node, fx.Node]) -> fx.Node:
    """The copy of a value, inserted before ``before`` with its operands, unless it exists."""
    todo = [value]
    while todo:
        node = todo[-1]
        missing = [used for used in node.all_input_nodes if used in recomputed and used not in copies]
        if missing and node not in copies:
            todo += missing
            continue
        todo.pop()
        if node not in copies:
            with before.graph.inserting_before(before):
                copies[node] = before.graph.node_copy(node, lambda used: copies.get(used, used))
    return copies[value]


def _recomputed(nodes: Sequence[fx.Node], program: RankProgram) -> set[fx.Node]:
    """The forward values that the backward recomputes."""
    inside, views = regions(nodes), _views(nodes, program)
    forward = [node for node in nodes if not _is_late(node) and node.op == "call_function"]
    number = {node: 2 + 2 * i for i, node in enumerate(forward)}
    edges: dict[tuple[int, int], int] = {}
    nbytes = {node: _nbytes(node, program) for node in forward}
    unit = max(1, sum(nbytes.values()) // TOTAL)
    for node, into in number.items():
        late = [user for user in node.users if _is_late(user)]
        leaves = any(user.op == "output" for user in node.users)
        edges[into, into + 1] = 0 if leaves or _is_view_of_input(node) else 1 + nbytes[node] // unit
        if any(user.op != "output" for user in late):
            edges[into + 1, SINK] = UNSHARDED
        free = _is_pointwise(node) and (node in views or not _is_materialized(node, views))
        if free and all(inside[user] == inside[node] for user in late):
            edges |= {(number[used] + 1, into): UNSHARDED for used in node.all_input_nodes if used in number}
        else:
            edges[SOURCE, into] = UNSHARDED
    if not any(end == SINK for _, end in edges) or not any(start == SOURCE for start, _ in edges):
        return set()
    behind = _behind_sharding(edges, 2 + 2 * len(forward))
    return {node for node, into in number.items() if into in behind and into + 1 in behind}


def _behind_sharding(edges: dict[tuple[int, int], int], size: int) -> set[int]:
    """The vertices on the sink's side of the minimum cut that is nearest to it."""
    starts, ends = np.array([*edges], dtype=np.int32).T
    capacity = csr_array((np.array([*edges.values()], dtype=np.int32), (starts, ends)), shape=(size, size))
    left = csr_array(capacity - maximum_flow(capacity, SOURCE, SINK).flow)
    left.eliminate_zeros()
    return set(breadth_first_order(left.T.tocsr(), SINK, return_predecessors=False).tolist())


def _is_view_of_input(node: fx.Node) -> bool:
    """Whether a value is a view of an input of the program, which is live in any case."""
    seen: fx.Node | None = node
    while seen is not None and seen.op == "call_function":
        seen = view_source(seen, None)
    return seen is not None


def _is_pointwise(node: fx.Node) -> bool:
    """Whether a call is one that compilers fuse into what reads it: elementwise without random numbers, or a view."""
    op = node.target
    if not isinstance(op, torch._ops.OpOverload) or op.namespace != "aten" or draws(op):
        return False
    return torch.Tag.pointwise in op.tags or op is CAST or view_source(node, None) is not None


def _is_materialized(node: fx.Node, views: set[fx.Node]) -> bool:
    """Whether a backward call that compilers fuse nothing into reads a value, or a view of it."""
    return any(
        _is_materialized(user, views)
        if user in views
        else _is_late(user) and user.op != "output" and not (is_computed(user) or _is_pointwise(user))
        for user in node.users
    )


def _views(nodes: Sequence[fx.Node], program: RankProgram) -> set[fx.Node]:
    """The calls that are views, without a copy: a reshape of a transposed value does copy."""
    views = {node for node in nodes if view_source(node, None) is not None}
    reshapes: list[Any] = [node for node in views if node.target is torch.ops.aten.reshape.default]
    made = values(program) if reshapes else {}
    return views - {node for node in reshapes if not made[node.args[0].name].reshape(made[node.name].shape)._is_view()}


def _is_late(node: fx.Node) -> bool:
    """Whether a call is behind the forward."""
    planned = planned_node(node)
    return node.op == "output" or (planned is not None and planned.phase is not Phase.FORWARD)


def _nbytes(node: fx.Node, program: RankProgram) -> int:
    planned = planned_node(node)
    return sum(value.local_bytes(program.mesh) for value in planned.outs) if planned is not None else 0
