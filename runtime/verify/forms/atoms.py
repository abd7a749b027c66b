"""What there is of values and atoms, numbered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from shardfx.runtime.verify.proof.elements import Elements
from shardfx.runtime.verify.proof.strided_runs import BITS

from .arithmetic import Product, Sum
from .moves import canonical, spread
from .values import Alone, Each, Placed, V, values_in


@dataclass
class Atoms:
    """All values of one comparison."""

    values: list[Placed] = field(default_factory=list)
    atoms: list[Any] = field(default_factory=list)
    """What each atom is, by number from 1."""
    _numbers: dict[Any, int] = field(default_factory=dict)
    _atoms: dict[Any, int] = field(default_factory=dict)
    _built: dict[tuple[V, int], str] = field(default_factory=dict)
    apart: int = 0
    """How many values there are that equal nothing else."""

    def value(self, elements: Elements, dtype: torch.dtype) -> V:
        """The value of these elements."""
        elements = canonical(elements)
        key = elements.shape, elements.runs, dtype
        if key not in self._numbers:
            self.values.append(Placed(elements, dtype))
            self._numbers[key] = len(self.values) - 1
        return V(self._numbers[key])

    def atom(self, what: Any, shape: Sequence[int], dtype: torch.dtype) -> V:
        """The value that is all of an atom."""
        key = what, tuple(shape), dtype
        if key not in self._atoms:
            self.atoms.append(what)
            self._atoms[key] = len(self.atoms)
        size = torch.Size(shape).numel()
        return self.value(Elements.of(shape, self._atoms[key] << BITS, ((size, 1),)), dtype)

    def given(self, name: Any, shape: Sequence[int], dtype: torch.dtype) -> V:
        """What goes in, by name."""
        return self.atom(("given", name), shape, dtype)

    def another(self, shape: Sequence[int], dtype: torch.dtype) -> V:
        """What equals nothing else."""
        self.apart += 1
        return self.atom(("another", self.apart), shape, dtype)

    def constant(self, number: Any, shape: Sequence[int], dtype: torch.dtype) -> V:
        """A number, everywhere."""
        if isinstance(number, (int, float)):
            number = torch.tensor(number, dtype=dtype).item()
        one = self.atom(Alone.of(number), (), dtype)
        return self.value(spread(self[one].elements, shape), dtype)

    def __getitem__(self, of: V) -> Placed:
        return self.values[of.number]

    def all_of(self, of: V) -> Any:
        """What a value is all elements of, in order; None: it is made of elements of several atoms, or moved."""
        value = self[of]
        runs, size = value.elements.runs, value.elements.numel()
        whole = len(runs) == 1 and runs[0].base & ((1 << BITS) - 1) == 0 and runs[0].loops in (((size, 1),), ())
        if not whole or not runs[0].source:
            return None
        key = self.atoms[runs[0].source - 1], value.shape, value.dtype
        return key[0] if self._atoms.get(key) == runs[0].source else None

    def number(self, of: V) -> int | float | None:
        """The number that a value is everywhere; None: it is not, or not one to reckon with."""
        value = self[of]
        runs = value.elements.runs
        if len(runs) != 1 or runs[0].base & ((1 << BITS) - 1) or any(stride for _, stride in runs[0].loops):
            return None
        what = self.atoms[runs[0].source - 1] if runs[0].source else None
        number = what.number if isinstance(what, Alone) else None
        if not isinstance(number, (int, float)) or isinstance(number, bool):
            return None
        return number if abs(number) < float("inf") else None

    def sources(self, of: V) -> list[int]:
        """The atoms whose elements a value has, by number."""
        return sorted({run.source for run in self[of].elements.runs if run.source})

    def built(self, of: V, depth: int = 3) -> str:
        """Of what a value is made, so many ops deep: which ops, and not of which values, and in which order."""
        if (of, depth) not in self._built:
            atoms = [self.atoms[source - 1] for source in self.sources(of)]
            self._built[of, depth] = " ".join(sorted({self._built_of(each, depth) for each in atoms}))
        return self._built[of, depth]

    def _built_of(self, what: Any, depth: int) -> str:
        if isinstance(what, Sum | Product):
            inside = [V(value) for value in what.values]
        else:
            inside = list(values_in(what.args if isinstance(what, Each) else what))
        within = sorted(self.built(each, depth - 1) for each in inside) if depth else []
        name = what.op if isinstance(what, Each) else what[:2] if isinstance(what, tuple) else type(what)
        return f"{name if not isinstance(name, tuple) else [e for e in name if not isinstance(e, V)]}{within}"
