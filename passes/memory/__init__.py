"""What a rank holds, and when: parameters stored in pieces, values that are made again, or put away."""

from .cast_again import CastAgain
from .offload import Offload
from .recompute import Recompute
from .table_rows import TableRows
from .zero import GatherAgain, Zero

__all__ = ["CastAgain", "GatherAgain", "Offload", "Recompute", "TableRows", "Zero"]
