"""What differs becomes communication, and travels together."""

from .duplicate_views import DuplicateViews
from .fuse import FuseComm
from .partition import Partition

__all__ = ["DuplicateViews", "FuseComm", "Partition"]
