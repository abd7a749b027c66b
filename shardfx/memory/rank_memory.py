"""Memory of a rank in a step: the peak, by call, by category, and by module; and its formula in batch and sequence.

>>> memory = pm.memory()
>>> memory.peak, memory.by_category["activations"]
(8252424, 3735552)
>>> print(memory.at_peak[0])
1.6 MB  activations  %35 aten.mm  layers.0.fc1  gpt.py:31
>>> memory.formula
8192*batch*sequence/dp + 3145728/tp + ...

What a storage's bytes depend on is found out by planning again: with three times the batch, with half the sequence
(or another length, where another plan is cheaper for that), and with both. Each storage of the peak is then a number
times powers of batch and sequence, or a sum ``a + b*batch + c*sequence + d*batch*sequence`` (a bucket); the axes that
sharded the value stand below.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import sympy
import torch
import torch.utils._pytree as pytree

from shardfx.hints import Hints
from shardfx.ir.cost.footprint import BUFFERS, Footprint
from shardfx.ir.errors import Error
from shardfx.ir.graph import NOWHERE, Input, InputKind, Node, OutputKind, Value, Where, op_name
from shardfx.ir.mesh import Mesh
from shardfx.ir.program.rank_program import RankProgram
from shardfx.ir.shards import held_shape
from shardfx.ir.spec import Spec
from shardfx.ir.text.printer import size_text
from shardfx.report.console import render

CATEGORIES = {
    InputKind.PARAMETER: "parameters",
    InputKind.BUFFER: "buffers",
    InputKind.STATE: "optimizer states",
    InputKind.OPTION: "inputs",
    InputKind.CONSTANT: "constants",
    InputKind.ARGUMENT: "inputs",
    InputKind.TARGET: "inputs",
    InputKind.SEED: "inputs",
}
"""The categories of a program's inputs, which are live throughout."""
ALLOWANCE, SEGMENT = 1.03, 2 << 20
"""The bytes that the CUDA allocator reserves, as a multiple of those of live tensors; and its unit."""
TIMES = Fraction(3)
"""The factor by which the batch is scaled."""
PARTS = Fraction(1, 2), Fraction(2), Fraction(5, 4), Fraction(3, 4)
"""The factors by which the sequence is scaled, in order of trial; for a longer one a model may have no positions."""
POWERS = range(4)
ONE = Fraction(1)


