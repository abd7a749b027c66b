"""shardfx: a graph-level parallelizing compiler for PyTorch."""

from pathlib import Path as _Path

# In a checkout, ./shardfx may shadow the installed package. The folders ir/, passes/, ... then lie beside it,
# so let `shardfx.ir` be found there. An installed wheel has no pyproject.toml beside it and needs nothing.
_root = _Path(__file__).resolve().parent.parent
if (_root / "pyproject.toml").is_file() and (_root / "ir").is_dir() and str(_root) not in __path__:
    __path__.append(str(_root))
del _root

# ---- public names -----------------------------------------------------------------------------------------
from shardfx.images import GeoTiff, Nifti, TileDataset, WholeImage, draw_tiles, predict_scene
from shardfx.ir.capture.canonical.mixed_precision import LossScale, MixedPrecision
from shardfx.ir.cost.machine import Machine
from shardfx.ir.errors import Error, ShardfxWarning
from shardfx.ir.mesh import Link, Loop, Mesh
from shardfx.ir.ops.local_ops import observes
from shardfx.ir.rules.book import rule
from shardfx.ir.rules.sharding_rule import ShardingRule
from shardfx.ir.schedule import Action, Schedule, ScheduleReport, check_schedule
from shardfx.ir.spec import Spec
from shardfx.module.parallel_module import ParallelModule
from shardfx.module.rules_shown import check_rule
from shardfx.passes import Offload, Pass, Pipeline, Recompute, Spatial
from shardfx.passes.loops import make_schedule
from shardfx.passes.rank import RankPass
from shardfx.runtime.verify.verdict import Verdict
from shardfx.schedules.timeline import Timeline, simulate

from .api import parallelize, trace
from .compile import default_passes, default_rank_passes
from .hints import Hints
from .op_strategies import strategies
from .plan import Plan
from .proving import prove

__all__ = [
    "Action",
    "Error",
    "GeoTiff",
    "Hints",
    "Link",
    "Loop",
    "LossScale",
    "Machine",
    "Mesh",
    "MixedPrecision",
    "Nifti",
    "Offload",
    "ParallelModule",
    "Pass",
    "Pipeline",
    "Plan",
    "RankPass",
    "Recompute",
    "Schedule",
    "ScheduleReport",
    "ShardfxWarning",
    "ShardingRule",
    "Spatial",
    "Spec",
    "TileDataset",
    "Timeline",
    "Verdict",
    "WholeImage",
    "check_rule",
    "check_schedule",
    "default_passes",
    "default_rank_passes",
    "draw_tiles",
    "make_schedule",
    "observes",
    "parallelize",
    "predict_scene",
    "prove",
    "rule",
    "simulate",
    "strategies",
    "trace",
]
