"""Communication and packing, executed on element numbers instead of elements.

Packing, joining, sharding and exchanging only move elements, so they can be run on tensors that hold, for each element,
*which* element of which term it is. What such a tensor then is, is read off it: nothing about offsets, orders or
paddings is assumed. A reduction is right where every member of its group holds a share of the same element, of the
same sum, and the group is one of all ranks among which that sum is shared.

A rank alone does not always know which sum: its rows may be those of two shardings (rank 0 has row 0 of ``5{a,b}`` and
of ``5{b,a}``, and one without rows has none of either), and what it adds up is then its share by each. All that is true
of a tensor is kept, as the *sources* of its elements, and the ranks that meet agree on what is true of all of them.

A program may add by hand: gather shares as they are, each of a member of the group, and add up those of all, or reduce
what it multiplied by a number, or copies of one value, and divide. So a source says also *whose* shares were added, and
*how often* a value is held. Such elements are none of the model's until all shares are in them, once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
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
LINEAR = ("sum", "avg")
"""Reductions of which a factor may stand before or behind."""
OF_COPIES = ("sum", "avg", "max", "min")
"""Reductions of which it is known what they make of copies of one number."""


class Wrong(Exception):
    """A move that is not what its name says of these elements."""


class Impossible(Wrong):
    """A collective that cannot be done, whatever the elements are."""


@dataclass(frozen=True)
class Source:
    """What numbered elements may be elements of: a term, and the sums of which they are shares."""

    term: int
    partial: tuple[tuple[str, str], ...]
    origins: Origins
    times: float = 1.0
    """What a value of the model, or a share of it, was multiplied by."""
    group: tuple[str, ...] = ()
    members: frozenset[int] = frozenset()
    """Whose shares these are, where they are not this rank's own: of some members of a group along these axes."""

    @property
    def of_model(self) -> bool:
        """Whether the elements are the model's, or this rank's own shares of them."""
        return self.times == 1 and not self.members

    def added(self, axes: Iterable[str]) -> Source:
        """The same after all shares over some axes were added."""
        gone = {*axes}
        partial = tuple(each for each in self.partial if each[0] not in gone)
        origins = tuple(each for each in self.origins if each[0] not in gone)
        return replace(self, partial=partial, origins=origins, group=(), members=frozenset())

    def by(self, factor: float) -> Source:
        """The same, multiplied: three times a third is one."""
        times = self.times * factor
        return replace(self, times=1.0 if math.isclose(times, 1, rel_tol=1e-12) else times)


