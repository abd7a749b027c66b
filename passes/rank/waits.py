"""waits: a collective is waited for just before its result is first needed, or before too many are under way.

start = all_reduce(mm, ...)          start = all_reduce(mm, ...)
done = wait_tensor(start)            other = aten.mm(a, b)            computed while it travels
other = aten.mm(a, b)          ->    done = wait_tensor(start)
sum = aten.add(done, other)          sum = aten.add(done, other)

A reduce-scatter holds all that a rank puts in until it is done, and gradients are needed at the end only: it is waited
for when ``under_way`` later ones start.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from shardfx.ir.ops.local_ops import row_of
from shardfx.ir.program.looped.within_turns import part_in_turns, regions
from shardfx.ir.program.rank_program import RankProgram

from .rank_pass import RankContext, RankPass


@dataclass(frozen=True)
class Waits(RankPass):
    """Move each wait, and what unpacks its result, to the first use of that; a reduce-scatter's to where ``under_way``
    later ones have started."""

    name: ClassVar[str] = "waits"
    establishes: ClassVar[frozenset[str]] = frozenset({"WAITS_LATE"})

    under_way: int = 2

    def run(self, program: RankProgram, context: RankContext) -> bool:
        """Move the waits."""
        nodes = list(program.graph.nodes)
        place = {node: float(i) for i, node in enumerate(nodes)}
        scatters = [node for node in nodes if _is(node, "c10d.reduce_scatter_tensor")]
        behind = dict(zip(scatters, scatters[self.under_way :], strict=False))
        inside, changed = regions(nodes), False
        for i, node in enumerate(nodes):
            if not _waits(node):
                continue
            chain = _behind(node, nodes[i + 1 :])
            users = [user for each in chain for user in each.users if user not in chain]
            if not users:
                continue
            later = [behind[sent] for sent in node.all_input_nodes if sent in behind]
            first = _before_turns(min([*users, *later], key=place.__getitem__), node, inside)
            if chain[-1].next is first or first in chain:
                continue
            for each in chain:
                first.prepend(each)
                place[each] = place[first] - 0.5
            changed = True
        return changed


def _before_turns(first: fx.Node, wait: fx.Node, inside: Mapping[fx.Node, tuple[fx.Node, ...]]) -> fx.Node:
    """Where to wait at the latest for what started before turns, or in them: not in others, where it would be done in
    each, and in a unit at its end."""
    here, there = inside[wait], inside[first]
    if there[: len(here)] != here:
        return _end(wait, inside) if part_in_turns(here[-1]) == "unit" else wait  # its turns are over by then
    return there[len(here)] if len(there) > len(here) else first


def _end(node: fx.Node, inside: Mapping[fx.Node, tuple[fx.Node, ...]]) -> fx.Node:
    """What stands behind the unit that a call is in."""
    end = node
    while len(inside[end]) >= len(inside[node]):
        end = end.next
    return end


def _behind(wait: fx.Node, following: list[fx.Node]) -> list[fx.Node]:
    """The wait, and what is made of nothing but its result for the same op of the plan: unpacking."""
    chain = [wait]
    made = wait.meta.get("shardfx")
    for node in following:
        if made is None or node.meta.get("shardfx") is not made:
            break
        row = row_of(node.target)
        if row is None or not (row.moves or row.name == "getitem") or not set(node.all_input_nodes) <= set(chain):
            break
        chain.append(node)
    return chain


def _waits(node: fx.Node) -> bool:
    row = row_of(node.target) if node.op == "call_function" else None
    return row is not None and row.waits


def _is(node: fx.Node, name: str) -> bool:
    row = row_of(node.target) if node.op == "call_function" else None
    return row is not None and row.name == name
