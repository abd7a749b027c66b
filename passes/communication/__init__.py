"""Communication passes: placements that differ become collectives, which are placed and coalesced."""

from .cast_placement import CastPlacement
from .duplicate_views import DuplicateViews
from .fuse import BucketComm
from .order import Order
from .partition import Partition

__all__ = ["BucketComm", "CastPlacement", "DuplicateViews", "Order", "Partition"]
