"""Which kept memory is lent to whoever asks for some: one policy, for engines and for what foresees them.

Memory that is kept between steps may be larger than what is asked for, up to twice: segments of parameters that are
gathered one behind the other differ a little, and need not each have memory of their own.

    >>> choose(100, [80, 150, 120])
    Choice(take=2, drop=None)
    >>> choose(100, [80, 300])                  # 80 goes, for what is made now serves in its place
    Choice(take=None, drop=0)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

SLACK = 2


class Choice(NamedTuple):
    """Which of the free memories is lent (None: new memory is made), and which one goes."""

    take: int | None
    drop: int | None = None


def choose(nbytes: int, free: Sequence[int]) -> Choice:
    """What is lent to one who asks for ``nbytes``, where memories of ``free`` bytes are kept and nobody has them."""
    if nbytes in free:  # as nearly always
        return Choice(free.index(nbytes))
    fits = [(size, i) for i, size in enumerate(free) if nbytes <= size <= SLACK * nbytes]
    if fits:
        return Choice(min(fits)[1])
    smaller = [(size, -i) for i, size in enumerate(free) if nbytes <= SLACK * size < SLACK * nbytes]
    return Choice(None, -max(smaller)[1] if smaller else None)
