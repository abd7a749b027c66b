"""Repeated blocks that are folded out of a graph: ``repeat layers 2..77``.

A graph with this line has the blocks ``layers.0``, ``layers.1``, ``layers.78`` and ``layers.79`` around those that
are left out, and each of these is ``layers.1`` again, with its own parameters and its own neighbours. So a graph of 80
blocks is traced and planned at the cost of four. :mod:`shardfx.ir.unfolding.unfold` puts the blocks back.
"""

from __future__ import annotations

from dataclasses import dataclass

from .errors import Error

AROUND = 2
"""How many blocks stand on each side of those that are left out: the neighbour on either side that is like them, and
its own neighbour."""


@dataclass(frozen=True)
class Repeat:
    """A repeat: blocks ``path.first`` to ``path.last`` are left out, each equal to block ``first - 1``.

    Raises:
        Error: nothing is left out, or there is no room for the blocks around.
    """

    path: str
    first: int
    last: int

    def __post_init__(self) -> None:
        if not self.path or not AROUND <= self.first <= self.last:
            expected = f"the path of a list, and numbers from {AROUND} on, the first not behind the last"
            raise Error("these blocks cannot be left out", expected=expected, got=str(self))

    @property
    def left_out(self) -> range:
        """The numbers of the blocks that are left out."""
        return range(self.first, self.last + 1)

    @property
    def around(self) -> tuple[int, int, int, int]:
        """The blocks that are there: two before those that are left out, two behind."""
        return self.first - 2, self.first - 1, self.last + 1, self.last + 2

    def block(self, index: int) -> str:
        """The path of a block."""
        return f"{self.path}.{index}"

    def within(self, name: str) -> int | None:
        """The number of the block that a module or parameter lies in, or None."""
        if not name.startswith(self.path + "."):
            return None
        index = name[len(self.path) + 1 :].partition(".")[0]
        return int(index) if index.isdigit() else None

    def moved(self, name: str, index: int) -> str:
        """The name of the same module or parameter in block ``index``; a name outside of the list stays."""
        here = self.within(name)
        return name if here is None else self.block(index) + name[len(self.block(here)) :]

    def __str__(self) -> str:
        return f"{self.path} {self.first}..{self.last}"
