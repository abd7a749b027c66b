"""What may be done to a graph: one file a pass, and the pipeline that runs them."""

from .base import COMM_EXPLICIT, SHARDED, Context, Decision, Pass, PassError
from .communication import DuplicateViews, FuseComm, Partition
from .pipeline import BUILT_IN, check_order, run_passes
from .sharding import BindHints, Propagate, Reassociate, SumPlacement

__all__ = [
    "BUILT_IN",
    "COMM_EXPLICIT",
    "SHARDED",
    "BindHints",
    "Context",
    "Decision",
    "DuplicateViews",
    "FuseComm",
    "Partition",
    "Pass",
    "PassError",
    "Propagate",
    "Reassociate",
    "SumPlacement",
    "check_order",
    "run_passes",
]
