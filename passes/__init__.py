"""What may be done to a graph: one file a pass, and the manager that runs them."""

from .fuse_comm import FuseComm
from .manager import COMM_EXPLICIT, SHARDED, Context, Decision, Pass, check_order, run_passes
from .partition import Partition
from .propagate import Propagate

BUILT_IN: dict[str, type[Pass]] = {each.name: each for each in (Propagate, Partition, FuseComm)}

__all__ = [
    "BUILT_IN",
    "COMM_EXPLICIT",
    "SHARDED",
    "Context",
    "Decision",
    "FuseComm",
    "Partition",
    "Pass",
    "Propagate",
    "check_order",
    "run_passes",
]
