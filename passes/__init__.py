"""Transformations of a graph: the passes, and the pipeline that runs them."""

from .base import COMM_EXPLICIT, HINTED, SHARDED, Pass, PassContext, PassError
from .communication import BucketComm, CastPlacement, DuplicateViews, Order, Partition
from .context_parallel import Context, ContextParallel, RematerializeKeys
from .embedding_tables import EmbeddingTables
from .expert_parallel import ExpertParallel, Experts
from .memory import Offload, Recompute, RematerializeCasts, RematerializeGathers, TableRows, Zero
from .pass_text import options_text, parse_pass
from .pipeline import BUILT_IN, ON_REQUEST, ORDER, WITH_ROOM, arrange, check_order, is_full_pipeline, run_passes, steps
from .rank import RankContext, RankPass
from .sharding import BindHints, Propagate, Reassociate, SumPlacement, hint_value
from .space import Spatial
from .stages import Loops, Pipeline, stages_as_planned
from .unfold_repeats import UnfoldRepeats

__all__ = ["BUILT_IN", "COMM_EXPLICIT", "HINTED", "ON_REQUEST", "ORDER", "SHARDED", "WITH_ROOM", "BindHints"]
__all__ += [
    "BucketComm",
    "CastPlacement",
    "Context",
    "ContextParallel",
    "DuplicateViews",
    "EmbeddingTables",
    "ExpertParallel",
]
__all__ += ["Experts", "Loops", "Offload", "Order", "Partition", "Pass", "PassContext", "PassError", "Pipeline"]
__all__ += ["Propagate", "RankContext", "RankPass", "Reassociate", "Recompute", "RematerializeCasts"]
__all__ += ["RematerializeGathers", "RematerializeKeys", "Spatial", "SumPlacement", "TableRows", "UnfoldRepeats"]
__all__ += ["Zero", "arrange", "check_order", "hint_value", "is_full_pipeline", "options_text", "parse_pass"]
__all__ += ["run_passes", "stages_as_planned", "steps"]
