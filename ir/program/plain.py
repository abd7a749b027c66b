"""The plain form of a program: every value in memory of its own.

    %part = memory.part(%flat, 1, 0, [8, 6])
    %grad = aten.mm.out(%t, %x, out=%part)             %grad = aten.mm(%t, %x)
    %full = memory.join(%flat, [%grad], 1)        ->   %full = pack.flatten([%grad], 1)
    %sent = c10d.all_reduce_(%full, "sum", ...)        %sent = c10d.all_reduce(%full, "sum", ...)

A valid program (:mod:`.validate_program`) computes what its plain form computes: who proves or reads values needs no
more than this form. The forms stand in the rows (:mod:`shardfx.ir.ops.local_ops`).
"""

from __future__ import annotations

from torch import fx

from shardfx.ir.ops.local_ops import row_of

from .rank_program import RankProgram


def plain(program: RankProgram, *, in_place: bool = False) -> RankProgram:
    """The same program without destinations; nodes keep their names and where they come from.

    ``in_place``: nobody needs ``program`` itself any more.
    """
    made = program if in_place else program.copy()
    graph, memory = made.graph, list[fx.Node]()
    for node in list(graph.nodes):
        row = row_of(node.target) if node.op == "call_function" else None
        if row is None or (row.plain is None and not row.memory):
            continue
        form = row.plain(node.args, node.kwargs) if row.plain is not None else None
        if isinstance(form, tuple):
            node.target, node.args, node.kwargs = form
        elif isinstance(form, fx.Node):
            node.replace_all_uses_with(form)
            graph.erase_node(node)
        else:
            memory.append(node)
    for node in reversed(memory):
        graph.erase_node(node)
    return made
