"""What differs becomes communication, and travels together."""

from .duplicate_views import DuplicateViews
from .fuse import FuseComm
from .order import Order
from .partition import Partition

__all__ = ["DuplicateViews", "FuseComm", "Order", "Partition"]
