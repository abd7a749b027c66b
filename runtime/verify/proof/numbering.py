"""Communication and packing, executed on element numbers instead of elements.

Packing, joining, cutting and exchanging only move elements, so they can be run on tensors that hold, for each element,
*which* element of which term it is. What such a tensor then is, is read off it: nothing about offsets, orders or
paddings is assumed. A reduction is right where every member of its group holds a share of the same element, of the
same sum, and the group is one of all ranks among which that sum is shared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from shardfx.ir.mesh import Mesh
from shardfx.ir.ops import pack
from shardfx.ir.spec import Spec

from .deduction import Fact, Origins
from .elements import Elements, cat
from .strided_runs import BITS, StridedRun
from .terms import Universe

aten = torch.ops.aten
c10d = torch.ops._c10d_functional

ZERO = 0
"""The source of padding."""

MOVERS: dict[Any, Callable[..., Any]] = {
    f: f
    for f in (
        pack.pack,
        pack.unpack_gathered,
        pack.pack_scattered,
        pack.unpack_scattered,
        pack.pack_exchange,
        pack.unpack_exchange,
        pack.take,
        pack.flatten,
        pack.unflatten,
    )
}
ALSO: dict[Any, Callable[..., Any]] = {
    aten.reshape.default: Elements.reshape,
    aten.view.default: Elements.view,
    aten.slice.Tensor: Elements.slice,
    aten.narrow.default: Elements.narrow,
    aten.cat.default: cat,
    aten.permute.default: Elements.permute,
    aten.transpose.int: Elements.transpose,
    aten.t.default: Elements.t,
    aten.select.int: Elements.select,
    aten.split.Tensor: Elements.split,
    aten.split_with_sizes.default: Elements.split,
    aten.unsqueeze.default: Elements.unsqueeze,
    aten.squeeze.dim: Elements.squeeze,
}
"""Ops that move elements and may stand in a program for its own reasons, without being an op of the model."""
COLLECTIVES = {
    c10d.all_reduce.default,
    c10d.all_gather_into_tensor.default,
    c10d.reduce_scatter_tensor.default,
    c10d.all_to_all_single.default,
}


class Wrong(Exception):
    """A move that is not what its name says of these elements."""


class Impossible(Wrong):
    """A collective that cannot be done, whatever the elements are."""


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
    _coords: dict[int, dict[str, int]] = field(default_factory=dict)
    _boxes: dict[tuple[tuple[int, ...], Spec], dict[tuple[int, ...], Elements]] = field(default_factory=dict)
    _codes: dict[tuple[int, Elements], Elements] = field(default_factory=dict)

    def number(self, source: Source) -> int:
        """From 1: 0 is padding."""
        if source not in self._known:
            self.sources.append(source)
            self._known[source] = len(self.sources)
        return self._known[source]

    def box(self, shape: tuple[int, ...], spec: Spec, rank: int) -> Elements:
        """The places, in a whole of this shape, of what a rank holds: one object for ranks that hold the same."""
        if rank not in self._coords:
            self._coords[rank] = self.mesh.coords(rank)
        coords = self._coords[rank]
        boxes = self._boxes.setdefault((shape, spec), {})
        key = tuple([coords[axis] for axis in spec.axes])
        if key not in boxes:
            base, stride = 0, 1
            loops = []
            pairs = zip(spec.sub_shape(shape), spec.box(shape, self.mesh, coords), strict=True)
            for size, (start, length) in reversed(list(pairs)):
                base += start * stride
                loops.append((length, stride))
                stride *= size
            boxes[key] = Elements.of(spec.local_shape(shape, self.mesh, coords), base, reversed(loops))
        return boxes[key]

    def codes(self, fact: Fact, rank: int) -> Elements:
        """The numbers of what a rank holds."""
        shape = self.universe.terms.types[fact.term].shape
        number = self.number(Source(fact.term, fact.spec.partial, fact.origins))
        key = number, self.box(shape, fact.spec.reduced(), rank)
        if key not in self._codes:
            self._codes[key] = _moved(key[1], {ZERO: number})
        return self._codes[key]

    def read(self, codes: Elements, hints: Sequence[int], rank: int) -> list[Fact]:
        """The facts about a tensor of numbered elements; ``hints`` are the sources of an empty one."""
        found: list[Fact] = []
        if codes.numel():
            numbers = {run.source for run in codes.runs}
            if len(numbers) > 1 or ZERO in numbers:
                return found
            hints = list(numbers)
        for number in hints:
            source = self.sources[number - 1]
            shape = self.universe.terms.types[source.term].shape
            places = _moved(codes, {number: ZERO})
            for spec in self.universe.specs.get(source.term, ()):
                if spec.local_shape(shape, self.mesh, self.mesh.coords(rank)) != codes.shape:
                    continue
                clash = {axis for axis, _ in source.partial} & set(spec.axes)
                if not clash and self.box(shape, spec, rank).equals(places):
                    found.append(Fact(source.term, Spec(spec.dims, source.partial), source.origins))
        return found

    def inside(self, tensors: Sequence[Elements]) -> list[int]:
        """The sources of some elements, padding left out."""
        return sorted({run.source for t in tensors for run in t.runs} - {ZERO})

    def collective(
        self, op: Any, args: Sequence[Sequence[Any]], tensors: Sequence[Elements], axes: Sequence[str]
    ) -> list[Elements]:
        """What each member of a group gets, the group being one along ``axes``."""
        n = len(tensors)
        if op in (c10d.all_reduce.default, c10d.reduce_scatter_tensor.default):
            if op is c10d.reduce_scatter_tensor.default and any(not t.dim() or t.shape[0] % n for t in tensors):
                raise Impossible(f"a reduce-scatter of shape {list(tensors[0].shape)} over {n} ranks")
            total = self._reduced(args[0][0], tensors, axes)
            return [total] * n if op is c10d.all_reduce.default else total.chunk(n)
        for number in self.inside(tensors):
            over = {axis for axis, _ in self.sources[number - 1].partial} & set(axes)
            if over:
                raise Wrong(f"shares of a sum over {', '.join(sorted(over))} are exchanged without being added")
        if op is c10d.all_gather_into_tensor.default:
            return [cat([t if t.dim() else t.reshape(1) for t in tensors])] * n
        sent = [t.split(list(a[1])) for t, a in zip(tensors, args, strict=True)]
        return [cat([s[k] for s in sent]) for k in range(n)]

    def _reduced(self, kind: str, tensors: Sequence[Elements], axes: Sequence[str]) -> Elements:
        first = tensors[0]
        if not all(t.equals(first) for t in tensors[1:]):
            raise Wrong("the ranks of a reduction do not hold shares of the same elements of the same sum")
        left: dict[int, int] = {}
        for number in self.inside([first]):
            source = self.sources[number - 1]
            missing = [axis for axis in axes if (axis, kind) not in source.partial and self.mesh[axis].size > 1]
            if missing:
                name = self.universe.terms.names[source.term]
                raise Wrong(f"{kind} over {', '.join(missing)} of a {name} that is no {kind} over it")
            partial = tuple(p for p in source.partial if p[0] not in axes)
            origins = tuple(o for o in source.origins if o[0] not in axes)
            left[number] = self.number(Source(source.term, partial, origins))
        return _moved(first, left)


def _moved(tensor: Elements, to: Mapping[int, int]) -> Elements:
    """The same places in other sources."""
    runs = (
        StridedRun(run.base + ((to.get(run.source, run.source) - run.source) << BITS), run.loops) for run in tensor.runs
    )
    return Elements(tensor.shape, tuple(runs))
