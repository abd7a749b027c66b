"""A scale of the loss that finds its own size, as ``torch.amp.GradScaler`` has it (Micikevicius et al., 2018)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from shardfx.ir.errors import Error


@dataclass(frozen=True)
class LossScale:
    """A scale that falls where gradients overflow, and grows where they did not for a while.

    It is a state of the program, stepped with the optimizer's (so it wants ``Hints(optimizer=...)``): a step that
    overflows leaves parameters and states as they were and multiplies the scale by ``backoff``; after ``interval``
    steps one behind the other that did not, it is multiplied by ``growth``. ``pm.optimizer.loss_scale`` reads it.

    Args:
        init: what it begins with.
        growth: more than one.
        backoff: between zero and one.
        interval: a number of steps.

    Raises:
        Error: one of them is another number.

    Example::

        Hints(compute=sx.Compute(torch.float16, output=torch.float32, scale=sx.LossScale()), optimizer=...)
    """

    init: float = 2.0**16
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000

    def __post_init__(self) -> None:
        fits = {
            "init": (0 < self.init < math.inf, "a number above zero"),
            "growth": (1 < self.growth < math.inf, "a number above one"),
            "backoff": (0 < self.backoff < 1, "a number between zero and one"),
            "interval": (type(self.interval) is int and self.interval > 0, "a number of steps"),
        }
        for name, (right, expected) in fits.items():
            if not right:
                raise Error(
                    "this is nothing to scale a loss by",
                    where=f"LossScale({name}=...)",
                    expected=expected,
                    got=repr(getattr(self, name)),
                )