@dataclass(frozen=True)
class Sizes:
    """Batch and sequence of the first example: its leading dim, and the next one where it is a sequence (token ids
    ``[batch, sequence]`` or features ``[batch, sequence, channels]``); 0 for what there is not."""

    batch: int = 0
    sequence: int = 0
    part: Fraction = Fraction(1, 2)
    """The factor by which the sequence is scaled."""

    @staticmethod
    def of(hints: Hints) -> Sizes:
        """The sizes of the first argument that is a tensor with dims."""
        for leaf in pytree.tree_leaves((hints.args, dict(hints.kwargs))):
            if isinstance(leaf, torch.Tensor) and leaf.ndim:
                tokens = leaf.ndim == (3 if leaf.is_floating_point() else 2)
                return Sizes(leaf.shape[0], leaf.shape[1] if tokens else 0)
        return Sizes()

    @property
    def named(self) -> dict[str, int]:
        """The nonzero sizes, by name."""
        return {name: size for name, size in (("batch", self.batch), ("sequence", self.sequence)) if size}

    @property
    def tries(self) -> Iterator[Sizes]:
        """These with each length that may be planned for: with another one another plan may be cheaper."""
        parts = PARTS if self.sequence else PARTS[:1]  # which nothing depends on where there is none
        yield from (replace(self, part=part) for part in parts if self.sequence % part.denominator == 0)

    @property
    def ratios(self) -> list[dict[str, Fraction]]:
        """The scaling of batch and sequence in each further plan; the last one changes both."""
        by = {name: ratio for name, ratio in (("batch", TIMES), ("sequence", self.part)) if name in self.named}
        both = [dict(zip(by, each, strict=True)) for each in product(*((ONE, ratio) for ratio in by.values()))]
        return both[1:]

    def changed(self, hints: Hints, by: dict[str, Fraction]) -> Hints:
        """The same hints, for examples of other sizes, without content."""

        def other(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            shape = tuple(self._size(leaf, dim, by) for dim in range(leaf.ndim))
            return torch.empty(shape, dtype=leaf.dtype, device="meta")

        nests = (hints.args, dict(hints.kwargs), hints.targets)
        args, kwargs, targets = (pytree.tree_map(other, nest) for nest in nests)
        return replace(hints, args=args, kwargs=kwargs, targets=targets, memory=None)

    def _size(self, leaf: torch.Tensor, dim: int, by: dict[str, Fraction]) -> int:
        size, scale = leaf.shape[dim], ONE
        if dim == 0 and self.batch and size == self.batch:
            scale = by["batch"]
        elif dim == 0 and self.sequence and size == self.batch * self.sequence:
            scale = prod(by.values(), start=ONE)
        elif dim and self.sequence and size == self.sequence:
            scale = by["sequence"]
        return int(size * scale)


NO_SIZES = Sizes()


@dataclass(frozen=True)
class Holder:
    """A block of memory: its category, its bytes, the value or input in it, and where that was made."""

    category: str
    nbytes: int
    name: str = ""
    op: str = ""
    where: Where = NOWHERE

    def __str__(self) -> str:
        parts = (size_text(self.nbytes), self.category, " ".join((self.name, self.op)).strip(), str(self.where))
        return "  ".join(part for part in parts if part)


@dataclass(frozen=True)
class RankMemory:
    """The memory of one rank in a step, as ``pm.memory(rank)`` predicts it.

    Bytes are those of live tensors, by storage: what views share counts once; :attr:`reserved` has the allocator's
    fragmentation too. Workspaces of kernels are not in it, nor what an optimizer of your own keeps.
    """

    program: RankProgram
    footprint: Footprint
    sizes: Sizes = NO_SIZES
    resized: Callable[[dict[str, Fraction]], RankMemory] | None = None
    """A function that plans the same model for other ``sizes``."""
    compiled: bool = False
    """Whether ``torch.compile`` plans the program's memory."""

    @property
    def rank(self) -> int:
        """The rank whose memory it is."""
        return self.program.rank

    @cached_property
    def given(self) -> tuple[Holder, ...]:
        """The program's inputs on the device: parameters, buffers, constants, this rank's shard of the batch."""
        return tuple(self._holder(inp) for inp in self.program.inputs if not inp.pool)

    @cached_property
    def stored(self) -> Mapping[str, int]:
        """The bytes of the program's inputs on the device, by category."""
        return _by_category(self.given)

    @property
    def gradients(self) -> int:
        """The bytes of the gradients that the program returns."""
        values = {output.value for output in self.program.outputs if output.kind is OutputKind.GRADIENT}
        return sum(value.local_bytes(self.program.mesh) for value in values)

    @property
    def peak(self) -> int:
        """The peak of live bytes, from the program alone: of a compiled one without elementwise values, which its
        kernels compute where they are used."""
        return sum(self.stored.values()) + self.footprint.peak.nbytes

    @property
    def reserved(self) -> int:
        """The bytes that torch's caching allocator holds on CUDA in steady steps (``torch.cuda.max_memory_reserved``):
        :attr:`peak`, and an allowance of 3 % for rounding and fragmentation, in segments of 2 MB."""
        return math.ceil(self.peak * ALLOWANCE / SEGMENT) * SEGMENT

    @property
    def host(self) -> int:
        """The peak of bytes in host memory or files: values that are offloaded, or stored there."""
        return max(self._beside, default=0)

    @property
    def _beside(self) -> list[int]:
        """The bytes in host memory after each call: values stored there, and offloaded ones."""
        stored = sum(self._holder(inp).nbytes for inp in self.program.inputs if inp.pool)
        return [stored + nbytes for nbytes in self.footprint.beside]

    @cached_property
    def at_peak(self) -> tuple[Holder, ...]:
        """The live storages at the predicted peak, the largest first; their bytes sum up to it."""
        made = [_made(item.category, item.nbytes, item.node) for item in self.footprint.peak.items]
        return tuple(sorted([*self.given, *made], key=lambda item: -item.nbytes))

    @cached_property
    def by_category(self) -> Mapping[str, int]:
        """The bytes at the predicted peak by category, the largest first; they sum up to it."""
        return dict(sorted(_by_category(self.at_peak).items(), key=lambda item: -item[1]))

    @cached_property
    def course(self) -> tuple[Mapping[str, int], ...]:
        """The live bytes by category after each call of the program; ``footprint.calls`` are the calls."""
        moments = [Counter(self.stored) for _ in range(self._calls)]
        for category, course in (*self.footprint.by_category.items(), (BUFFERS, self.footprint.idle)):
            for moment, nbytes in zip(moments, course, strict=True):
                moment[category] += nbytes
        return tuple(moments)

    @cached_property
    def formula(self) -> sympy.Expr:
        """The bytes of the peak in ``batch``, ``sequence`` and the names of the mesh's axes, as a sympy expression.

        With the plan's own sizes substituted it is :attr:`peak`; for very different ones another moment may be the
        peak. The model is planned three times more for it, and again where another plan is cheaper for other sizes.

        Raises:
            Error: the bytes are no products of sizes; or the program is another one for other sizes.
        """
        if self.resized is None:
            raise no_formula("a plan that is not made from a module")
        found: list[Error] = []
        for sizes in self.sizes.tries:
            try:
                terms, *changed = ([*each._terms(self.footprint.top)] for each in (self, *self._others(sizes)))
                return formula(terms, changed, sizes, self.program.mesh)
            except Error as error:  # another length may do, if the model takes it at all
                found.append(error)
        raise found[0]

    def _others(self, sizes: Sizes) -> list[RankMemory]:
        """The memory of plans for other sizes, of the same program but for sizes, as far as calls and storages go."""
        assert self.resized is not None
        others = [self.resized(by) for by in sizes.ratios]
        for other in others:
            if (other._calls, len(other.footprint.storages)) != (self._calls, len(self.footprint.storages)):
                raise no_formula(f"{self._calls} calls, and {other._calls} for another batch and sequence")
        return others

    def _terms(self, call: int) -> Iterator[PeakStorage]:
        """The live storages at a call."""
        mesh = self.program.mesh
        here = [inp for inp in self.program.inputs if not inp.pool]
        for holder, inp in zip(self.given, here, strict=True):
            yield PeakStorage(holder.nbytes, spec_of([inp.value], holder.nbytes, mesh))
        *made, idle, inside = self.footprint.there(call)
        for storage in made:
            values = storage.node.outs if storage.node is not None else ()
            yield PeakStorage(storage.nbytes, spec_of(values, storage.nbytes, mesh))
        yield from (PeakStorage(idle.nbytes), PeakStorage(inside.nbytes))

    def draw(self, path: str | Path, title: str = "") -> Path:
        """Draw the bytes over the program's course as an SVG: by category, the phases marked, the peak named."""
        from shardfx.visualize import draw_memory

        beside_it = f", {size_text(self.host)} offloaded" if self.host else ""
        shown = title or f"Memory of rank {self.rank}: {size_text(self.peak)} at most{beside_it}"
        names = [str(holder) for holder in self.at_peak[:8]]
        return draw_memory(self.course, self._phases, self.footprint.top, self.peak, names, path, shown, self._beside)

    @property
    def _phases(self) -> list[str]:
        """The phase of each call, where it has one."""
        made = [call.meta.get("shardfx") for call in self.footprint.calls]
        return [node.phase.value if isinstance(node, Node) else "" for node in made]

    @property
    def _calls(self) -> int:
        return len(self.footprint.calls)

    def _holder(self, inp: Input) -> Holder:
        return Holder(CATEGORIES[inp.kind], stored_bytes(inp.value, self.program.mesh, self.rank), inp.name)

    def __str__(self) -> str:
        from rich.console import Group  # imported where it is used: plans and steps need no rich

        from shardfx.report.tables import memory_tables

        return render(Group(*memory_tables(self)))


def stored_bytes(value: Value, mesh: Mesh, rank: int) -> int:
    """The bytes of a rank's shard of an input."""
    assert value.spec is not None
    return prod(held_shape(value.spec, value.shape, mesh, rank)) * value.type.dtype.itemsize


def _by_category(holders: Iterable[Holder]) -> Counter[str]:
    found = Counter[str]()
    for holder in holders:
        found[holder.category] += holder.nbytes
    return found


def _made(category: str, nbytes: int, node: Node | None) -> Holder:
    if node is None:
        return Holder(category, nbytes)
    return Holder(category, nbytes, f"%{node.name}" if node.outs else "", op_name(node.op), node.where)


# ---- the formula of a peak


class PeakStorage(NamedTuple):
    """A storage live at the peak: its bytes, and the placement of its value, if it has one."""

    nbytes: int
    spec: Spec | None = None


def formula(
    here: Sequence[PeakStorage], changed: Sequence[Sequence[PeakStorage]], sizes: Sizes, mesh: Mesh
) -> sympy.Expr:
    """The sum of the terms, in batch and sequence, over the axes that shard each.

    Args:
        here: the storages of a peak.
        changed: the same storages, for each of :attr:`Sizes.ratios`.

    Raises:
        Error: a storage's bytes are neither a product of powers nor such a sum.
    """
    total: sympy.Expr = sympy.Integer(0)
    for mine, *others in zip(here, *changed, strict=True):
        made = _power(mine, others, sizes) if mine.nbytes else sympy.Integer(0)
        made = _sum(mine, others, sizes) if made is None else made
        for axis in mine.spec.axes if mine.spec is not None else ():
            made *= sympy.Integer(mesh[axis].size) / sympy.Symbol(axis)
        total += made
    return total


def _power(term: PeakStorage, others: Sequence[PeakStorage], sizes: Sizes) -> sympy.Expr | None:
    """A number times powers of batch and sequence, if the bytes are that."""
    for powers in product(POWERS, repeat=len(sizes.named)):
        if all(
            other.nbytes == term.nbytes * prod((r**p for r, p in zip(by.values(), powers, strict=True)), start=ONE)
            for by, other in zip(sizes.ratios, others, strict=True)
        ):
            made: sympy.Expr = sympy.Integer(term.nbytes)
            for (name, size), power in zip(sizes.named.items(), powers, strict=True):
                made *= (sympy.Symbol(name) / size) ** power
            return made
    return None


def _sum(term: PeakStorage, others: Sequence[PeakStorage], sizes: Sizes) -> sympy.Expr:
    """A sum of a number, batch, sequence and their product, each with a factor."""
    plain = [1, *(sympy.Symbol(name) for name in sizes.named), sympy.prod(map(sympy.Symbol, sizes.named))]
    basis = [sympy.sympify(each) for each in dict.fromkeys(plain)]
    points = [dict.fromkeys(sizes.named, ONE), *sizes.ratios]
    rows = [
        [each.subs({name: sympy.Rational(point[name] * size) for name, size in sizes.named.items()}) for each in basis]
        for point in points
    ]
    found = sympy.Matrix(rows).LUsolve(sympy.Matrix([term.nbytes, *(other.nbytes for other in others)]))
    if any(factor < 0 for factor in found):
        raise no_formula(f"{term.nbytes} bytes, which become {', '.join(str(other.nbytes) for other in others)}")
    return sum((factor * each for factor, each in zip(found, basis, strict=True)), sympy.Integer(0))


def no_formula(got: str) -> Error:
    """The error that there is no formula, and why."""
    return Error(
        "the memory of this plan has no formula in batch and sequence",
        where="pm.memory().formula",
        expected="bytes that are products of sizes, and the same program for another batch and sequence",
        got=got,
    )


def spec_of(values: Iterable[Value], nbytes: int, mesh: Mesh) -> Spec | None:
    """The placement of the one of the values that has so many bytes on a rank, where all ranks hold as much."""
    for value in values:
        if value.spec is not None and value.local_bytes(mesh) == nbytes:
            return value.spec if value.type.nbytes == nbytes * mesh.extent(value.spec.axes) else None
    return None
