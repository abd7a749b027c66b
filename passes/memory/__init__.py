"""What a rank holds, and when: parameters stored in pieces, values that are made again."""

from .cast_again import CastAgain
from .recompute import Recompute
from .zero import GatherAgain, Zero

__all__ = ["CastAgain", "GatherAgain", "Recompute", "Zero"]
