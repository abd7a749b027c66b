"""The plain form of a program: every value in its own memory, without destinations.

    %part = memory.part(%flat, 1, 0, [8, 6])
    %grad = aten.mm.out(%t, %x, out=%part)             %grad = aten.mm(%t, %x)
    %full = memory.join(%flat, [%grad], 1)        ->   %full = pack.flatten([%grad], 1)
    %sent = c10d.all_reduce_(%full, "sum", ...)        %sent = c10d.all_reduce(%full, "sum", ...)

A segment of an optimizer's step is the calls that it stands for, member by member (:func:`written_out`).

A valid program (:mod:`.validate_program`) computes what its plain form computes: who proves or reads values needs no
more than this form. The forms stand in the rows (:mod:`shardfx.ir.ops.local_ops`).
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any

from torch import fx

from shardfx.ir.ops import memory_ops
from shardfx.ir.ops.computing.row_update import step_rows
from shardfx.ir.ops.computing.segment import COPY, SegmentCall, SegmentRef, common, home, read_call, segment
from shardfx.ir.ops.local_ops import row_of

from .rank_module import ORIGINS
from .rank_program import RankProgram


def plain(program: RankProgram, *, in_place: bool = False) -> RankProgram:
    """The plain form of a program, without destinations; nodes keep names and origins. ``in_place``: ``program`` may
    change."""
    made = program if in_place else program.copy()
    write_out(made)
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


def written_out(program: RankProgram) -> RankProgram:
    """A program with each segment expanded into the calls that it stands for; the same object where there is none."""
    if all(node.target not in (segment, step_rows) for node in program.graph.nodes):
        return program
    made = program.copy()
    write_out(made)
    return made


def write_out(program: RankProgram) -> None:
    """Expand each segment into its calls."""
    for node in list(program.graph.nodes):
        if node.target in (segment, step_rows):
            _write_out(program.graph, node)


def _write_out(graph: fx.Graph, node: fx.Node) -> None:
    arguments: Any = node.args
    texts, gives, members, tensors, scalars, *_ = arguments
    calls, width = [read_call(text) for text in texts], len(tensors) // members
    origins = node.meta.get(ORIGINS, [node.meta.get("shardfx")] * (members * len(calls)))
    there = {SegmentRef("s", i): scalar for i, scalar in enumerate(scalars)}
    once, results = common(calls), list[fx.Node]()
    with graph.inserting_before(node):
        for member in range(members):
            row = tensors[member * width : (member + 1) * width]
            there |= {SegmentRef("c", i): column for i, column in enumerate(row)}
            its = origins[member * len(calls) : (member + 1) * len(calls)]
            written = _member(graph, calls, there, its, once if member else ())
            results += [written[SegmentRef("c", column)] for column in gives]
    for user in list(node.users):
        place: Any = user.args[1]
        user.replace_all_uses_with(results[place])
        graph.erase_node(user)
    graph.erase_node(node)


def _member(
    graph: fx.Graph,
    calls: Sequence[SegmentCall],
    there: dict[SegmentRef, fx.Node],
    origins: Sequence[Any],
    known: Container[int],
) -> dict[SegmentRef, fx.Node]:
    """Write the calls of one member, of the tensors that are there, but for those ``known`` already; gives what is
    written last in each memory."""
    written: dict[SegmentRef, fx.Node] = {}

    def put(arg: Any) -> Any:
        return there.get(arg, arg) if isinstance(arg, SegmentRef) else arg

    for number, (call, origin) in enumerate(zip(calls, origins, strict=True)):
        if number in known:
            continue
        args, kwargs = fx.node.map_aggregate(call.args, put), fx.node.map_aggregate(call.kwargs, put)
        made = graph.call_function(memory_ops.write if call.op is COPY else call.op, args, kwargs)
        made.meta["shardfx"] = origin
        there[SegmentRef("r", number)] = made
        written[home(calls, SegmentRef("r", number))] = made
    return written
