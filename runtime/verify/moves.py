"""Communication and packing, executed on element numbers instead of elements.

Packing, joining, cutting and exchanging only move elements, so they can be run on tensors that hold, for each element,
*which* element of which term it is. What such a tensor then is, is read off it: nothing about offsets, orders or
paddings is assumed. A reduction is right where every member of its group holds a share of the same element, of the
same sum, and the group is one of all ranks among which that sum is shared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from shardfx.ir.mesh import Mesh
from shardfx.ir.spec import Spec

from .. import layout
from ..storage import cut_local
from .rules import Fact, Origins
from .terms import Universe

aten = torch.ops.aten
c10d = torch.ops._c10d_functional
BITS = 40
ZERO = 0
"""The number of an element of padding."""
MOST = 1 << 27
"""Larger values are not numbered: a proof of so large a program would not fit into memory."""

MOVERS: dict[Any, Callable[..., Any]] = {
    f: f
    for f in (
        layout.pack,
        layout.unpack_gathered,
        layout.pack_scattered,
        layout.unpack_scattered,
        layout.pack_exchange,
        layout.unpack_exchange,
        layout.take,
        layout.flatten,
        layout.unflatten,
    )
}
ALSO = (
    aten.reshape.default,
    aten.view.default,
    aten.slice.Tensor,
    aten.narrow.default,
    aten.cat.default,
    aten.permute.default,
    aten.transpose.int,
    aten.t.default,
    aten.select.int,
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
)
"""Ops that move elements and may stand in a program for its own reasons, without being an op of the model."""
COLLECTIVES = {
    c10d.all_reduce.default,
    c10d.all_gather_into_tensor.default,
    c10d.reduce_scatter_tensor.default,
    c10d.all_to_all_single.default,
}


class Wrong(Exception):
    """A move that is not what its name says of these elements."""


@dataclass(frozen=True)
class Source:
    """What numbered elements are elements of: a term, and the sums of which they are shares."""

    term: int
    partial: tuple[tuple[str, str], ...]
    origins: Origins


@dataclass
class Numbering:
    """Numbers for the elements of terms: the source's number above, the element's place in the whole below."""

    universe: Universe
    mesh: Mesh
    sources: list[Source] = field(default_factory=list)
    _known: dict[Source, int] = field(default_factory=dict)
    _boxes: dict[tuple[tuple[int, ...], Spec, int], torch.Tensor] = field(default_factory=dict)

    def number(self, source: Source) -> int:
        """From 1: 0 is padding."""
        if source not in self._known:
            self.sources.append(source)
            self._known[source] = len(self.sources)
        return self._known[source]

    def box(self, shape: tuple[int, ...], spec: Spec, rank: int) -> torch.Tensor:
        """The places, in a whole of this shape, of what a rank holds."""
        key = (shape, spec, rank)
        if key not in self._boxes:
            numel = math.prod(shape)
            if numel > MOST:
                raise Wrong(f"a value of {numel} elements is too large to be followed through communication")
            whole = torch.arange(numel, dtype=torch.int64).reshape(shape)
            self._boxes[key] = cut_local(whole, spec, self.mesh, rank).contiguous()
        return self._boxes[key]

    def codes(self, fact: Fact, rank: int) -> torch.Tensor:
        shape = self.universe.terms.types[fact.term].shape
        number = self.number(Source(fact.term, fact.spec.partial, fact.origins))
        return self.box(shape, fact.spec.reduced(), rank) + (number << BITS)

    def read(self, codes: torch.Tensor, hints: Sequence[int], rank: int) -> list[Fact]:
        """The facts about a tensor of numbered elements; ``hints`` are the sources of an empty one."""
        found: list[Fact] = []
        if codes.numel():
            numbers = codes >> BITS
            first = int(numbers.flatten()[0])
            if first == ZERO or not bool((numbers == first).all()):
                return found
            hints = [first]
        for number in hints:
            source = self.sources[number - 1]
            shape = self.universe.terms.types[source.term].shape
            places = codes - (number << BITS)
            for spec in self.universe.specs.get(source.term, ()):
                if spec.local_shape(shape, self.mesh, self.mesh.coords(rank)) != tuple(codes.shape):
                    continue
                clash = {axis for axis, _ in source.partial} & set(spec.axes)
                if not clash and torch.equal(self.box(shape, spec, rank), places):
                    found.append(Fact(source.term, Spec(spec.dims, source.partial), source.origins))
        return found

    def inside(self, tensors: Sequence[torch.Tensor]) -> list[int]:
        """The sources of some elements, padding left out."""
        # Elements of one source stand together: what is left of runs is short.
        runs = [torch.unique_consecutive((t >> BITS).flatten()) for t in dict.fromkeys(tensors) if t.numel()]
        return [n for n in sorted({int(n) for run in runs for n in run.unique()}) if n != ZERO]

    def collective(
        self, op: Any, args: Sequence[Sequence[Any]], tensors: Sequence[torch.Tensor], axes: Sequence[str]
    ) -> Any:
        """What each member of a group gets, the group being one along ``axes``."""
        n = len(tensors)
        if op in (c10d.all_reduce.default, c10d.reduce_scatter_tensor.default):
            total = self._reduced(args[0][0], tensors, axes)
            if op is c10d.all_reduce.default:
                return [total] * n
            if args[0][1] != n or total.shape[0] % n:
                raise Wrong(f"a reduce-scatter of {total.shape[0]} rows into {args[0][1]} pieces over {n} ranks")
            return list(total.chunk(n))
        for number in self.inside(tensors):
            over = {axis for axis, _ in self.sources[number - 1].partial} & set(axes)
            if over:
                raise Wrong(f"shares of a sum over {', '.join(sorted(over))} are exchanged without being added")
        if op is c10d.all_gather_into_tensor.default:
            if args[0][0] != n:
                raise Wrong(f"an all-gather over {n} ranks that says {args[0][0]}")
            return [torch.cat([t if t.dim() else t.reshape(1) for t in tensors])] * n
        sent = [t.split(list(a[1])) for t, a in zip(tensors, args, strict=True)]
        for k in range(n):
            if [len(s[k]) for s in sent] != list(args[k][0]):
                raise Wrong("an exchange in which a rank expects other sizes than are sent")
        return [torch.cat([s[k] for s in sent]) for k in range(n)]

    def _reduced(self, kind: str, tensors: Sequence[torch.Tensor], axes: Sequence[str]) -> torch.Tensor:
        first = tensors[0]
        if any(t.shape != first.shape or not torch.equal(t, first) for t in tensors[1:]):
            raise Wrong("the ranks of a reduction do not hold shares of the same elements of the same sum")
        result = first.clone()
        for number in self.inside([first]):
            source = self.sources[number - 1]
            missing = [axis for axis in axes if (axis, kind) not in source.partial and self.mesh[axis].size > 1]
            if missing:
                name = self.universe.terms.names[source.term]
                raise Wrong(f"{kind} over {', '.join(missing)} of a {name} that is no {kind} over it")
            left = Source(
                source.term,
                tuple(p for p in source.partial if p[0] not in axes),
                tuple(o for o in source.origins if o[0] not in axes),
            )
            at = (first >> BITS) == number
            result[at] += (self.number(left) - number) << BITS
        return result
