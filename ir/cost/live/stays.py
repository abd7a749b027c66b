"""The storages of a program as often as they are made, in columns: hundreds of turns make hundreds of thousands.

which   0   1   1        storage 1 is made in two turns
born    0   1   5        at these moments
last    9   4   8        and used last at these
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from .storages import Storage

Numbers = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Stays:
    """Storages, and by column, for each time that one is made: which, when first and last, and its bytes."""

    storages: tuple[Storage, ...]
    which: Numbers
    born: Numbers
    last: Numbers
    nbytes: Numbers

    @staticmethod
    def once(storages: tuple[Storage, ...]) -> Stays:
        """Storages that are made once, at the calls that they say."""
        columns = [[each.born, each.last, each.nbytes] for each in storages]
        return Stays(storages, np.arange(len(storages)), *np.array(columns, dtype=np.int64).reshape(-1, 3).T)

    def where(self, chosen: Any) -> Stays:
        """Those of some lines, by a mask or by their numbers."""
        return Stays(self.storages, *(each[chosen] for each in (self.which, self.born, self.last, self.nbytes)))

    def of(self, chosen: Sequence[bool]) -> Stays:
        """Those of some storages: one word for each."""
        return self.where(np.array(chosen, dtype=bool)[self.which])

    def by_birth(self) -> Stays:
        """In the order in which they are made."""
        return self.where(np.argsort(self.born, kind="stable"))

    def ahead(self, count: int) -> Stays:
        """With memory for so many messages there before they are asked for, in the order in which they are made."""
        found = self.by_birth()
        (messages,) = np.nonzero(np.array([each.message for each in self.storages], dtype=bool)[found.which])
        born = found.born.copy()
        born[messages] = np.concatenate([np.zeros(count, dtype=np.int64), found.born[messages]])[: len(messages)]
        return replace(found, born=born)

    def in_use(self, moments: int) -> Numbers:
        """The bytes that are there at each of so many moments."""
        steps = np.zeros(moments + 1, dtype=np.int64)
        np.add.at(steps, self.born, self.nbytes)
        np.subtract.at(steps, self.last + 1, self.nbytes)
        return np.cumsum(steps[:-1])

    def at(self, moment: int) -> list[Storage]:
        """The storages that are there at a moment, as they are then."""
        there = self.where((self.born <= moment) & (moment <= self.last))
        lines = zip(there.which, there.born.tolist(), there.last.tolist(), there.nbytes.tolist(), strict=True)
        return [self.storages[which].at(born, last, nbytes) for which, born, last, nbytes in lines]

    def __iter__(self) -> Iterator[tuple[int, int, int]]:
        """When each is made and used last, and its bytes."""
        return zip(self.born.tolist(), self.last.tolist(), self.nbytes.tolist(), strict=True)
