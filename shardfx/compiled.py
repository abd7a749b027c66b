"""A captured model before and after its passes."""

from __future__ import annotations

from dataclasses import dataclass

from shardfx.ir.capture.trace import Captured
from shardfx.ir.graph import Graph
from shardfx.passes import Context, Pass

from .hints import Hints


@dataclass(frozen=True)
class Compiled:
    """A captured model before and after its passes."""

    hints: Hints
    captured: Captured
    before: Graph
    after: Graph
    context: Context
    passes: tuple[Pass, ...]
