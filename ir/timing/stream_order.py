"""Stream order: the order of starts and waits of transfers among a rank's compute.

    compute                mm_3
    tp             start   all_reduce
    compute                mm_4
    tp             wait    all_reduce
    compute                add_1

On NCCL each group of axes is a stream of its own, and a wait blocks the compute stream, not the host. So
communication is hidden by compute between its start and its wait, and by nothing else.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import fx

from shardfx.ir.graph import Node
from shardfx.ir.ops.local_ops import row_of
from shardfx.ir.ops.traits import is_view
from shardfx.ir.program.loops.loop_regions import loop_role

COMPUTE = "compute"


class Event(NamedTuple):
    """An event of a rank: a call, its stream, and whether it computes, or starts, sends or waits for a transfer."""

    stream: str
    does: str
    call: fx.Node


def started_call(started: Any) -> fx.Node:
    """The call that started the transfer that a wait is for."""
    while started.target is operator.getitem:
        started = started.args[0]
    made: fx.Node = started
    return made


def link_of(call: fx.Node) -> str:
    """The link of a transfer that a call starts or sends: the axes of its group, or the direction of a copy."""
    row = row_of(call.target)
    assert row is not None
    if row.copies:
        return "to host" if row.holds else "from host"
    name = str(call.args[row.group or 0])
    axes = name.partition("/")[2].partition("@")[0].replace(".", ", ")
    if row.message == "sends":
        return f"{axes}, to {call.args[1]}"
    return f"{axes}, from {call.args[3]}" if row.message else axes


def call_label(call: fx.Node) -> str:
    """The label of a call: its kind, the value in the planned graph, the module."""
    row, planned = row_of(call.target), call.meta.get("shardfx")
    kind = row.name.rpartition(".")[2].rstrip("_") if row is not None else str(call.target)
    where = f" {planned.where.module}" if isinstance(planned, Node) and planned.where.module else ""
    return f"{kind} %{call.name}{where}"


def moves_only(call: fx.Node) -> bool:
    """Whether a call takes negligible time: views, memory ops, unpacking of received values."""
    row = row_of(call.target)
    if row is not None and row.name != "update.segment":
        return row.moves or row.memory or row.shares or bool(loop_role(call))
    planned = call.meta.get("shardfx")
    return isinstance(planned, Node) and planned.op is call.target and is_view(planned)


def stream_order(calls: Iterable[fx.Node]) -> list[Event]:
    """The events of a rank in execution order, without calls that only move elements."""
    made = []
    for call in calls:
        row = row_of(call.target)
        if row is not None and row.waits:
            begun = started_call(call.args[0])
            made.append(Event(link_of(begun), "wait", begun))
        elif row is not None and row.message == "sends":
            made.append(Event(link_of(call), "send", call))
        elif row is not None and row.starts:
            made.append(Event(link_of(call), "start", call))
        elif not moves_only(call):
            made.append(Event(COMPUTE, COMPUTE, call))
    return made
