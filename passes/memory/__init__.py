"""What a rank holds, and when: parameters stored in pieces, values that are made again, or put away."""

from .cast_again import RematerializeCasts
from .offload import Offload
from .recompute import Recompute
from .table_rows import TableRows
from .zero import RematerializeGathers, Zero

__all__ = ["Offload", "Recompute", "RematerializeCasts", "RematerializeGathers", "TableRows", "Zero"]
