"""When communication starts: as soon as what it moves is there, so that it travels while something else is computed.

    %5 = mm(%3, %w)            %5 = mm(%3, %w)
    %6 = mm(%4, %3)            %7 = comm.all_reduce(%5)      starts; nothing waits yet
    %7 = comm.all_reduce(%5)   %6 = mm(%4, %3)
    %8 = add(%7, %1)           %8 = add(%7, %1)              waits just before this

A gather of stored parameters starts when the one before it is first needed: one is fetched ahead. All ranks run one
graph, so that the order of collectives stays the same on all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from shardfx.ir.graph import Node, Value
from shardfx.ir.ops import comm
from shardfx.ir.ops.table import OwnOp

aten = torch.ops.aten

LIGHT = {
    aten.view.default,
    aten.reshape.default,
    aten.t.default,
    aten.transpose.int,
    aten.permute.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.expand.default,
}
"""Ops that only look at memory in another way: they move along with the communication behind them."""


def start_early(nodes: Sequence[Node], inputs: Iterable[Value]) -> list[Node]:
    """The same nodes, each communication as early as it may start."""
    stored = set(inputs)
    place = {node: float(i) for i, node in enumerate(nodes)}
    makers = {value: node for node in nodes for value in node.outs}
    at = {}
    moved: set[Node] = set()
    fetched: float | None = None
    for node in nodes:
        at[node] = place[node]
        if not isinstance(node.op, OwnOp) or node.op is comm.shard:
            continue
        if node.op is comm.all_gather and all(value in stored for value in node.operands):
            # Twice: the gather before this one stands at the place where it is needed first.
            at[node] = fetched if fetched is not None else place[node]
            fetched = place[node]
            continue
        chain: list[Node] = []
        ready = max((_ready(value, place, makers, chain) for value in node.operands), default=-1.0)
        for each in (*chain, node):
            at[each] = min(at[each], ready + 0.5)
            moved.add(each)
    return sorted(nodes, key=lambda node: (at[node], place[node]))


def _ready(value: Value, place: dict[Node, float], makers: dict[Value, Node], chain: list[Node]) -> float:
    """Where the last op stands that computes a value, behind the light ops between, which go into ``chain``."""
    node = makers.get(value)
    if node is None:
        return -1.0
    if node.op not in LIGHT:
        return place[node]
    latest = max((_ready(operand, place, makers, chain) for operand in node.operands), default=-1.0)
    if node not in chain:
        chain.append(node)
    return latest
