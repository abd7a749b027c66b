"""What a rank holds of what is under way, beside what its program says: that is up to what carries it."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .stays import Stays


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

    def early(self, stays: Stays) -> Stays:
        """Storages, with those of messages made as early as they are."""
        return stays.ahead(self.ahead) if self.ahead else stays


PLAIN = Transport()
"""Nothing is there but what programs say."""
