"""What a layer of a random model is: its text, and the numbers that it is drawn with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

NUMBERS = 8
"""So many numbers a layer is drawn with."""


@dataclass
class Pick:
    """Choices by numbers that were drawn before."""

    numbers: Sequence[int]
    at: int = 0

    def of(self, *options: int) -> int:
        number = self.numbers[self.at % len(self.numbers)]
        self.at += 1
        return options[number % len(options)]

    def text(self, *options: str) -> str:
        return options[self.of(*range(len(options)))]

    def flag(self) -> bool:
        return bool(self.of(0, 1))

    def divisor(self, number: int, *options: int) -> int:
        return self.of(*(o for o in options if number % o == 0))


@dataclass(frozen=True)
class Shard:
    """What a layer adds to a model: ``self.NAME<suffix> = expression`` and statements; ``{n}`` is its name.

    ``ndim`` is that of the output of the module ``NAME``, where there is one.
    """

    time: int
    dim: int
    statements: tuple[str, ...]
    members: tuple[tuple[str, str], ...] = ()
    ndim: int = 0


Kind = Callable[[Pick, int, int], Shard]


def enters(kinds: dict[str, Kind]) -> Callable[[Kind], Kind]:
    """A decorator that enters kinds of layers, by their names."""

    def enter(function: Kind) -> Kind:
        kinds[function.__name__] = function
        return function

    return enter


def module(expression: str, time: int, dim: int, call: str = "self.{n}(y)") -> Shard:
    """A layer that is one module."""
    return Shard(time, dim, (f"y = {call}",), (("", expression),), 3)


def code(time: int, dim: int, *statements: str, **parameters: str) -> Shard:
    """A layer that is a few statements, with parameters ``self.{n}_NAME``."""
    members = tuple((f"_{name}", f"nn.Parameter({value})") for name, value in parameters.items())
    return Shard(time, dim, statements, members)
