"""Interpreter of graphs: every node run on one device, on global shapes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

from shardfx.ir.builder import MOVES, Call
from shardfx.ir.graph import Graph, Node, Value, substitute
from shardfx.ir.ops.dropout import dropout
from shardfx.ir.ops.table import OwnOp, carried

aten = torch.ops.aten
Draw = Callable[[Node, tuple[Any, ...]], tuple[Tensor, ...]]
"""Draws the random mask of a node as the ranks do, box by box, from the node and its arguments."""


def interpret(
    graph: Graph,
    inputs: Mapping[str, Tensor],
    draw: Draw | None = None,
    only: Collection[Value] | None = None,
    instead: Mapping[Value, Call] | None = None,
) -> dict[Value, Tensor]:
    """The values of a graph, computed on one device from global inputs: all, or ``only`` some. Some values are computed
    by other calls ``instead``."""
    calls = {value.node: Node(*call) for value, call in (instead or {}).items() if value.node is not None}
    env: dict[Value, Tensor] = {}
    dying: dict[Node, list[Value]] = {}
    if only is not None:
        last = {
            value: node
            for node in graph.nodes
            for value in (*node.outs, *node.operands, *(calls[node].operands if node in calls else ()))
        }
        for value in last.keys() - {*only}:
            dying.setdefault(last[value], []).append(value)
    for each in graph.inputs:
        env[each.value] = inputs[each.name]
    with torch.no_grad():
        for node in graph.nodes:
            env.update(_results(node, calls.get(node, node), env, draw))
            for value in dying.get(node, ()):
                env.pop(value, None)
    return env


def _results(node: Node, call: Node, env: Mapping[Value, Tensor], draw: Draw | None) -> dict[Value, Tensor]:
    """The results of a node, by ``call``."""
    if isinstance(node.op, OwnOp):
        return {value: env[source] for source, value in carried(node)}

    def read(value: Value) -> Tensor:
        if value not in env:  # of which a draw of random numbers wants the shape alone
            return torch.zeros(value.shape, dtype=value.type.dtype)
        return env[value] if _takes_any(call.op) else env[value].contiguous()

    op = aten.reshape.default if call.op is aten.view.default else call.op
    args = substitute(call.args, read)
    if draw is not None and call.op is dropout:
        out: Any = draw(node, args)
    else:
        out = op(*args, **{name: substitute(each, read) for name, each in call.kwargs.items()})
    results = out if isinstance(out, (tuple, list)) else [out]
    return {made: result for made, result in zip(node.results, results, strict=False) if made is not None}


@cache
def _takes_any(op: Any) -> bool:
    """Whether an op gives the same however its operands lie in memory; in a graph they lie row by row."""
    return op in MOVES or torch.Tag.pointwise in getattr(op, "tags", ())
