"""The memory of a program while it is replayed."""

from __future__ import annotations

from dataclasses import dataclass, field

from shardfx.ir.cost.fake_calls import Layout
from shardfx.ir.graph import Node, Phase

from .call_moments import Place
from .storages import Storage
from .turn_sizes import Since


@dataclass(eq=False, slots=True)
class Block:
    """A storage; ``uses`` are the last calls that use it in units of turns, ``sizes`` its bytes from some
    turn on, where these are others."""

    nbytes: int
    born: int
    last: int
    node: Node | None
    category: str = ""
    used_in: Phase | None = None
    kept: bool = False
    pool: str = ""
    uses: dict[Place, int] = field(default_factory=dict)
    sizes: dict[Since, int] = field(default_factory=dict)
    message: bool = False

    def storage(self, category: str) -> Storage:
        """It as it is known in the end."""
        uses = (*self.uses.values(),)
        given = self.nbytes, self.born, self.last, category, self.node, self.kept, self.pool
        return Storage(*given, uses, self.sizes, self.message)

    def use(self, at: int, place: Place) -> None:
        """A call uses it."""
        self.last = at
        if place:
            self.uses[place] = at


@dataclass(frozen=True, slots=True)
class BlockTensor:
    """A tensor in a block; ``offset`` is the number of elements before its first one."""

    layout: Layout
    block: Block
    offset: int = 0