@dataclass
class Numbering:
    """Numbers for the elements of terms: the number of their sources above, the place in the whole below."""

    universe: Universe
    mesh: Mesh
    sources: list[tuple[Source, ...]] = field(default_factory=list)
    """By number, from 1 (0 is padding): what the elements are elements of, in every way that is known to be true."""
    _order: dict[Source, int] = field(default_factory=dict)
    _known: dict[tuple[Source, ...], int] = field(default_factory=dict)
    _coords: dict[int, dict[str, int]] = field(default_factory=dict)
    _boxes: dict[tuple[tuple[int, ...], Spec], dict[tuple[int, ...], Elements]] = field(default_factory=dict)
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

    def codes(self, facts: Sequence[Fact], rank: int) -> Elements:
        """The numbers of what a rank holds, by the first fact and all that say the same places."""
        places = self._places(facts[0], rank)
        number = self.number(
            Source(fact.term, fact.spec.partial, fact.origins)
            for fact in facts
            if fact is facts[0] or self._places(fact, rank).equals(places)
        )
        if (number, places) not in self._codes:
            self._codes[number, places] = _moved(places, {ZERO: number})
        return self._codes[number, places]

    def _places(self, fact: Fact, rank: int) -> Elements:
        return self.box(self.universe.terms.types[fact.term].shape, fact.spec.reduced(), rank)

    def read(self, codes: Elements, hints: Sequence[int], rank: int) -> list[Fact]:
        """The facts about a tensor of numbered elements; ``hints`` are the sources of an empty one."""
        found: list[Fact] = []
        numbers = dict.fromkeys(run.source for run in codes.runs)
        if ZERO in numbers:
            return found
        places = _moved(codes, dict.fromkeys(numbers, ZERO))
        sources = dict.fromkeys(source for number in numbers or hints for source in self.sources[number - 1])
        for source in sources:
            if not source.of_model or not all(source in self.sources[number - 1] for number in numbers):
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
        """What each member of a group gets, the group being one along ``axes``."""
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
        held = tensors[0]
        for tensor in tensors[1:]:
            both = held.met(tensor, self._common)
            if both is None:
                raise Wrong("the ranks of a reduction do not hold shares of the same elements of the same sum")
            held = both
        left: dict[int, int] = {}
        for number in self.inside([held]):
            sources = [self._sum(kind, source, axes) for source in self.sources[number - 1]]
            if not any(sources):
                raise Wrong(self._no_sum(kind, self.sources[number - 1][0], axes))
            left[number] = self.number(source for source in sources if source)
        return _moved(held, left)

    def _sum(self, kind: str, source: Source, axes: Sequence[str]) -> Source | None:
        """What the reduction of elements is that all members hold so; None: nothing that is known."""
        wide = [axis for axis in axes if self.mesh[axis].size > 1]
        held = set(source.partial)
        if source.members:
            return None
        if {(axis, kind) for axis in wide} <= held:
            return source.added(axes) if source.times == 1 or kind in LINEAR else None
        if not self.universe.terms.types[source.term].dtype.is_floating_point:
            return None
        if kind == "avg" and {(axis, "sum") for axis in wide} <= held:
            return source.added(axes).by(1 / self._size(wide))
        if {axis for axis, _ in held} & {*wide} or kind not in OF_COPIES:
            return None
        return source.by(self._size(wide)) if kind == "sum" else source

    def _no_sum(self, kind: str, source: Source, axes: Sequence[str]) -> str:
        missing = [axis for axis in axes if self.mesh[axis].size > 1 and (axis, kind) not in source.partial]
        name = self.universe.terms.names[source.term]
        return f"{kind} over {', '.join(missing or axes)} of a {name} that is no {kind} over it"

    def _size(self, axes: Iterable[str]) -> int:
        return math.prod(self.mesh[axis].size for axis in axes)

    def _common(self, a: int, b: int) -> int | None:
        """The number of what elements of both numbers are; None: nothing is true of both."""
        if a == b or ZERO in (a, b):
            return a if a == b else None
        of_both = [source for source in self.sources[a - 1] if source in self.sources[b - 1]]
        return self.number(of_both) if of_both else None

    def _sent(self, tensors: Sequence[Elements], axes: Sequence[str]) -> Sequence[Elements]:
        """The same elements as others hold them: no shares of a sum over some axes, or each member's."""
        to = {number: self._no_shares(number, axes) for number in self.inside(tensors)}
        if all(number == whole for number, whole in to.items()):
            return tensors
        return [
            _moved(t, {n: self._of_member(n, axes, i) if to[n] is None else to[n] for n in self.inside([t])})  # type: ignore[misc]
            for i, t in enumerate(tensors)
        ]

    def _no_shares(self, number: int, axes: Sequence[str]) -> int | None:
        """The number of the same elements, taken to be what is no share over some axes; None: they are shares."""
        whole = [s for s in self.sources[number - 1] if not {axis for axis, _ in s.partial} & set(axes)]
        return self.number(whole) if whole else None

    def _of_member(self, number: int, axes: Sequence[str], member: int) -> int:
        wanted = {(axis, "sum") for axis in axes if self.mesh[axis].size > 1}
        shares = [s for s in self.sources[number - 1] if wanted <= set(s.partial) and not s.members]
        if not shares:
            over = {axis for axis, _ in self.sources[number - 1][0].partial} & set(axes)
            raise Wrong(f"shares of a sum over {', '.join(sorted(over))} are exchanged without being added")
        return self.number(replace(s, group=tuple(axes), members=frozenset({member})) for s in shares)

    def why(self, codes: Elements) -> str:
        """Why elements are none of the model's, where that is so because of what was done by hand."""
        for number in self.inside([codes]):
            first = self.sources[number - 1][0]
            if not any(each.of_model for each in self.sources[number - 1]) and first.members:
                return f"shares of a sum over {', '.join(first.group)} are exchanged without being added"
            if not any(each.of_model for each in self.sources[number - 1]):
                return f"this is {first.times:g} times a {self.universe.terms.names[first.term]}"
        return ""

    # ---- by hand ----------------------------------------------------------------------------------------------

    def added(self, a: Elements, b: Elements) -> Elements:
        """The sum of shares of different members; Wrong where that is nothing known, as in what follows."""
        made = None if a is b or a.runs == b.runs else a.met(b, self._joined)
        if made is None:
            raise Wrong("these are no shares of one sum, of different ranks")
        return made

    def _joined(self, a: int, b: int) -> int | None:
        if ZERO in (a, b):
            return None
        found = []
        for mine in self.sources[a - 1]:
            for theirs in self.sources[b - 1]:
                members = mine.members | theirs.members
                apart = mine.members and theirs.members and not mine.members & theirs.members
                if apart and replace(mine, members=members) == replace(theirs, members=members):
                    all_of_them = len(members) == self._size(mine.group)
                    found.append(mine.added(mine.group) if all_of_them else replace(mine, members=members))
        return self.number(found) if found else None

    def summed(self, x: Elements, dims: Sequence[int] | None, keepdim: bool = False) -> Elements:
        """The sum of the rows of one dim, each of other members' shares."""
        if dims is None or len(dims) != 1 or not 1 < x.shape[x._dim(dims[0])] <= self.mesh.size:
            raise Wrong("these are no shares, one for each rank of a group")
        total = reduce(self.added, x.split(1, dims[0]))
        return total if keepdim else total.squeeze(dims[0])

    def scaled(self, x: Elements, factor: float) -> Elements:
        """The elements multiplied by a number."""
        to = {}
        for number in self.inside([x]):
            made = [source.by(factor) for source in self.sources[number - 1]]
            kinds = {kind for source in made for _, kind in source.partial}
            if not kinds <= {*LINEAR} or not all(map(self._held, made)):
                raise Wrong("this is no value of the model by a number")
            to[number] = self.number(made)
        return _moved(x, to)

    def _held(self, source: Source) -> bool:
        """Whether numbers of some size are still numbers of the same dtype, multiplied so."""
        dtype = self.universe.terms.types[source.term].dtype
        info = torch.finfo(dtype) if dtype.is_floating_point else None
        return info is not None and info.tiny**0.5 <= abs(source.times) <= info.max**0.5


def _moved(tensor: Elements, to: Mapping[int, int]) -> Elements:
    """The same places in other sources."""
    return Elements(tensor.shape, tuple([run.of(to.get(run.source, run.source)) for run in tensor.runs]))
