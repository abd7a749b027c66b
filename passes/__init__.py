"""What may be done to a graph: one file a pass, and the manager that runs them."""

from shardfx.passes.base import COMM_EXPLICIT, SHARDED, Context, Decision, Pass
from shardfx.passes.communication.fuse import FuseComm
from shardfx.passes.communication.partition import Partition
from shardfx.passes.pipeline import check_order, run_passes
from shardfx.passes.sharding.propagate import Propagate
from shardfx.passes.unfold_repeats import UnfoldRepeats

BUILT_IN: dict[str, type[Pass]] = {each.name: each for each in (Propagate, Partition, UnfoldRepeats, FuseComm)}

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
    "UnfoldRepeats",
    "check_order",
    "run_passes",
]
