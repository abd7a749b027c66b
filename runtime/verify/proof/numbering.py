"""Communication and packing, executed symbolically on element numbers.

Packing, joining, sharding and exchanging only move elements, so they can be run on tensors that hold, for each element,
*which* element of which term it is. What such a tensor then is, is read off it: nothing about offsets, orders or
paddings is assumed. A reduction is right where every member of its group holds a share of the same element, of the
same sum, and the group is one of all ranks among which that sum is shared.

A rank alone does not always know which sum: its rows may be those of two shardings (rank 0 has row 0 of ``5{a,b}`` and
of ``5{b,a}``, and one without rows has none of either), and what it adds up is then its share by each. All that is true
of a tensor is kept, as the *sources* of its elements, and the ranks that meet agree on what is true of all of them.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from shardfx.ir.mesh import Mesh
from shardfx.ir.spec import Spec

from .deduction import Fact, Origins
from .elements import Elements, cat
from .terms import Universe

c10d = torch.ops._c10d_functional

ZERO = 0
"""The source of padding."""


class Wrong(Exception):
    """Data movement that does not do what its op says, on these elements."""


class Impossible(Wrong):
    """A collective that is invalid, whatever the elements are."""


@dataclass(frozen=True)
class Source:
    """A source of numbered elements: a term, and the sums of which they are shares."""

    term: int
    partial: tuple[tuple[str, str], ...]
    origins: Origins

    def __hash__(self) -> int:
        return self.term

    def added(self, axes: Iterable[str]) -> Source:
        """The same after all shares over some axes were added."""
        gone = {*axes}
        partial = tuple(each for each in self.partial if each[0] not in gone)
        origins = tuple(each for each in self.origins if each[0] not in gone)
        return Source(self.term, partial, origins)


@dataclass
class Numbering:
    """Numbers of the elements of terms: the source in the high bits, the global index in the low ones."""

    universe: Universe
    mesh: Mesh
    sources: list[tuple[Source, ...]] = field(default_factory=list)
    """The sources by number, from 1 (0 is padding): all terms and sums that the elements are known to be of."""
    _order: dict[Source, int] = field(default_factory=dict)
    _known: dict[tuple[Source, ...], int] = field(default_factory=dict)
    _numbers: dict[tuple[Fact, ...], int] = field(default_factory=dict)
    _coords: dict[int, dict[str, int]] = field(default_factory=dict)
    _boxes: dict[Hashable, dict[tuple[int, ...], Elements]] = field(default_factory=dict)
    _codes: dict[tuple[int, Elements], Elements] = field(default_factory=dict)

    def number(self, sources: Iterable[Source]) -> int:
        """The number of elements that are elements of each of these."""
        order = {self._order.setdefault(source, len(self._order)): source for source in sources}
        found = tuple([order[place] for place in sorted(order)])
        if found not in self._known:
            self.sources.append(found)
            self._known[found] = len(self.sources)
        return self._known[found]

    def without(self, number: int, axes: Sequence[str]) -> int:
        """The number of elements after the shares over some axes were added."""
        return self.number(source.added(axes) for source in self.sources[number - 1])

    def box(self, shape: tuple[int, ...], spec: Spec, rank: int) -> Elements:
        """The global indices of a rank's elements of this shape: one object for ranks that hold the same."""
        if rank not in self._coords:
            self._coords[rank] = self.mesh.coords(rank)
        coords = self._coords[rank]
        boxes = self._boxes.setdefault((shape, spec.dims), {})
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

    def codes(self, facts: Sequence[Fact], rank: int) -> Elements:
        """The element numbers of a rank's shard, by the first fact and all that say the same places."""
        places = self._places(facts[0], rank)
        also = (facts[0], *(fact for fact in facts[1:] if self._places(fact, rank).equals(places)))
        if also not in self._numbers:
            self._numbers[also] = self.number(Source(fact.term, fact.spec.partial, fact.origins) for fact in also)
        number = self._numbers[also]
        if (number, places) not in self._codes:
            self._codes[number, places] = _moved(places, {ZERO: number})
        return self._codes[number, places]

    def _places(self, fact: Fact, rank: int) -> Elements:
        return self.box(self.universe.terms.types[fact.term].shape, fact.spec, rank)

    def read(self, codes: Elements, hints: Sequence[int], rank: int) -> list[Fact]:
        """The facts about a tensor of numbered elements; ``hints`` are the sources of an empty one."""
        found: list[Fact] = []
        numbers = dict.fromkeys(run.source for run in codes.runs)
        if ZERO in numbers:
            return found
        places = _moved(codes, dict.fromkeys(numbers, ZERO))
        sources = dict.fromkeys(source for number in numbers or hints for source in self.sources[number - 1])
        for source in sources:
            if not all(source in self.sources[number - 1] for number in numbers):
                continue
            shape = self.universe.terms.types[source.term].shape
            for spec in self.universe.specs.get(source.term, ()):
                if spec.local_shape(shape, self.mesh, self.mesh.coords(rank)) != codes.shape:
                    continue
                clash = {axis for axis, _ in source.partial} & set(spec.axes)
                if not clash and self.box(shape, spec, rank).equals(places):
                    found.append(Fact(source.term, Spec(spec.dims, source.partial), source.origins))
        return found

    def dtypes(self, codes: Elements, hints: Sequence[int]) -> set[torch.dtype]:
        """The dtypes of the values that elements are elements of."""
        numbers = self.inside([codes]) or hints
        types = self.universe.terms.types
        return {types[source.term].dtype for number in numbers for source in self.sources[number - 1]}

    def inside(self, tensors: Sequence[Elements]) -> list[int]:
        """The sources of some elements, padding left out."""
        return sorted({run.source for t in tensors for run in t.runs} - {ZERO})

    def collective(
        self, op: Any, args: Sequence[Sequence[Any]], tensors: Sequence[Elements], axes: Sequence[str]
    ) -> list[Elements]:
        """The results of a collective for each member of a group along ``axes``."""
        n = len(tensors)
        if op in (c10d.all_reduce.default, c10d.reduce_scatter_tensor.default):
            if op is c10d.reduce_scatter_tensor.default and any(not t.dim() or t.shape[0] % n for t in tensors):
                raise Impossible(f"a reduce-scatter of shape {list(tensors[0].shape)} over {n} ranks")
            total = self._reduced(args[0][0], tensors, axes)
            return [total] * n if op is c10d.all_reduce.default else total.chunk(n)
        tensors = self._sent(tensors, axes)
        if op is c10d.all_gather_into_tensor.default:
            return [cat([t if t.dim() else t.reshape(1) for t in tensors])] * n
        sent = [t.split(list(a[1])) for t, a in zip(tensors, args, strict=True)]
        return [cat([s[k] for s in sent]) for k in range(n)]

    def _reduced(self, kind: str, tensors: Sequence[Elements], axes: Sequence[str]) -> Elements:
        total = tensors[0]
        for tensor in tensors[1:]:
            both = total.met(tensor, self._common)
            if both is None:
                raise Wrong("the ranks of a reduction do not hold shares of the same elements of the same sum")
            total = both
        left: dict[int, int] = {}
        wide = [axis for axis in axes if self.mesh[axis].size > 1]
        for number in self.inside([total]):
            sources = self.sources[number - 1]
            missing = [[axis for axis in wide if (axis, kind) not in source.partial] for source in sources]
            if all(missing):
                name = self.universe.terms.names[sources[0].term]
                raise Wrong(f"{kind} over {', '.join(missing[0])} of a {name} that is no {kind} over it")
            added = [source.added(axes) for source, lacks in zip(sources, missing, strict=True) if not lacks]
            left[number] = self.number(added)
        return _moved(total, left)

    def _common(self, a: int, b: int) -> int | None:
        """The number of the sources that two numbers have in common; None: there are none."""
        if a == b or ZERO in (a, b):
            return a if a == b else None
        of_both = [source for source in self.sources[a - 1] if source in self.sources[b - 1]]
        return self.number(of_both) if of_both else None

    def _sent(self, tensors: Sequence[Elements], axes: Sequence[str]) -> list[Elements]:
        """The same elements as seen on other ranks: no shares of a sum over some axes."""
        to = {}
        for number in self.inside(tensors):
            found = [s for s in self.sources[number - 1] if not {axis for axis, _ in s.partial} & set(axes)]
            if not found:
                over = {axis for axis, _ in self.sources[number - 1][0].partial} & set(axes)
                raise Wrong(f"shares of a sum over {', '.join(sorted(over))} are exchanged without being added")
            to[number] = self.number(found)
        return [_moved(tensor, to) for tensor in tensors]


def _moved(tensor: Elements, to: Mapping[int, int]) -> Elements:
    """Remap elements to other sources, at the same indices."""
    return Elements(tensor.shape, tuple([run.of(to.get(run.source, run.source)) for run in tensor.runs]))
