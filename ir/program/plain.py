"""The plain form of a program: every value in memory of its own.

    %part = memory.part(%flat, 1, 0, [8, 6])
    %grad = aten.mm.out(%t, %x, out=%part)             %grad = aten.mm(%t, %x)
    %full = memory.join(%flat, [%grad], 1)        ->   %full = pack.flatten([%grad], 1)
    %sent = c10d.all_reduce_(%full, "sum", ...)        %sent = c10d.all_reduce(%full, "sum", ...)

A valid program (:mod:`.validate_program`) computes what its plain form computes: who proves or reads values needs no
more than this form. The forms stand in the rows (:mod:`shardfx.ir.ops.local_ops`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import fx

from shardfx.ir.ops.local_ops import row_of

from .rank_program import RankProgram


def plain(program: RankProgram) -> RankProgram:
    """The same program without destinations; nodes keep their names and where they come from."""
    graph, env = fx.Graph(), dict[fx.Node, Any]()
    for node in program.graph.nodes:
        row = row_of(node.target) if node.op == "call_function" else None
        if row is None or (row.plain is None and not row.memory):
            env[node] = graph.node_copy(node, env.__getitem__)
            continue
        if row.memory:
            env[node] = None
            continue
        args, kwargs = fx.map_arg(node.args, env.__getitem__), fx.map_arg(node.kwargs, env.__getitem__)
        made = row.plain(args, kwargs) if row.plain is not None else None
        if isinstance(made, tuple):
            target, given, named = made
            made = graph.create_node("call_function", target, given, named, node.name)
            made.meta = dict(node.meta)
        env[node] = made
    return replace(program, graph=graph)
