"""Memory of a rank: sharded storage of parameters, recomputation, offloading."""

from .offload import Offload
from .recompute import Recompute, RematerializeCasts, RematerializeGathers
from .table_rows import TableRows
from .zero import Zero

__all__ = ["Offload", "Recompute", "RematerializeCasts", "RematerializeGathers", "TableRows", "Zero"]
