"""shardfx: a graph-level parallelizing compiler for PyTorch."""

from pathlib import Path as _Path

# In a checkout, ./shardfx may shadow the installed package. The folders ir/, passes/, ... then lie beside it,
# so let `shardfx.ir` be found there. An installed wheel has no pyproject.toml beside it and needs nothing.
_root = _Path(__file__).resolve().parent.parent
if (_root / "pyproject.toml").is_file() and (_root / "ir").is_dir() and str(_root) not in __path__:
    __path__.append(str(_root))
del _root

# ---- public names -----------------------------------------------------------------------------------------
from shardfx import images, passes, schedules  # noqa: F401
from shardfx.ir.capture.canonical.mixed_precision import LossScale, MixedPrecision
from shardfx.ir.cost.machine import Machine
from shardfx.ir.errors import Error, ShardfxWarning
from shardfx.ir.mesh import Link, Loop, Mesh
from shardfx.ir.ops.local_ops import observes
from shardfx.ir.rules.book import rule
from shardfx.ir.rules.sharding_rule import ShardingRule
from shardfx.ir.spec import Spec
from shardfx.module.parallel_module import ParallelModule
from shardfx.module.rule_checks import check_rule
from shardfx.passes import Context, Experts, Offload, Pass, Pipeline, Recompute
from shardfx.passes.rank import RankPass
from shardfx.plan import Plan
from shardfx.runtime.verify.verdict import Verdict

from .api import parallelize
from .compile import default_passes, default_rank_passes
from .hints import Hints
from .op_strategies import strategies

# `shardfx.passes` shows the pipelines that hints ask for beside the passes; the folder itself knows no hints.
passes.default_passes, passes.default_rank_passes = default_passes, default_rank_passes  # type: ignore[attr-defined]

__all__ = [
    "Context",
    "Error",
    "Experts",
    "Hints",
    "Link",
    "Loop",
    "LossScale",
    "Machine",
    "Mesh",
    "MixedPrecision",
    "Offload",
    "ParallelModule",
    "Pass",
    "Pipeline",
    "Plan",
    "RankPass",
    "Recompute",
    "ShardfxWarning",
    "ShardingRule",
    "Spec",
    "Verdict",
    "check_rule",
    "observes",
    "parallelize",
    "rule",
    "strategies",
]


def __dir__() -> list[str]:
    return list(__all__)
