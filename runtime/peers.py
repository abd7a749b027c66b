"""The ranks make a call together: what every rank says before anything is sent.

A rank that does otherwise than the others would wait for them, or pair its collectives with those of another program.
So each call of a parallel module begins with a few numbers from every rank: what it is about to run, in which form.
Where they differ, all ranks raise an error that says both, and nothing was sent.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple, Protocol, TypeVar

import torch

from shardfx.ir.errors import Error
from shardfx.ir.mesh import Mesh

from .store import Store

T = TypeVar("T")
Words = Callable[[], Mapping[str, str]]
"""What a rank is about to do, in words by subject; asked for where ranks differ."""
Subjects = Mapping[str, Sequence[str]]
"""What a rank has planned, as lines by subject."""


AROUND = "what the code reads beside its inputs"


class OtherSurroundings(Error):
    """Ranks come to the same call, but that their code finds other things beside its inputs than at calls before."""


class Passed(IntEnum):
    """How a rank's inputs are passed."""

    WHOLE = 0
    PART = 1
    EITHER = 2
    """This rank's own part has the shape of the whole."""


class Agreed(NamedTuple):
    """What all ranks agree on: whether inputs are passed in parts, and the number that the first rank drew."""

    in_parts: bool
    drawn: int | None = None


@dataclass(frozen=True)
class Content:
    """An input as a rank passes it: the shape of the whole and of this rank's part, and which part that is; -1 for the
    whole. Ranks that differ along ``axes`` alone pass the same."""

    name: str
    tensor: torch.Tensor
    whole: tuple[int, ...]
    part: tuple[int, ...]
    piece: int
    axes: tuple[str, ...] = ()


Contents = Callable[[], Sequence[Content]]


class Peers(Protocol):
    """The other ranks of a mesh, to those of this process."""

    def calling(self) -> AbstractContextManager[None]:
        """A call, from its first line to its last. What is raised within before :meth:`agree` is told to the others.

        Raises:
            Error: another thread is in a call, and its order on the other ranks is not known.
        """

    def agree(
        self,
        key: Hashable,
        words: Words,
        passed: Passed = Passed.EITHER,
        draw: int | None = None,
        later: bool = False,
        alike: Contents = tuple,
        anew: bool = False,
    ) -> Agreed:
        """All ranks are about to do the same, of which ``key`` is the text.

        Args:
            passed: how this rank's inputs are passed.
            draw: a number that this rank drew, where all ranks need the same one.
            later: go on without waiting for the others, where this rank knows how their inputs are passed: what is to
                be raised is raised before anything is sent.
            alike: what all ranks pass alike, of which a sample is compared.
            anew: what was done to parameters counts no more, for all are loaded.

        Raises:
            OtherSurroundings: on all ranks, if they differ in :data:`AROUND` alone.
            Error: they are not; a rank did something else to its parameters since the last call; or a rank failed
                before it came here.
        """

    def holds(self, store: Store) -> None:
        """What this process holds of the module that was planned."""

    def planned(self, make: Callable[[], T], subjects: Callable[[T], Subjects]) -> T:
        """What ``make()`` plans; all ranks plan the same, which ``subjects`` says.

        Raises:
            Error: they do not; or a rank could not plan.
        """

    def compare(self, key: Hashable, contents: Contents, always: bool = False) -> None:
        """Inputs that should be the same on several ranks are, and so is what they hold, on some of the calls of this
        ``key``: the first one, and ever fewer after it; or ``always``.

        Raises:
            Error: they are not.
        """

    def firsts(self, mesh: Mesh, contents: Contents) -> Mapping[str, torch.Tensor]:
        """In the place of inputs that should be the same on several ranks, those of the first of these; by name."""


class Alone:
    """All ranks are in this process, or its own alone: threads take turns, and nobody else is there to differ."""

    def __init__(self) -> None:
        self._turn = threading.RLock()

    def __deepcopy__(self, memo: dict[int, Any]) -> Alone:
        return Alone()

    @contextmanager
    def calling(self) -> Iterator[None]:
        """A turn of this thread's."""
        with self._turn:
            yield

    def agree(
        self,
        key: Hashable,
        words: Words,
        passed: Passed = Passed.EITHER,
        draw: int | None = None,
        later: bool = False,
        alike: Contents = tuple,
        anew: bool = False,
    ) -> Agreed:
        """Nobody passes inputs in another way."""
        return Agreed(passed is Passed.PART, draw)

    def holds(self, store: Store) -> None:
        """Nobody else holds it."""

    def planned(self, make: Callable[[], T], subjects: Callable[[T], Subjects]) -> T:
        """What is planned."""
        return make()

    def compare(self, key: Hashable, contents: Contents, always: bool = False) -> None:
        """There is one of each."""

    def firsts(self, mesh: Mesh, contents: Contents) -> Mapping[str, torch.Tensor]:
        """There is one of each."""
        return {}
