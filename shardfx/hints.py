"""What the user says about a plan: example inputs, the loss, and how a few values are cut."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardfx.ir.cost.machine import Machine
from shardfx.ir.errors import Error
from shardfx.passes import Pass
from shardfx.passes.rank import RankPass


@dataclass(frozen=True)
class Hints:
    """Everything that :func:`shardfx.parallelize` wants to know besides the model and the mesh.

    Args:
        args, kwargs: example inputs of the model, of the *global* batch; fake tensors will do.
        loss: ``loss(out, *targets)``, a scalar; None for inference.
        targets: further inputs, of the loss.
        specs: name or pattern -> placement. Names are those of ``named_parameters()``, ``args.N``, ``kwargs.NAME``,
            ``targets.N``, or a module's path for its output; ``*`` stands for one part of a name, ``**`` for any.
            A placement is text (per dim the mesh axes, major first, or ``-``: ``"dp tp, -"``), a ``Spec``, or
            DTensor placements, one per mesh axis.
        strict: an op without a sharding rule is an error, not a warning.
        fuse_mb: collectives of one kind travel together up to so many megabytes; 0 leaves them alone.
        passes: further passes, run after the built-in ones that they require: instances, or text such as
            ``"count-nodes{mb=2}"`` for those of installed plugins (see docs/writing_passes.md).
        machine: what a rank runs on: a :class:`shardfx.Machine`, the name of a known one (``"h100-dgx"``), or the path
            of a file that describes one. Axes whose link the mesh does not state have those of the machine, by which
            communication is chosen; and reports are in its seconds.
        rank_passes: further passes on the ranks' programs, run behind the built-in ones: instances of
            :class:`shardfx.RankPass`, or text for those of installed plugins.

    Example::

        Hints(args=(x,), loss=F.cross_entropy, targets=(y,), specs={"args.0": "dp, -", "**.w1.weight": "tp, -"})
    """

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    loss: Callable[..., Any] | None = None
    targets: tuple[Any, ...] = ()
    specs: Mapping[str, Any] = field(default_factory=dict)
    strict: bool = False
    fuse_mb: float = 25.0
    passes: Sequence[Pass | str] = ()
    machine: Machine | str | None = None
    rank_passes: Sequence[RankPass | str] = ()
    zero: int = 0
    zero_axis: str = "dp"
    recompute: Any = None
    memory: Any = None
    offload: Sequence[str] = ()
    optimizer: Any = None
    accumulate: int = 1
    pipeline: Any = None

    def __post_init__(self) -> None:
        for name in ("args", "targets"):
            if not isinstance(getattr(self, name), tuple):
                raise Error(
                    f"Hints({name}=...) is not a tuple",
                    expected=f"{name}=(x,)",
                    got=type(getattr(self, name)).__name__,
                    remedy="put a comma behind a single tensor: (x,)",
                )
        Machine.of(self.machine)  # which says so if there is none of that name
        later = {
            "zero": self.zero != 0,
            "recompute": self.recompute is not None,
            "memory": self.memory is not None,
            "offload": bool(self.offload),
            "optimizer": self.optimizer is not None,
            "accumulate": self.accumulate != 1,
            "pipeline": self.pipeline is not None,
        }
        for name, given in later.items():
            if given:
                raise Error(
                    f"Hints({name}=...) is not available in this version",
                    expected="its default",
                    got=repr(getattr(self, name)),
                    remedy="see the table of what works in the README",
                )
