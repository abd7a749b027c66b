"""Programs through ``torch.compile``: as one module, or as segments between collectives and messages.

    x = c10d.wait_tensor(receive)              received: as it is
    h = aten.addmm(b, x, w)
    y = aten.relu(h)                     ->    y = segment(b, x, w)
    stage.send(y, 1, 0, iteration, ...)             sent: as it is

A real rank runs its program as one module, collectives and all; real ranks with stages of a pipeline or offloaded
values, and virtual ranks, run segments, and a driver in Python. Communication is done as an engine does it
(:class:`shardfx.ir.program.source.CallOverrides`), and so are calls that depend on an induction variable: a segment is
the same module in each iteration of its loop. Copies between memories are outside segments, too, for ``torch.compile``
would plan that memory as any other.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from shardfx.ir.ops.local_ops import row_of
from shardfx.ir.program.loops.loop_regions import DELIMITERS, is_induction_variable, loop_role
from shardfx.ir.program.rank_program import RankProgram
from shardfx.ir.program.source import CallOverrides, ProgramSource, write_source

from .rank_errors import target_name

c10d = torch.ops._c10d_functional
Write = Callable[[RankProgram, CallOverrides], ProgramSource]
"""A function that writes a program's source, with the overrides of an engine."""


def in_order(options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Options of ``torch.compile`` with those for whole steps (:data:`.inductor_passes.OPTIONS`), where they are
    Inductor's; a mode is written out as its own options."""
    mode, own = options.get("mode"), options.get("options")
    if options.get("backend", "inductor") != "inductor" or (mode is not None and own is not None):
        return options
    from .inductor_passes import OPTIONS  # Inductor, whose import takes long, is needed here alone

    of_mode = {} if mode is None else torch._inductor.list_mode_options(mode, options.get("dynamic"))
    rest = {name: option for name, option in options.items() if name != "mode"}
    return {**rest, "options": {**OPTIONS, **of_mode, **(own or {})}}


def compiled(options: Mapping[str, Any], apart: bool) -> Write:
    """A writer that compiles each program by ``torch.compile``, as one module, or ``apart``, in segments."""
    given = in_order(options)

    def written(program: RankProgram, forms: CallOverrides) -> ProgramSource:
        if apart:
            return segmented(program, lambda module: torch.compile(module, **given), forms)
        return ProgramSource("", torch.compile(program.module(), **given), (), "")

    return written


def stands_alone(node: fx.Node) -> bool:
    """Whether a call is outside segments: a collective, a copy between memories or its wait, one that depends on an
    iteration number, or the begin or end of a loop."""
    if loop_role(node) in DELIMITERS:
        return True
    row = row_of(node.target) if node.op == "call_function" else None
    together = node.target is c10d.wait_tensor.default or (row is not None and row.group is not None)
    copies = row is not None and (row.copies or (row.fetches and row.waits))
    return together or copies or any(map(is_induction_variable, (node, *node.all_input_nodes)))


def segmented(program: RankProgram, compile_: Callable[[fx.GraphModule], Any], forms: CallOverrides) -> ProgramSource:
    """The source of a program with its segments compiled by ``compile_``; an error in a segment names its first
    call."""
    graph, env, segment = fx.Graph(), dict[fx.Node, fx.Node](), list[fx.Node]()

    def close() -> None:
        """End the current segment: compile the calls since the last one outside segments as a module."""
        if not segment:
            return
        inside, body, local = set(segment), fx.Graph(), dict[fx.Node, fx.Node]()
        takes = dict.fromkeys(used for node in segment for used in node.all_input_nodes if used not in inside)
        for used in takes:
            local[used] = body.placeholder(used.name)
        for node in segment:
            local[node] = body.node_copy(node, local.__getitem__)
        gives = [node for node in segment if any(user not in inside for user in node.users)]
        body.output(tuple(local[node] for node in gives))
        constants = {str(node.target): program.constants[str(node.target)] for node in segment if node.op == "get_attr"}
        module = compile_(fx.GraphModule(constants, body))

        def run(*inputs: Any) -> Any:
            return module(*inputs)

        run.__qualname__ = target_name(segment[0])
        call = graph.create_node("call_function", run, tuple(env[used] for used in takes), name=segment[0].name)
        call.meta = dict(segment[0].meta)
        for i, node in enumerate(gives):
            env[node] = graph.create_node("call_function", operator.getitem, (call, i), name=node.name)
        segment.clear()

    for node in program.graph.nodes:
        if node.op in ("call_function", "get_attr") and not stands_alone(node):
            segment.append(node)
        else:
            close()
            env[node] = graph.node_copy(node, env.__getitem__)
    return write_source(replace(program, graph=graph), forms)
