"""Validation of a rank's program: well-formed calls, no reads of overwritten memory, no aliased results.

A program's values are immutable. Destinations make that a condition on memory, which this module checks, so that
whoever reads, proves or costs a program may take each call for its plain form (:mod:`.plain`):

- every node is a call with what its signature takes, of what stands before it;
- nothing is read after its memory was overwritten, nothing is written into the memory of an input;
- live arena slots do not overlap, and nothing leaves in one (:mod:`.arena_layout`);
- live parts of one buffer do not overlap, and ``memory.join`` joins just the parts that were written;
- no two results, and no result and input, share memory, where the result becomes its receiver's own;
- what was only started, a collective or a copy between memories, is not touched before it was waited for;
- what loops and schedule actions use is visible there (:mod:`.scopes`);
- offloaded values are fetched before use, and leave where they belong.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NoReturn

import torch
from torch import fx

from shardfx.ir.errors import DOES_NOT_RUN, Error
from shardfx.ir.graph import Node, OutputKind
from shardfx.ir.ops import memory_ops
from shardfx.ir.ops.computing.fused_update import run_of
from shardfx.ir.ops.computing.row_update import step_rows, wrong_rows
from shardfx.ir.ops.computing.segment import misfit, segment
from shardfx.ir.ops.local_ops import OVERWRITING, row_of
from shardfx.ir.ops.pools import transfer
from shardfx.ir.ops.table import LocalOp
from shardfx.ir.ops.traits import storage_offset

from .aliasing import Aliasing, ResultOwnership, renewed
from .arena_layout import ArenaCheck
from .buffer_parts import BufferParts
from .loops.loop_regions import is_induction_variable
from .plain import written_out
from .rank_program import RankProgram
from .scopes import ScopeCheck

OPS = ("placeholder", "get_attr", "call_function", "output")


def malformed(node: fx.Node) -> str:
    """What is malformed in a node; empty if nothing is."""
    if node.op not in OPS:
        return f"a {node.op} node is no part of a rank's program"
    if node.op != "call_function":
        return ""
    if not callable(node.target):
        return f"{node.target!r} is no function"
    row = row_of(node.target)
    if row is not None and (wrong := _unbound(node)):
        return f"{node.name}: {wrong}"
    if storage_offset(node.target, node.args, node.kwargs) is not None:
        return f"{node.name} has a storage offset, which counts from the begin of memory that it may share with others"
    if node.target in (segment, step_rows):
        return _malformed_segment(node)
    if row is not None and row.group is not None and not isinstance((*node.args, *[None] * 9)[row.group], str):
        return f"{node.name} names no group of ranks as its argument {row.group}"
    return ""


def _unbound(node: fx.Node) -> str:
    """How the arguments of one of our functions do not fit its signature; empty if they do. Those of torch's ops are
    checked where the call is run on fake tensors."""
    known = _signature(node.target)
    try:
        if known is not None:
            known.bind(*node.args, **node.kwargs)
    except TypeError as error:
        return str(error)
    return ""


@cache
def _signature(target: Callable[..., Any]) -> inspect.Signature | None:
    """The signature of a function; None of what has none, as torch's ops."""
    return inspect.signature(target) if inspect.isfunction(target) else None


def _malformed_segment(node: fx.Node) -> str:
    """What is malformed in a segment of an optimizer's step, and in uses of its results."""
    if node.kwargs:
        return f"{node.name} takes its arguments by place"
    arguments: Any = node.args
    calls, gives, members, tensors, scalars, *fused = arguments
    rows = node.target is step_rows
    wrong = wrong_rows(calls, gives, members, len(tensors), len(scalars)) if rows else ""
    wrong = wrong if rows else misfit(calls, gives, members, tensors, len(scalars))
    if wrong:
        return f"{node.name} is no segment: {wrong}"
    if fused and list(fused[0]) != run_of(calls, gives):
        return f"{node.name} runs {fused[0][-1:]}, which does not compute its calls"
    results = range(len(gives) * members)
    for user in node.users:
        if user.target is not operator.getitem or user.args[1] not in results:
            return f"{user.name} takes another thing of {node.name} than one of its {len(results)} results"
    return ""


