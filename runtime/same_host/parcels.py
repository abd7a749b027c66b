"""What goes from one rank of a group to another of the same machine: laid where that one sees it.

    rank 0                                          rank 1
    lays a copy into a free place: SENT 7    ->     ...
    goes on                                         takes a copy when it waits for 7
    may use the place again                  <-     TAKEN

Nobody waits to send: a place is free again when what lay there was taken, and where none is free there is one more.
What is received is found by its number, so that it need not be waited for in the order in which it was sent; of one
number, what was sent first comes first.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .links import Link, Word
from .shared_memory import Segment, segment_of, shared_bytes

Tensor = torch.Tensor


class Parcel:
    """What is under way to this rank; it is laid ``into`` a tensor."""

    def __init__(self, link: Link, number: int, into: Tensor) -> None:
        self._link, self._number, self._into = link, number, into

    def wait(self) -> Tensor:
        """What was sent.

        Raises:
            NeighbourError: it does not come.
        """
        link, into = self._link, self._into
        segment, offset = link.hear_where(Word.SENT, self._number)
        into.copy_(link.memory[segment][offset : offset + into.nbytes].view(into.dtype).view(into.shape))
        link.tell(Word.TAKEN, segment)
        return into


class _Place:
    """Memory that a neighbour sees, for what is sent; ``to`` whom what lies there is under way, if it is."""

    def __init__(self, nbytes: int) -> None:
        self.memory = shared_bytes(nbytes)
        where = segment_of(self.memory)
        assert where is not None
        self.segment: Segment = where[0]
        self.to: Link | None = None

    def is_free(self) -> bool:
        """Whether what was laid here has been taken by now."""
        if self.to is not None and self.to.has_heard(Word.TAKEN, self.segment.number):
            self.to.hear(Word.TAKEN, self.segment.number)
            self.to = None
        return self.to is None


class Parcels:
    """What one rank sends to others of a group, and gets from them.

    Args:
        links: to the others, by their place in the group.
    """

    def __init__(self, links: Sequence[Link | None]) -> None:
        self._links = links
        self._places: list[_Place] = []

    @property
    def memory(self) -> list[Tensor]:
        """Where what is sent lies."""
        return [place.memory for place in self._places]

    def send(self, x: Tensor, to: int, number: int) -> None:
        """Send ``x``, of which a copy is made, to the rank at a place of the group."""
        link = self._link(to)
        place = self._place_of(x.nbytes)
        place.memory[: x.nbytes].view(x.dtype).view(x.shape).copy_(x)
        place.to = link
        link.tell(Word.SENT, number, (place.segment, 0))

    def receive(self, into: Tensor, origin: int, number: int) -> Parcel:
        """What the rank at a place of the group sends by this number."""
        return Parcel(self._link(origin), number, into)

    def _link(self, place: int) -> Link:
        link = self._links[place]
        assert link is not None, "a rank sends to itself"
        return link

    def _place_of(self, nbytes: int) -> _Place:
        """A free place that is large enough."""
        free = [place for place in self._places if place.is_free()]
        fits = [place for place in free if place.memory.numel() >= nbytes]
        if fits:
            return min(fits, key=lambda place: place.memory.numel())
        if free:
            self._places.remove(free[0])
        self._places.append(_Place(max(nbytes, 1)))
        return self._places[-1]
