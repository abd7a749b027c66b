"""What a rank holds, and when: parameters stored in pieces, values that are made again."""

from .recompute import Recompute
from .zero import GatherAgain, Zero

__all__ = ["GatherAgain", "Recompute", "Zero"]
