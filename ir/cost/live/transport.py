"""What a rank holds of what is under way, beside what its program says: that is up to what carries it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .storages import Storage


@dataclass(frozen=True)
class Transport:
    """How collectives and messages are carried.

    Args:
        exchanged: reduce-scatters of so many bytes run as an exchange and a sum: all that a rank gets is there from the
            start to the wait, and the result is made there.
        ahead: memory for so many messages from other stages is there before they are asked for: from the call that
            asks for one so many before it, or from the first call on.
    """

    exchanged: float = inf
    ahead: int = 0

    def early(self, storages: Iterable[Storage]) -> list[Storage]:
        """Storages with those of messages made as early as they are.

        Args:
            storages: by the moments in which they are made and used last.
        """
        made = sorted(storages, key=lambda storage: storage.born)
        asked: deque[int] = deque([0] * self.ahead)
        for place, each in enumerate(made):
            if each.message and self.ahead:
                asked.append(each.born)
                made[place] = replace(each, born=asked.popleft())
        return made


PLAIN = Transport()
"""Nothing is there but what programs say."""
