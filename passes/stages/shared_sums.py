"""Gradients that several stages have a part of are summed over iterations first, and then over the stages.

    %5 = aten.add(%3, %4) : [64, 8] +{mb}         %5 = comm.all_reduce(%3, axes=[mb])    at{0}
    %6 = comm.all_reduce(%5, axes=[mb])      ->   %6 = comm.all_reduce(%4, axes=[mb])    at{1}
                                                  %7 = aten.add(%5, %6)

So a tied weight's gradient is sent once a step, and no iteration waits for it.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from shardfx.ir.graph import Graph, Node, Phase, Value
from shardfx.ir.ops import comm
from shardfx.ir.ops.table import OwnOp
from shardfx.ir.rewriter import Rewriter
from shardfx.ir.rules.book import RuleBook

aten = torch.ops.aten


def sum_behind_iterations(graph: Graph, at: Mapping[Node, tuple[int, ...]], time: str, rules: RuleBook) -> bool:
    """Rewrite such sums; says whether there were any."""
    users = graph.users()
    rewriter = Rewriter(graph, rules)
    for node in graph.nodes:
        makers = [value.node for value in node.operands]
        if node.op is not aten.add.Tensor or node.kwargs or len(makers) != 2 or node.phase is not Phase.BACKWARD:
            continue
        apart = len({at[maker] for maker in makers if maker is not None}) > 1
        way = _to_the_whole(node.outs[0], users, graph, time) if apart else []
        if not way:
            continue
        parts = []
        for value in node.operands:
            for step in way:
                kwargs = {key: arg for key, arg in step.kwargs.items() if key != "axes"}
                made = rewriter.comm(step.op, value, like=value.node, axes=step.kwargs["axes"], **kwargs)
                (value,) = rewriter.before(way[-1], made).outs
            parts.append(value)
        total = rewriter.before(way[-1], rewriter.call(aten.add.Tensor, *parts, like=node))
        total.why = "each stage sums its share over the iterations first"
        rewriter.replace(way[-1].outs[0], total.outs[0])
        for gone in (node, *way):
            rewriter.erase(gone)
    return rewriter.apply()


def _to_the_whole(value: Value, users: Mapping[Value, list[Node]], graph: Graph, time: str) -> list[Node]:
    """The communication by which a partial value becomes whole over the iterations; nothing where that is not all of
    it."""
    found: list[Node] = []
    while True:
        if len(users[value]) != 1 or any(output.value is value for output in graph.outputs):
            return []
        (user,) = users[value]
        if not isinstance(user.op, OwnOp) or user.op not in (comm.all_reduce, comm.reduce_scatter):
            return []
        found.append(user)
        if time in user.kwargs["axes"]:
            return found
        (value,) = user.outs