OVER = frozenset(OVERWRITING.values())
"""Pointwise ops in the form that writes into an operand's memory."""


PLACES = ("memory.slot", "memory.part", "memory.join", "loop.begin", "loop.end")
"""What takes memory as memory."""
RENEWING = (memory_ops.write, memory_ops.write_part, transfer.put)
"""What may write a result where it is stored."""
KINDS = {"c10d.all_reduce_": "c10d.all_reduce", "c10d.all_gather_into": "c10d.all_gather_into_tensor"}
"""What is the same collective, seen from the other ranks."""


class ProgramError(Error):
    """A program that is not well formed: at which node, and on which line of the model."""

    node: str = ""
    line: str = ""


def collective_order(program: RankProgram) -> list[str]:
    """The sequence of collectives by group: the same on all its ranks."""
    found = []
    for node in program.graph.nodes:
        row = row_of(node.target)
        if row is not None and row.group is not None:
            found.append(f"{KINDS.get(row.name, row.name)} on {node.args[row.group]}")
    return found


def validate_program(program: RankProgram, after: str | None = None, *, ends: bool = True) -> None:
    """Check ``program``; ``after`` is the rank pass that left it. ``ends``: results must be their receivers' own.
    A :class:`ProgramError` names the rank, the call, and its line of the model."""
    check = _ProgramCheck(program, after, ends)
    try:
        check.run()
    except ProgramError:
        raise
    except DOES_NOT_RUN as error:
        check._fail(f"{check.at.name} has arguments that it does not take: {error}", check.at)


