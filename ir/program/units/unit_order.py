"""The order in which units of turns are done: which unit of which turn, word by word."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from torch import fx


class Word(NamedTuple):
    """A unit of one turn, ``F0.3``."""

    unit: str
    turn: int

    def __str__(self) -> str:
        return f"{self.unit}.{self.turn}"


@dataclass(frozen=True)
class UnitOrder:
    """The order of the units of turns."""

    words: tuple[Word, ...]

    @staticmethod
    def of(words: Iterable[str]) -> UnitOrder:
        """The order of some words.

        Raises:
            ValueError: naming the first that is none.
        """
        found = []
        for word in words:
            if not (match := re.fullmatch(r"([A-Za-z_]\w*)\.(\d+)", word)):
                raise ValueError(f"{word!r} is no unit of a turn, as F0.1 is")
            found.append(Word(match[1], int(match[2])))
        return UnitOrder(tuple(found))

    @cached_property
    def units(self) -> tuple[str, ...]:
        """The units, in the order in which they are first done."""
        return tuple(dict.fromkeys(word.unit for word in self.words))

    @cached_property
    def _place(self) -> dict[Word, int]:
        return {word: place for place, word in enumerate(self.words)}

    @cached_property
    def _turned(self) -> dict[tuple[str, str], int | None]:
        return {}

    def incomplete(self, turns: int) -> str:
        """Which unit is not done once of each of so many turns; empty where each is."""
        there = Counter(self.words)
        for unit in self.units:
            for turn in range(turns):
                if (times := there.pop(Word(unit, turn), 0)) != 1:
                    return f"{Word(unit, turn)} is done {'twice' if times == 2 else f'{times} times'}"
        return f"{next(iter(there))} is of none of {turns} turns" if there else ""

    def turned_round(self, first: str, second: str) -> int | None:
        """The first turn in which the unit that is to be first is not done before the other; None where it always
        is."""
        pair, place = (first, second), self._place
        if pair not in self._turned:  # it is asked of each value that one hands on to the other
            never = len(place)
            done = ((word, place.get(Word(first, word.turn), never)) for word in self.words if word.unit == second)
            self._turned[pair] = next((word.turn for word, at in done if at > place[word]), None)
        return self._turned[pair]

    @cached_property
    def under_way(self) -> int:
        """How many turns have begun and are not over, at most."""
        left = Counter(word.turn for word in self.words)
        begun, most = set[int](), 0
        for word in self.words:
            begun.add(word.turn)
            most = max(most, len(begun))
            left[word.turn] -= 1
            if not left[word.turn]:
                begun.remove(word.turn)
        return most

    def last(self, units: Sequence[str], turn: int) -> str:
        """The unit of several that is done last of a turn."""
        return max(units, key=lambda unit: self._place[Word(unit, turn)])

    def __str__(self) -> str:
        return " ".join(map(str, self.words))


def order_of(begin: fx.Node) -> str:
    """The order of the units of turns that begin here; empty where they have none."""
    return str(begin.args[3]) if len(begin.args) > 3 else ""
