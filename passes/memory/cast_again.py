"""rematerialize-casts: parameters are cast once more for the backward, so that the casts need not wait between.

    forward:                                             forward:
      %1 = aten._to_copy(%w, bf16)                         %1 = aten._to_copy(%w, bf16)
      %2 = aten.mm(%x, %1)                                 %2 = aten.mm(%x, %1)           %1 is gone behind it
    backward:                                     ->     backward:
      %9 = aten.mm(%8, %1)                                 %9 = aten._to_copy(%w, bf16)
                                                           %10 = aten.mm(%8, %9)

What was gathered stays, unless ``rematerialize-gathers`` fetches it once more; then so are its casts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from shardfx.ir.graph import Graph, InputKind, Phase
from shardfx.ir.ops.traits import is_view, narrows
from shardfx.passes.base import COMM_EXPLICIT, Context, Pass

from .made_again import Repeats


@dataclass(frozen=True)
class RematerializeCasts(Pass):
    """Cast parameters once more for the backward: a copy in fewer bits does not wait beside its master.

    ``Hints(mixed_precision=...)`` says so.
    """

    name: ClassVar[str] = "rematerialize-casts"
    requires: ClassVar[frozenset[str]] = frozenset({COMM_EXPLICIT})

    def run(self, graph: Graph, context: Context) -> bool:
        there = {given.value for given in graph.of_kind(InputKind.PARAMETER)}
        for node in graph.nodes:
            simple = node.phase is Phase.FORWARD and (narrows(node) or is_view(node))
            if simple and all(value in there for value in node.operands):
                there.update(node.outs)
        return Repeats(graph, there.__contains__).run()