class _ProgramCheck:
    def __init__(self, program: RankProgram, after: str | None, ends: bool) -> None:
        self.program, self.after, self.ends = program, after, ends
        self.nodes = list(program.graph.nodes)
        self.at = self.nodes[-1]
        """The call that is being checked."""

    def _prepare(self) -> None:
        self._form()
        self.program = program = written_out(self.program)
        self.nodes = list(program.graph.nodes)
        self.away: dict[fx.Node, str] = {}
        """In which pool values lie that are not in the device's memory."""
        self.share = Aliasing(self.nodes)
        self.renewed = renewed(program)
        self.dead: dict[fx.Node, fx.Node] = {}
        """Values whose memory was overwritten, and by which call."""
        self.live: dict[fx.Node, list[fx.Node]] = {}
        """By root: the values there so far."""
        self.pending: set[fx.Node] = set()
        self.standing = ScopeCheck(self.nodes, self.share, self._fail)
        self.arena = ArenaCheck(self.nodes, self.share, self._fail)
        self.slots = BufferParts(self.share)

    def _form(self) -> None:
        """Check that every node is well formed, and uses only values before it."""
        there: set[fx.Node] = set()
        for node in self.nodes:
            self.at = node
            if what := malformed(node):
                self._fail(what, node)
            if not there.issuperset(node.all_input_nodes):
                late = next(used for used in node.all_input_nodes if used not in there)
                self._fail(f"{node.name} uses {late.name}, which is not there yet", node)
            there.add(node)

    def run(self) -> None:
        self._prepare()
        inputs = iter(self.program.inputs)
        for node in self.nodes:
            self.at = node
            if node.op == "placeholder":
                inp = next(inputs, None)
                if inp is not None and inp.pool:
                    self.away[node] = inp.pool.partition(":")[0]
                self._define(node)
            elif node.op == "output":
                self._output(node)
            else:
                self._call(node)
        self.standing.end()

    def _call(self, node: fx.Node) -> None:
        row = self.share.row(node)
        self.standing.take(node)
        self.arena.take(node)
        into = row.destination(node) if row is not None else None
        target = node.target
        if row is None and isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable:
            self._fail(f"{target} changes a tensor in place", node, expected="an op that does not, or a destination")
        read = row is not None and (row.reads_into or (isinstance(row.into, str) and into in node.args))
        keeps: Any = (() if into is None or read else (into,)) if row is None or row.loop != "closes" else node.args[2]
        for used in node.all_input_nodes:
            if used in keeps:
                continue
            if used in self.dead:
                self._fail(
                    f"{used.name} is read after its memory was written over",
                    node,
                    expected=f"{used.name} read before {self.dead[used].name}",
                    got=f"{self.dead[used].format_node()}",
                )
            takes = row is not None and (row.waits or (row.fetches and used in self.away))
            if used in self.pending and not takes:
                self._fail(f"{used.name} is used before it is waited for", node, expected=f"a wait for {used.name}")
            if used in self.away and not (row is not None and row.fetches) and not self._beside(node, row):
                self._fail(
                    f"{used.name} is read, which lies in the memory of the {self.away[used]}",
                    node,
                    expected="memory.to_device of it, and memory.arrived",
                )
            source = self.share.row(used)
            goes_on = row is not None and row.loop == "collects" and used is into and self._filled(used)
            place = row is not None and row.name in PLACES and (row.name != "memory.join" or used is node.args[0])
            if source is not None and source.memory and not goes_on and not place:
                self._fail(f"{used.name} is read, which is memory without content", node)
        if row is not None and row.name == "memory.part":
            self.slots.part(node)
        if row is not None and row.name == "getitem" and (what := self.slots.unpacked(node)):
            self._fail(what, node)
        if into is not None:
            self._write(node, into)
        if row is not None and row.name == "memory.join":
            self._join(node)
        if row is not None and (row.starts or row.function is transfer.stored):
            self.pending.add(node)
        self._pool(node, row)
        self._define(node)

    def _filled(self, memory: fx.Node) -> bool:
        """Whether memory is initialized."""
        source = memory.args[0] if memory.target is memory_ops.part else memory
        row = self.share.row(source) if isinstance(source, fx.Node) else None
        return row is not None and row.filled

    def _pool(self, node: fx.Node, row: LocalOp | None) -> None:
        """Which pool the result of a call lies in: that of its row, or of the operands that it is made of there."""
        source = row.destination(node) if row is not None else None
        if source is None and (row is None or not row.fetches or row.waits):
            source = next((used for used in node.all_input_nodes if used in self.away), None)
        pool = (row.pool if row is not None else "") or (self.away.get(source, "") if source is not None else "")
        if pool:
            self.away[node] = pool

    def _beside(self, node: fx.Node, row: LocalOp | None) -> bool:
        """Whether a call runs off the device: all its operands lie there."""
        tensors = (used for used in node.all_input_nodes if not is_induction_variable(used))
        return not (row is not None and row.pool) and all(used in self.away for used in tensors)

    def _define(self, node: fx.Node) -> None:
        self.slots.see(node)
        self.live.setdefault(self.share.root(node), []).append(node)

    def _write(self, node: fx.Node, into: fx.Node) -> None:
        """Record a write: the values that were in this memory are gone."""
        root = self.share.root(into)
        if not self.share.owned(into) and not (root in self.renewed and node.target in (*OVER, *RENEWING)):
            self._fail(
                f"{into.name} is written over, which is an input's memory",
                node,
                expected="memory that this program made: memory.empty, or a result that nothing else needs",
                got=into.format_node() or into.name,
            )
        if _reads_too(node, into):
            self._fail(f"{node.name} writes over {into.name}, which it reads", node, expected="other memory")
        slot = self.slots.get(into)
        beside = self.arena.overlapping(into)
        for there in (into, *beside):
            if (started := self.share.sender(there, node)) is not None:
                self._fail(
                    f"{there.name} is written over while {started.name} sends it",
                    node,
                    expected=f"a wait for {started.name}",
                )
        for other in (each for seen in (*self.share.seen_in(into), *beside) for each in self.live.get(seen, ())):
            if other in node.all_input_nodes and other is not into and not self.slots.apart(other, slot):
                self._fail(f"{node.name} writes over {other.name}, which it reads", node, expected="other memory")
            if other is into and slot is None:
                self.dead[other] = node
                continue
            if not self.slots.apart(other, slot):
                self.dead.setdefault(other, node)
        if slot is not None:
            self.slots.put(node, into, slot)

    def _join(self, node: fx.Node) -> None:
        """Check a join: the joined values lie in this memory, contiguous, and fill it."""
        args: Any = node.args
        flat, values, shards = args
        at = 0
        for value in values:
            slot = self.slots.holding(value)
            if slot is None or slot[0] is not flat or slot[1][:2] != (shards, at):
                self._fail(
                    f"{value.name} does not lie where {node.name} joins it",
                    node,
                    expected=f"element {at} of each of {shards} shards of {flat}",
                    got="other memory" if slot is None else f"element {slot[1][1]} of {slot[1][0]} shards of {slot[0]}",
                )
            at += slot[1][2]
        joined = flat.args if isinstance(flat, fx.Node) else ()
        size = memory_ops.shape_asked(flat.target, joined) if joined else None
        if isinstance(size, (list, tuple)) and len(size) == 1 and size[0] != at * shards:
            self._fail(f"{node.name} joins {at} elements of each shard", node, expected=f"all {size[0]} of {flat}")

    def _output(self, node: fx.Node) -> None:
        args = node.args[0]
        results: Sequence[Any] = args if isinstance(args, (list, tuple)) else [args]
        given_away = ResultOwnership(self.share, self.renewed)
        stored = {inp.name: inp.pool.partition(":")[0] for inp in self.program.inputs}
        for output, result in zip(self.program.outputs, results, strict=False):
            if not isinstance(result, fx.Node):
                continue
            if result in self.dead:
                self._fail(f"{result.name} is returned after its memory was written over", self.dead[result])
            row = self.share.row(result)
            is_stored = row is not None and row.function is transfer.stored and output.kind is OutputKind.STATE
            if result in self.pending and not is_stored:
                self._fail(f"{result.name} is returned before it is waited for", node)
            if row is not None and row.memory:
                self._fail(f"{result.name} is returned, which is memory without content", node)
            if self.arena.holds(result):
                self._fail(f"{result.name} is returned, which lies in an arena", node, expected="memory of its own")
            belongs = stored.get(output.name) if output.kind.is_given_away else ""
            if belongs is not None and self.away.get(result, "") != belongs:  # else the program does not take it
                self._fail(
                    f"{output.kind} {output.name} leaves in another pool of memory than it belongs to",
                    result,
                    expected=belongs or "the device's memory",
                    got=self.away.get(result) or "the device's memory",
                )
            if self.ends and not given_away.take(result) and output.kind.is_given_away:
                self._fail(
                    f"{output.kind} {output.name} shares the memory of an input or of another result",
                    result,
                    expected="memory of its own: memory.own",
                    got=result.format_node() or result.name,
                )

    def _fail(self, what: str, node: fx.Node, *, expected: object = None, got: object = None) -> NoReturn:
        made = node.meta.get("shardfx")
        line = str(made.where) if isinstance(made, Node) else ""
        error = ProgramError(
            f"the program is wrong after rank pass {self.after!r}: {what}" if self.after else what,
            where="; ".join(part for part in (f"rank {self.program.rank}", f"node {node.name!r}", line) if part),
            expected=expected,
            got=got,
            remedy=f"rank pass {self.after!r} left it so: mend it there" if self.after else None,
        )
        error.node, error.line = node.name, line
        raise error


def _reads_too(node: fx.Node, into: fx.Node) -> bool:
    """Whether a call also reads its destination as another operand, not element by element."""
    operands: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), operands.append)
    tags = node.target.tags if isinstance(node.target, torch._ops.OpOverload) else ()
    return operands.count(into) > 1 and torch.Tag.pointwise not in tags
