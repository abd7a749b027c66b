"""Memory passes: sharded parameter storage, recomputation, offloading."""

from .offload import Offload
from .recompute import Recompute, RematerializeCasts, RematerializeGathers
from .table_rows import TableRows
from .zero import Zero

__all__ = ["Offload", "Recompute", "RematerializeCasts", "RematerializeGathers", "TableRows", "Zero"]
