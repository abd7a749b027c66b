"""What a parallel module asks of the other ranks of its job before a call runs; :class:`Peers` is a process alone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple, TypeVar

import torch

from shardfx.ir.errors import Error
from shardfx.ir.mesh import Mesh

from .store import Store

T = TypeVar("T")
Words = Callable[[], Mapping[str, str]]
"""A description of what a rank is about to do, by subject; called where ranks differ."""
Subjects = Mapping[str, Sequence[str]]
"""The lines of a plan by subject."""
AROUND = "what the code reads beside its inputs"


class OtherSurroundings(Error):
    """Ranks make the same call, but their code reads other values beside its inputs than at earlier calls."""


class Passed(IntEnum):
    """How a rank's inputs are passed; ``EITHER``: its own shard has the shape of the global input."""

    WHOLE = 0
    PART = 1
    EITHER = 2


class Agreed(NamedTuple):
    """What all ranks agree on: whether inputs are passed as shards, and the number that rank 0 drew."""

    in_parts: bool
    drawn: int | None = None


@dataclass(frozen=True)
class RankInput:
    """An input as a rank passes it: the global and the local shape, and the number of its shard; -1 for the global
    input. Ranks that differ along ``axes`` alone pass the same."""

    name: str
    tensor: torch.Tensor
    whole: tuple[int, ...]
    part: tuple[int, ...]
    shard: int
    axes: tuple[str, ...] = ()


RankInputs = Callable[[], Sequence[RankInput]]


class Peers:
    """The other ranks of a job, to those of this process: here none. Threads run one after another."""

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __deepcopy__(self, memo: dict[int, Any]) -> Peers:
        return Peers()

    @contextmanager
    def calling(self) -> Iterator[None]:
        """The scope of a call. What is raised before :meth:`agree` is told to the other ranks."""
        with self._lock:
            yield

    def agree(
        self,
        key: Hashable,
        words: Words,
        passed: Passed = Passed.EITHER,
        draw: int | None = None,
        rates: Mapping[str, torch.Tensor] | None = None,
        anew: bool = False,
    ) -> Agreed:
        """Check that all ranks are about to do the same, of which ``key`` is the local and ``words`` the common text.

        Args:
            passed: how this rank's inputs are passed.
            draw: a number that this rank drew, where all ranks need the same one.
            rates: numbers of the optimizer, the same on all ranks.
            anew: all that is stored is loaded, so that earlier differences do not matter.

        Raises:
            OtherSurroundings: on all ranks, if they differ in :data:`AROUND` alone.
            Error: they differ; a rank did something else to its parameters since the last call; or a rank failed
                before it came here.
        """
        return Agreed(passed is Passed.PART, draw)

    def holds(self, store: Store) -> None:
        """Note the store of the planned module."""

    def planned(self, make: Callable[[], T], subjects: Callable[[T], Subjects]) -> T:
        """Make a plan, and check that all ranks made the same one."""
        return make()

    def compare(self, key: Hashable, inputs: RankInputs, always: bool = False) -> None:
        """Check inputs that should be the same on several ranks by a checksum: on the first, second, fourth, eighth ...
        call of this ``key``, or ``always``."""

    def firsts(self, mesh: Mesh, inputs: RankInputs) -> Mapping[str, torch.Tensor]:
        """Broadcast inputs that should be the same on several ranks from the first of these; by name."""
        return {}
