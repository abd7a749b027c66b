"""Memory of a rank in a step: the peak, by call, by category, and by module.

>>> memory = pm.memory()
>>> memory.peak, memory.by_category["activations"]
(8252424, 3735552)
>>> print(memory.at_peak[0])
1.6 MB  activations  %35 aten.mm  layers.0.fc1  gpt.py:31
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from pathlib import Path

import sympy

from shardfx.ir.cost.footprint import Footprint
from shardfx.ir.errors import Error
from shardfx.ir.graph import NOWHERE, Input, InputKind, Node, OutputKind, Value, Where, op_name
from shardfx.ir.mesh import Mesh
from shardfx.ir.program.rank_program import RankProgram
from shardfx.ir.shards import held_shape
from shardfx.ir.text.printer import size_text
from shardfx.report.console import render

from .formula import PeakStorage, Sizes, formula, no_formula, spec_of

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
NO_SIZES = Sizes()
BUFFERS = "communication buffers"
ALLOWANCE, SEGMENT = 1.03, 2 << 20
"""The bytes that the CUDA allocator reserves, as a multiple of those of live tensors; and its unit."""
MADE = {"communication": BUFFERS, "kept": BUFFERS, "gathered": "gathered parameters", "cast": "cast parameters"}
"""The categories of storages that it makes, where they are renamed here."""


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
                moment[MADE.get(category, category)] += nbytes
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
    return math.prod(held_shape(value.spec, value.shape, mesh, rank)) * value.type.dtype.itemsize


def _by_category(holders: Iterable[Holder]) -> Counter[str]:
    found = Counter[str]()
    for holder in holders:
        found[holder.category] += holder.nbytes
    return found


def _made(category: str, nbytes: int, node: Node | None) -> Holder:
    name = MADE.get(category, category)
    if node is None:
        return Holder(name, nbytes)
    return Holder(name, nbytes, f"%{node.name}" if node.outs else "", op_name(node.op), node.where)
