"""A template's words bound to the dims of a node's tensors: the factors of each dim, and their sizes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from shardfx.ir.errors import Error

from .sharding_rule import Dim

Shape = tuple[int, ...]
Dims = tuple[Dim, ...]
Mark = tuple[str, str]
"""When a factor is whole: if the argument is true, or has this value; always, if none is named."""
LEFT_OUT = "none"
"""The dim of an empty vector in the place of a result (or operand) that the op leaves out."""


class TemplateWord(NamedTuple):
    """One word of a template: ``(h d)``, ``n..``, ``h*2``, ``k@dim``; without factors it is a dim of size one."""

    factors: Dim
    many: str = ""
    at: str = ""


class Tensor(NamedTuple):
    """The words of one tensor; the first ones may be missing in one that is ``broadcast``."""

    words: tuple[TemplateWord, ...]
    broadcast: bool = False

    @property
    def is_no_vector(self) -> bool:
        """Whether it has more dims than one, whatever the shape."""
        return not self.broadcast and sum(not many for _, many, _ in self.words) > 1

    def factors(self, sizes: Mapping[str, int]) -> list[Dim]:
        """The factors of each dim, of a rule of these sizes; ``h*2`` is ``h0 h1``."""
        found = []
        for factors, many, _ in self.words:
            numbers = range(int(many)) if many else ("",)
            found += [tuple(n for f in factors if sizes.get(n := f"{f}{i}", 1) != 1) for i in numbers]
        return found

    def __str__(self) -> str:
        return " ".join((" ".join(factors) or "1") + (f"*{many}" if many else "") for factors, many, _ in self.words)


class Key(NamedTuple):
    """All of a node that its rule depends on.

    ``operands`` has for each tensor argument its shape, False if none is given, True if a number is; those that are
    ``barred`` for a result let no partial sum pass to it, whatever the op.
    """

    operands: tuple[Shape | bool, ...]
    results: tuple[Shape | None, ...]
    arguments: tuple[tuple[str, Any], ...] = ()
    sizes: tuple[tuple[str, int], ...] = ()
    barred: tuple[frozenset[int], ...] = ()


class Binding:
    """What becomes known of the words, from one tensor to the next."""

    def __init__(self, marks: Mapping[str, Mark], key: Key) -> None:
        self.arguments = dict(key.arguments)
        self.sizes = dict(key.sizes)
        self.marked = {letter for letter, mark in marks.items() if self._holds(*mark)} | {LEFT_OUT}
        self.whole: set[str] = set()
        self.lead: dict[str, int] = {}
        """How many dims ``n..`` stands for: of all tensors the most."""
        self.fixed: dict[str, int] = {}
        """How many dims ``h*2`` stands for, and the dims that an argument names."""

    def _holds(self, called: str, value: str) -> bool:
        given = self.arguments.get(called)
        return not called or (str(given) == value if value else bool(given))

    def _places(self, at: str, ndim: int) -> list[int]:
        """Where the dims stand that an argument (or a number) names."""
        given = self.arguments[at] if at in self.arguments else int(at)
        if given is None or given == ():
            return list(range(ndim))
        return [d % ndim for d in (given if isinstance(given, tuple) else (given,))] if ndim else []

    def counts(self, tensor: Tensor, shape: Shape) -> list[int]:
        """How many dims of a tensor each word stands for."""
        found: list[int] = []
        slack = kept = None
        for i, (factors, many, at) in enumerate(tensor.words):
            if at:
                named = len(self._places(at, len(shape)))
                if factors:
                    self.fixed[f"@{at}"] = named
                else:
                    kept, named = i, self.fixed.get(f"@{at}", named)
                found.append(named)
            elif not many:
                found.append(1)
            elif many != "..":
                found.append(self._number(many))
                if factors:
                    self.fixed[factors[0]] = found[-1]
            else:
                found.append(self.fixed.get(factors[0], 0))
                slack = slack if factors[0] in self.fixed else i
        lead = tensor.words[slack].factors[0] if slack is not None else ""
        if kept is not None and len(shape) != sum(found) + self.lead.get(lead, 0):
            found[kept] = 0
        if slack is not None:
            found[slack] = max(len(shape) - sum(found), 0)
            self.lead[lead] = max(self.lead.get(lead, 0), found[slack])
        missing = sum(found) - len(shape)
        for i in range(len(found) if missing > 0 and tensor.broadcast else 0):
            less = min(found[i], missing)
            found[i] -= less
            missing -= less
        if missing:
            what = "a rule's template does not have as many dims as the tensor"
            raise Error(what, expected=f"{len(shape)} dims for shape {shape}", got=str(tensor))
        return found

    def _number(self, many: str) -> int:
        if many.isdigit():
            return int(many)
        if many in self.fixed:
            return self.fixed[many]
        given = self.arguments[many]
        return len(given) if isinstance(given, tuple) else int(given)

    def dims(self, tensor: Tensor, shape: Shape, counts: Sequence[int]) -> Dims:
        """The factors of each dim of a tensor."""
        placed: dict[int, Dim] = {}
        rest: list[Dim] = []
        for (factors, many, at), n in zip(tensor.words, counts, strict=True):
            if not many and not isinstance(self.arguments.get(at, 0) if at else 0, (tuple, type(None))):
                names = [factors] * n
            else:
                first = self.lead.get(factors[0], n) - n if many == ".." else 0
                names = [tuple([f"{f}{first + j}" for f in factors]) for j in range(n)]
            for i, f in enumerate(factors):
                if f in self.marked:
                    self.whole.update(each[i] for each in names)
            if at:
                placed.update(zip(self._places(at, len(shape)), names, strict=False))
            else:
                rest += names
        if not placed:
            return tuple(rest)
        others = iter(rest)
        return tuple([placed[d] if d in placed else next(others) for d in range(len(shape))])

    def solve(self, pairs: Sequence[tuple[Dim, int]]) -> None:
        """Find the sizes of all factors: each dim's size is the product of its factors', or one, which broadcasts."""
        sizes = self.sizes
        for dim, size in pairs:
            if len(dim) == 1 and sizes.setdefault(dim[0], size) == 1:
                sizes[dim[0]] = size
        left = [(dim, size) for dim, size in pairs if size != 1 and dim and (len(dim) > 1 or size != sizes[dim[0]])]
        ones = {f for dim, size in pairs if size == 1 for f in dim}
        while left:
            unsolved = []
            for dim, size in left:
                unknown = [f for f in dim if f not in sizes]
                known = math.prod(sizes[f] for f in dim if f in sizes)
                if len(unknown) == 1 and (known == size == 0 or (known and size % known == 0)):
                    sizes[unknown[0]] = size // known if known else 1
                elif len(unknown) > 1:
                    unsolved.append((dim, size))
                elif known != size:
                    raise Error("a tensor's dim does not fit the rule", expected=f"{' '.join(dim)} = {known}", got=size)
            if len(unsolved) == len(left):
                if not ones <= sizes.keys():
                    sizes.update(dict.fromkeys(ones - sizes.keys(), 1))
                    continue
                raise Error("a rule's template leaves sizes open", expected=f"the sizes of {left[0][0]}")
            left = unsolved
        sizes.update(dict.fromkeys(ones - sizes.keys(), 1))

    def held(self, dims: Dims, shape: Shape) -> Dims:
        """Dims without factors of size one that others are multiplied with, and without those that are broadcast."""
        sizes = self.sizes
        return tuple(
            [
                (dim if size != 1 or sizes[dim[0]] == 1 else ())
                if len(dim) == 1
                else tuple([f for f in dim if sizes[f] != 1] if size != 1 else ())
                for dim, size in zip(dims, shape, strict=True)
            ]
        )


def bind(
    operands: Sequence[Tensor], results: Sequence[Tensor], marks: Mapping[str, Mark], key: Key
) -> tuple[tuple[Dims, ...], tuple[Dims | None, ...], dict[str, int], frozenset[str]]:
    """The dims of operands and of results in factors, the sizes of the factors, and those that are whole.

    Raises:
        Error: the tensors do not fit the words.
    """
    given = [(operands[min(i, len(operands) - 1)], s) for i, s in enumerate(key.operands) if not isinstance(s, bool)]
    made = [(results[min(i, len(results) - 1)], s) for i, s in enumerate(key.results) if s is not None]
    tensors = given + made
    if (0,) in key.results or (0,) in key.operands[1:]:
        some = bool(given) and 0 not in given[0][1]
        absent = Tensor((TemplateWord((LEFT_OUT,)),))
        tensors = [(absent if s == (0,) and (some or t.is_no_vector) else t, s) for t, s in tensors]
    binding = Binding(marks, key)
    counts = [binding.counts(tensor, shape) for tensor, shape in tensors]
    bound = [binding.dims(*each, n) for each, n in zip(tensors, counts, strict=True)]
    binding.solve([pair for dims, (_, s) in zip(bound, tensors, strict=True) for pair in zip(dims, s, strict=True)])
    held = [binding.held(dims, shape) for dims, (_, shape) in zip(bound, tensors, strict=True)]
    rest = iter(held[len(given) :])
    placed = tuple([None if s is None else next(rest) for s in key.results])
    sizes = {f: binding.sizes[f] for dims in held for dim in dims for f in dim}
    return tuple(held[: len(given)]), placed, sizes, frozenset(binding.whole & sizes.keys())
