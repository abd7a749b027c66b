"""waits: a collective is waited for just before its result is first needed, or before too many are under way.

start = all_reduce(mm, ...)          start = all_reduce(mm, ...)
done = wait_tensor(start)            other = aten.mm(a, b)            computed while it travels
other = aten.mm(a, b)          ->    done = wait_tensor(start)
sum = aten.add(done, other)          sum = aten.add(done, other)

What is made of single numbers, and needed at the end only (a loss), is computed there, so that nobody is waited for
before. A reduce-scatter holds all that a rank puts in until it is done, and gradients are needed at the end only: it is
waited for when ``under_way`` later ones start. So is a copy to the host, which holds its source, where more bytes would
be under way than ``under_way`` times the largest so far:

away = memory.to_host(x)             away = memory.to_host(x)
kept = memory.stored(away)           next = memory.to_host(y)
next = memory.to_host(y)       ->    kept = memory.stored(away)       x is freed
more = memory.to_host(z)             more = memory.to_host(z)
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from shardfx.ir.graph import Node as PlannedNode
from shardfx.ir.ops.local_ops import row_of
from shardfx.ir.program.loops.loop_regions import loop_role, regions
from shardfx.ir.program.rank_program import RankProgram

from .rank_pass import RankContext, RankPass

REDUCED, COPIED = {"c10d.reduce_scatter_tensor"}, {"memory.to_host", "memory.to_disk"}
"""Of what only so many, and only so many bytes, are under way at a time, for they hold memory."""


@dataclass(frozen=True)
class Waits(RankPass):
    """Move each wait, and what unpacks its result, to the first use of that; that for a reduce-scatter, or for a copy
    to the host, to where ``under_way`` later ones, or as many bytes as that many of the largest, have started."""

    name: ClassVar[str] = "waits"
    establishes: ClassVar[frozenset[str]] = frozenset({"WAITS_LATE"})

    under_way: int = 2

    def run(self, program: RankProgram, context: RankContext) -> bool:
        """Move the waits."""
        changed = _numbers_last(program)
        nodes = list(program.graph.nodes)
        place = {node: float(i) for i, node in enumerate(nodes)}
        behind: dict[fx.Node, fx.Node] = {}
        reduced, copied = ([node for node in nodes if _is(node, names)] for names in (REDUCED, COPIED))
        behind.update(zip(reduced, reduced[self.under_way :], strict=False))
        behind.update(_room(copied, self.under_way, program))
        inside = regions(nodes)
        for i, node in enumerate(nodes):
            if not _waits(node):
                continue
            chain = _behind(node, nodes[i + 1 :])
            users = [user for each in chain for user in each.users if user not in chain]
            if not users:
                continue
            later = [behind[sent] for sent in node.all_input_nodes if sent in behind]
            first = _before_iterations(min([*users, *later], key=place.__getitem__), node, inside)
            if chain[-1].next is first or first in chain:
                continue
            for each in chain:
                first.prepend(each)
                place[each] = place[first] - 0.5
            changed = True
        return changed


def _numbers_last(program: RankProgram) -> bool:
    """MixedPrecision at the end what is one number, made of others that collectives bring, and needed for nothing
    else."""
    nodes, end = list(program.graph.nodes), program.result()
    inside = regions(nodes)
    behind: set[fx.Node] = set()
    """What is made of results of collectives."""
    for node in nodes:
        if _waits(node) or not behind.isdisjoint(node.all_input_nodes):
            behind.add(node)
    late: set[fx.Node] = set()
    for node in reversed(nodes):
        planned = node.meta.get("shardfx")
        values = (*planned.operands, *planned.outs) if isinstance(planned, PlannedNode) else ()
        number = bool(values) and all(math.prod(value.shape) == 1 for value in values)
        computes = isinstance(node.target, torch._ops.OpOverload) and not _waits(node) and not inside[node]
        if number and computes and node in behind and node.users and all(u is end or u in late for u in node.users):
            late.add(node)
    moved = [node for node in nodes if node in late]
    changed = moved != nodes[len(nodes) - 1 - len(moved) : -1]
    for node in moved if changed else ():
        end.prepend(node)
    return changed


def _room(started: Sequence[fx.Node], times: int, program: RankProgram) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Of what was started: before which later one it is waited for, lest more bytes are under way than of so many of
    the largest so far."""
    most = there = first = 0
    sizes = [_nbytes(node, program) for node in started]
    for node, nbytes in zip(started, sizes, strict=True):
        most, there = max(most, nbytes), there + nbytes
        while there > times * most:
            yield started[first], node
            there -= sizes[first]
            first += 1


def _nbytes(started: fx.Node, program: RankProgram) -> int:
    """Of what a call starts to send or to copy, on the rank that holds most."""
    planned = started.meta["shardfx"]
    return sum(value.local_bytes(program.mesh) for value in planned.operands)


def _before_iterations(first: fx.Node, wait: fx.Node, inside: Mapping[fx.Node, tuple[fx.Node, ...]]) -> fx.Node:
    """Where to wait at the latest for what started before iterations, or in them: not in others, where it would be done
    in
    each, and in a unit at its end."""
    here, there = inside[wait], inside[first]
    if there[: len(here)] != here:
        return _end(wait, inside) if loop_role(here[-1]) == "unit" else wait  # its iterations are over by then
    return there[len(here)] if len(there) > len(here) else first


def _end(node: fx.Node, inside: Mapping[fx.Node, tuple[fx.Node, ...]]) -> fx.Node:
    """What stands behind the unit that a call is in."""
    end = node
    while len(inside[end]) >= len(inside[node]):
        end = end.next
    return end


def _behind(wait: fx.Node, following: list[fx.Node]) -> list[fx.Node]:
    """The wait, and what only moves its result, for the same op of the plan: unpacking, beside rows of a rank's own."""
    chain = [wait]
    made = wait.meta.get("shardfx")
    for node in following:
        if made is None or node.meta.get("shardfx") is not made:
            break
        row = row_of(node.target)
        if row is None or not (row.moves or row.name == "getitem") or set(chain).isdisjoint(node.all_input_nodes):
            break
        chain.append(node)
    return chain


def _waits(node: fx.Node) -> bool:
    row = row_of(node.target) if node.op == "call_function" else None
    return row is not None and row.waits


def _is(node: fx.Node, names: Collection[str]) -> bool:
    row = row_of(node.target) if node.op == "call_function" else None
    return row is not None and row.name in names
