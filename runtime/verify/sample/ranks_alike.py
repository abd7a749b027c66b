"""Ranks that do the same on the same: of many ranks, few are run, each for all that are like it.

Where inputs are the same along an axis, and programs do not depend on the coordinate along it (random masks are drawn
for ranks that are alike as for the one that is run), ranks that differ in it alone hold the same at every step: what
they add is so many times what one adds, and what they gather is as many copies. So a rank whose program somebody
changed is run beside one rank of each kind: of ranks that share none of its coordinates, of those that share one, and
so on: four ranks where there are two such axes, however long these are.

What ranks get of a collective each for themselves (a piece of a gradient that is stored in pieces) is made of what
all send: the ranks that are run get theirs, of the others there is none. So it is as long as nothing that is made of
it is asked of the others: it may be given, updated with, and sent along other axes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import fx

from shardfx.ir.graph import Graph, Input, InputKind
from shardfx.ir.mesh import Mesh
from shardfx.ir.ops.dropout import dropout
from shardfx.ir.ops.local_ops import row_of
from shardfx.ir.program.plain import plain
from shardfx.ir.program.rank_program import RankProgram
from shardfx.ir.shards import Shards
from shardfx.ir.spec import Spec
from shardfx.runtime.rendezvous import Request
from shardfx.runtime.verify.families.family import Family, axes_of, families
from shardfx.runtime.verify.families.varying import leaves
from shardfx.runtime.virtual.collectives import alike, own
from shardfx.runtime.virtual.virtual_engine import MeetingGroups

Tensor = torch.Tensor


SAME_FOR_ALL = ("all_reduce", "all_gather_into_tensor")
"""Collectives of which all members get the same."""


@dataclass(frozen=True)
class RanksAlike:
    """Which ranks are run for all.

    Args:
        apart: by axis along which ranks are alike, the coordinates of ranks that may be another kind.
    """

    mesh: Mesh
    apart: Mapping[str, frozenset[int]]

    @cached_property
    def _at(self) -> dict[str, list[int]]:
        """By axis and coordinate: the coordinate of the rank that is run."""
        found = {}
        for axis in self.mesh.space:
            each = range(axis.size)
            apart = self.apart.get(axis.name, frozenset(each))
            other = next((i for i in each if i not in apart), 0)
            found[axis.name] = [i if i in apart else other for i in each]
        return found

    def of(self, rank: int) -> int:
        """The rank that is run for a rank."""
        return self.mesh.rank({name: self._at[name][i] for name, i in self.mesh.coords(rank).items()})

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Those that are run."""
        return tuple(sorted({self.of(rank) for rank in range(self.mesh.size)}))

    def same(self, whole: Tensor, spec: Spec) -> Tensor:
        """A tensor of which ranks that are alike hold the same piece: that of the rank which is run for them."""
        shards = Shards.of(spec, tuple(whole.shape), self.mesh)
        pieces = (shards.by_rank[self.of(shards.first_rank(i))] for i in range(shards.count))
        return shards.join([shards.cut(whole, piece) for piece in pieces])


class GroupsAlike(MeetingGroups):
    """Groups of which the ranks that are run meet for all members."""

    def __init__(self, which: RanksAlike) -> None:
        super().__init__(which.mesh)
        self._which = which

    def here(self, members: Sequence[int]) -> Sequence[int]:
        """The ranks that are run for the members of a group."""
        return tuple(dict.fromkeys(self._which.of(rank) for rank in members))

    def perform(
        self, requests: Sequence[Request], tensors: Sequence[Tensor], into: Sequence[Tensor | None]
    ) -> list[Tensor]:
        """Do a collective on the tensors of the ranks that are run, each as often as it stands for a member."""
        members = self.known(requests[0].group)
        here = self.here(members)
        if here == members:
            return super().perform(requests, tensors, into)
        held = dict(zip(here, zip(requests, tensors, strict=True), strict=True))
        asked, sent = zip(*(held[self._which.of(rank)] for rank in members), strict=True)
        same = alike(requests[0], sent)
        got = [same.clone() for _ in here] if same is not None else _of(here, members, own(asked, sent))
        return [made if at is None else at.copy_(made.view(at.shape)) for made, at in zip(got, into, strict=True)]


def _of(ranks: Sequence[int], members: Sequence[int], got: Sequence[Tensor]) -> list[Tensor]:
    return [got[members.index(rank)] for rank in ranks]


def ranks_alike(graph: Graph, program: Callable[[Any], RankProgram], changed: Iterable[int]) -> RanksAlike | None:
    """The ranks of a plan that are alike but for ``changed`` ones; None where all have to be run.

    Args:
        program: writes the plan's own program of a rank, or of ranks together.
    """
    mesh = graph.mesh
    axes = {axis.name for axis in mesh.space if axis.size > 2}
    if graph.pipeline is not None:
        axes.discard(graph.pipeline.axis)
    for value in graph.values():
        axes -= {a for cut in value.spec.dims if cut.rows is not None for a in cut.axes} if value.spec else set()
    for given in graph.inputs:
        if given.kind is InputKind.CONSTANT:
            axes -= {*_spec(given).axes}
    if not axes:
        return None
    found = list(families(lambda rank: plain(program(rank)), [range(mesh.size)]))
    axes -= axes_of({rank: i for i, family in enumerate(found) for rank in family.ranks}, mesh)
    for family in found:
        axes -= _varying(family, mesh) | _asked_again(family, mesh)
    coords = [mesh.coords(rank) for rank in changed] or [mesh.coords(0)]
    apart = {name: frozenset(at[name] for at in coords) for name in axes}
    apart = {name: at for name, at in apart.items() if len(at) < mesh[name].size - 1}
    return RanksAlike(mesh, apart) if apart else None


def _varying(family: Family, mesh: Mesh) -> set[str]:
    """The axes along which a number of a program is not the same, other than the name of a group, or the box for which
    random numbers are drawn: whoever is run for others draws for them, too."""
    found: set[str] = set()
    for node in family.varying:
        row = row_of(node.target)
        group = None if row is None or row.group is None else node.args[row.group]
        box: Any = node.args[-1] if node.target is dropout else ()
        for arg in leaves(node):
            each = family.together.on_each(arg)
            if each is not None and arg is not group and not any(arg is other for other in box):
                found |= axes_of(dict(zip(family.ranks, each, strict=True)), mesh)
    return found


def _asked_again(family: Family, mesh: Mesh) -> set[str]:
    """The axes along which ranks send to one another, or a collective needs what others got each for themselves."""
    found: set[str] = set()
    mine: dict[fx.Node, frozenset[str]] = {}
    for node in family.program.graph.nodes:
        row = row_of(node.target) if node.op == "call_function" else None
        mine[node] = frozenset[str]().union(*(mine[each] for each in node.all_input_nodes))
        request = Request.of(node)
        if row is None or row.group is None or request is None:
            continue
        axes = frozenset(mesh.group_axes(request.group))
        if request.message:
            found |= axes
        found |= axes & mine[node]
        if request.op not in SAME_FOR_ALL:
            mine[node] |= axes
    return found


def _spec(given: Input) -> Spec:
    return given.value.spec if given.value.spec is not None else Spec.whole(given.value.type.ndim)
