"""Random numbers that a model draws of Python or numpy: torch sees none of them, so that each would be drawn once, when
the model is captured, and stay as it is.

    if random.random() < self.layerdrop:        an Error: the same layers would be left out at every step
"""

from __future__ import annotations

import linecache
import random
import sys
from collections.abc import Callable, Hashable
from types import FrameType
from typing import Any, TypeVar

from shardfx.ir.capture.intake.refusals import said
from shardfx.ir.capture.sources import is_user_file
from shardfx.ir.errors import Error
from shardfx.ir.graph import Where

Made = TypeVar("Made")


def draws_nothing_outside(run: Callable[[], Made]) -> Made:
    """What ``run`` gives, which draws no random number but torch's.

    Raises:
        Error: it does: naming the line.
    """
    before = _states()
    made = run()
    drawn = next((name for name, state in _states().items() if before.get(name, state) != state), "")
    if drawn:
        raise Error(
            f"the model draws random numbers of {drawn}'s, which would be the same at every call",
            where=_line_that_draws(run),
            expected="random numbers of torch's, or inputs",
            got=f"a forward behind which {drawn}'s generator stands elsewhere",
            remedy="torch.rand(...), and torch.where to choose by it; or draw it outside of the model and pass the "
            "number as an argument",
        )
    return made


def _states() -> dict[str, Hashable]:
    """Where the generators that all of a program share stand."""
    found: dict[str, Hashable] = {"Python": random.getstate()}
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:
        _, keys, place, *others = numpy.get_state()
        found["numpy"] = (keys.tobytes(), place, *others)
    return found


def _line_that_draws(run: Callable[[], object]) -> str | None:
    """The line of the user's behind which a generator stands elsewhere first, when it is run again."""
    begin, last, found = _states(), Where(), list[Where]()
    drawing = (random.__file__, *getattr(sys.modules.get("numpy"), "__path__", ()))

    def watch(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal last
        file = frame.f_code.co_filename
        if found or not is_user_file(file) or file.startswith(drawing):
            return None
        if any(begin.get(name, state) != state for name, state in _states().items()):
            found.append(last)
            return None
        last = Where("", file, frame.f_lineno, linecache.getline(file, frame.f_lineno).strip())
        return watch

    before = sys.gettrace()
    sys.settrace(watch)
    try:
        run()
    finally:
        sys.settrace(before)
    return said(next(iter(found), last)) or None
