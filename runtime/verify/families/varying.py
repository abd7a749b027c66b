"""Numbers that differ by rank, so that lowering runs once for many ranks.

    rank = Together([0, 1, 2, 3]).rank()      rank % 2            0, 1, 0, 1
                                              rank // 2 - rank // 2   0: a number like any other
                                              f"@{rank % 2}"      "@⟨0⟩", a text with a mark
                                              if rank % 2: ...    raises Diverged: 0, 2 and 1, 3 take other branches

Arithmetic is done for all ranks at once. Where code would branch differently for them, or asks for the number itself
(as an index, a key, a size), it is run again for those ranks that branch alike: what it then writes for a rank is what
it writes for that rank alone.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from numbers import Integral
from typing import Any, NoReturn

import torch
from torch import fx

MARK = re.compile("⟨(\\d+)⟩")
"""A placeholder in texts for a number that differs by rank."""


class Diverged(BaseException):
    """Control flow that diverges between ranks. No ``Exception``: lowering converts those to its own errors."""

    def __init__(self, parts: Sequence[Sequence[int]]) -> None:
        super().__init__(f"{len(parts)} ways")
        self.parts = parts


class Together:
    """Ranks that are lowered together, to one program."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks = tuple(ranks)
        self.place = {rank: i for i, rank in enumerate(self.ranks)}
        self._marked: list[tuple[int, ...]] = []
        self._marks: dict[tuple[int, ...], int] = {}

    def rank(self) -> Any:
        """The number of the rank: a plain one, if there is one only."""
        return self.number(torch.tensor(self.ranks))

    def number(self, values: torch.Tensor) -> Any:
        """One number for each of the ranks; a plain one where it is the same for all."""
        first = int(values[0])
        return first if bool((values == first).all()) else Varying(self, values)

    def mark(self, number: Varying) -> str:
        """The mark of a number in a text: equal marks for equal numbers."""
        values = number.numbers()
        if values not in self._marks:
            self._marks[values] = len(self._marked)
            self._marked.append(values)
        return f"⟨{self._marks[values]}⟩"

    def at(self, arg: Any, rank: int) -> Any:
        """The value of an argument on one of the ranks."""
        if isinstance(arg, Varying):
            return int(arg.values[self.place[rank]])
        return self._text(arg, self.place[rank]) if isinstance(arg, str) else arg

    def _text(self, text: str, place: int) -> str:
        return MARK.sub(lambda found: str(self._marked[int(found[1])][place]), text) if "⟨" in text else text

    def on_each(self, arg: Any) -> Sequence[Hashable] | None:
        """The values of a number or text on each rank; None: it is the same on all."""
        if isinstance(arg, Varying):
            return arg.numbers()
        if isinstance(arg, str) and "⟨" in arg:
            return [self._text(arg, place) for place in range(len(self.ranks))]
        return None


def _operator(do: Callable[[Any, Any], Any]) -> Any:
    return lambda self, other: self._computed(other, do)


def _comparison(do: Callable[[Any, Any], Any]) -> Any:
    return lambda self, other: self._compared(other, do)


class Varying:
    """A number that differs between the ranks of one program."""

    __slots__ = ("_numbers", "together", "values")

    def __init__(self, together: Together, values: torch.Tensor) -> None:
        self.together, self.values = together, values
        self._numbers: tuple[int, ...] | None = None

    def numbers(self) -> tuple[int, ...]:
        """The number of each rank, in their order."""
        if self._numbers is None:
            self._numbers = tuple(self.values.tolist())
        return self._numbers

    # ---- for all ranks at once ----

    def _computed(self, other: Any, do: Callable[[Any, Any], Any]) -> Any:
        if isinstance(other, Varying):
            return self.together.number(do(self.values, other.values))
        return self.together.number(do(self.values, other)) if isinstance(other, int) else NotImplemented

    __add__ = __radd__ = _operator(operator.add)
    __mul__ = __rmul__ = _operator(operator.mul)
    __sub__ = _operator(operator.sub)
    __rsub__ = _operator(lambda a, b: b - a)
    __floordiv__ = _operator(operator.floordiv)
    __mod__ = _operator(operator.mod)

    def __divmod__(self, other: Any) -> Any:
        return self // other, self % other

    def __neg__(self) -> Any:
        return self.together.number(-self.values)

    def __format__(self, spec: str) -> str:
        return self._exactly() if spec else self.together.mark(self)

    def __str__(self) -> str:
        return self.together.mark(self)

    __repr__ = __str__

    # ---- where ranks may take different branches ----

    def _decided(self, mask: torch.Tensor) -> bool:
        first = bool(mask[0])
        if bool((mask == first).all()):
            return first
        pairs = list(zip(self.together.ranks, mask.tolist(), strict=True))
        raise Diverged([[rank for rank, taken in pairs if taken is way] for way in (True, False)])

    def _compared(self, other: Any, do: Callable[[Any, Any], Any]) -> Any:
        if isinstance(other, Varying):
            return self._decided(do(self.values, other.values))
        return self._decided(do(self.values, other)) if isinstance(other, (int, float)) else NotImplemented

    __eq__ = _comparison(operator.eq)
    __ne__ = _comparison(operator.ne)
    __lt__ = _comparison(operator.lt)
    __le__ = _comparison(operator.le)
    __gt__ = _comparison(operator.gt)
    __ge__ = _comparison(operator.ge)

    def __bool__(self) -> bool:
        return self._decided(self.values != 0)

    def _exactly(self, *_: Any) -> NoReturn:
        parts: dict[int, list[int]] = {}
        for rank, number in zip(self.together.ranks, self.numbers(), strict=True):
            parts.setdefault(number, []).append(rank)
        raise Diverged(list(parts.values()))

    __hash__ = __index__ = __int__ = __float__ = __abs__ = __invert__ = __round__ = _exactly
    __truediv__ = __rtruediv__ = __rfloordiv__ = __rmod__ = __rdivmod__ = __pow__ = __rpow__ = _exactly
    __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = _exactly
    __lshift__ = __rlshift__ = __rshift__ = __rrshift__ = _exactly


Integral.register(Varying)


def leaves(*nest: Any) -> Iterable[Any]:
    """The constants in a nest of arguments, nodes aside."""
    for arg in nest:
        if isinstance(arg, (list, tuple)):
            yield from leaves(*arg)
        elif isinstance(arg, dict):
            yield from leaves(*arg.values())
        elif not isinstance(arg, fx.Node):
            yield arg
