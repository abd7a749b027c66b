"""waits: each collective is waited for just before the first use of its result, or before too many are in flight.

start = all_reduce(mm, ...)          start = all_reduce(mm, ...)
done = wait_tensor(start)            other = aten.mm(a, b)            overlaps with the transfer
other = aten.mm(a, b)          ->    done = wait_tensor(start)
sum = aten.add(done, other)          sum = aten.add(done, other)

A single number that is needed at the end only (a loss) is computed there, so that nobody is waited for before. A
reduce-scatter keeps its full input live until it is done, and gradients are needed at the end only: it is waited for
when ``under_way`` later ones start. So is a copy to the host, which keeps its source live, where more bytes would be in
flight than ``under_way`` times the largest so far:

away = memory.to_host(x)             away = memory.to_host(x)
kept = memory.stored(away)           next = memory.to_host(y)
next = memory.to_host(y)       ->    kept = memory.stored(away)       x is freed
more = memory.to_host(z)             more = memory.to_host(z)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from shardfx.ir.ops.local_ops import row_of
from shardfx.ir.program.loops.loop_regions import loop_role, regions
from shardfx.ir.program.rank_program import RankProgram, planned_node

from .rank_pass import RankContext, RankPass, waits

REDUCED, COPIED = {"c10d.reduce_scatter_tensor"}, {"memory.to_host", "memory.to_disk"}
"""Transfers whose number, and bytes, in flight are limited, as they keep memory live."""


@dataclass(frozen=True)
class Waits(RankPass):
    """Move each wait, and what unpacks its result, to the first use of that; that for a reduce-scatter, or for a copy
    to the host, to where ``under_way`` later ones, or as many bytes as that many of the largest, have started."""

    name: ClassVar[str] = "waits"
    establishes: ClassVar[frozenset[str]] = frozenset({"WAITS_LATE"})

    under_way: int = 2

    def run(self, program: RankProgram, context: RankContext) -> bool:
        changed = _scalars_last(program)
        nodes = list(program.graph.nodes)
        place = {node: float(i) for i, node in enumerate(nodes)}
        reduced, copied = (
            [n for n in nodes if (row := row_of(n.target)) and row.name in set_] for set_ in (REDUCED, COPIED)
        )
        behind = dict(zip(reduced, reduced[self.under_way :], strict=False))
        behind.update(_in_flight(copied, self.under_way, program))
        inside = regions(nodes)
        for i, node in enumerate(nodes):
            if not waits(node):
                continue
            chain = _unpacking(node, nodes[i + 1 :])
            users = [user for each in chain for user in each.users if user not in chain]
            if not users:
                continue
            later = [behind[sent] for sent in node.all_input_nodes if sent in behind]
            first = _before_loops(min([*users, *later], key=place.__getitem__), node, inside)
            if chain[-1].next is first or first in chain:
                continue
            for each in chain:
                first.prepend(each)
                place[each] = place[first] - 0.5
            changed = True
        return changed


def _scalars_last(program: RankProgram) -> bool:
    """Move computations of scalars from results of collectives to the end, unless they are needed before."""
    nodes, end = list(program.graph.nodes), program.result()
    inside = regions(nodes)
    behind, late = set[fx.Node](), set[fx.Node]()
    for node in nodes:
        if waits(node) or not behind.isdisjoint(node.all_input_nodes):
            behind.add(node)
    for node in reversed(nodes):
        computes = isinstance(node.target, torch._ops.OpOverload) and not inside[node]
        needed = not node.users or any(user is not end and user not in late for user in node.users)
        if computes and not needed and node in behind and not waits(node):
            planned = planned_node(node)
            values = (*planned.operands, *planned.outs) if planned is not None else ()
            if values and all(math.prod(value.shape) == 1 for value in values):
                late.add(node)
    moved = [node for node in nodes if node in late]
    changed = moved != nodes[len(nodes) - 1 - len(moved) : -1]
    for node in moved if changed else ():
        end.prepend(node)
    return changed


def _in_flight(started: Sequence[fx.Node], times: int, program: RankProgram) -> Iterator[tuple[fx.Node, fx.Node]]:
    """The pairs of a transfer and the later one before which it is waited for, so that the bytes in flight are limited
    to ``times`` those of the largest so far."""
    most = there = first = 0
    sizes = [sum(value.local_bytes(program.mesh) for value in each.meta["shardfx"].operands) for each in started]
    for node, nbytes in zip(started, sizes, strict=True):
        most, there = max(most, nbytes), there + nbytes
        while there > times * most:
            yield started[first], node
            there -= sizes[first]
            first += 1


def _before_loops(first: fx.Node, wait: fx.Node, inside: Mapping[fx.Node, tuple[fx.Node, ...]]) -> fx.Node:
    """The latest position of a wait for a transfer that starts before a loop, or in it: not within another loop, where
    it would run in each iteration; in an action at its end."""
    here, there = inside[wait], inside[first]
    if there[: len(here)] == here:
        return there[len(here)] if len(there) > len(here) else first
    if loop_role(here[-1]) != "unit":
        return wait  # its loop is over by then
    end = wait
    while len(inside[end]) >= len(here):
        end = end.next
    return end


def _unpacking(wait: fx.Node, following: list[fx.Node]) -> list[fx.Node]:
    """The wait, and the calls that only unpack its result, for the same planned node, beside a rank's own rows."""
    chain, planned = [wait], wait.meta.get("shardfx")
    for node in following:
        row = row_of(node.target)
        if planned is None or node.meta.get("shardfx") is not planned or row is None:
            break
        if not (row.moves or row.name == "getitem") or set(chain).isdisjoint(node.all_input_nodes):
            break
        chain.append(node)
    return chain
