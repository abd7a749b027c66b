"""own-outputs: a gradient becomes its receiver's own, so that one which shares memory is copied; new content likewise.

    return (t, t)          own = memory.own(t)
                      ->   return (t, own)

Parts of one reduced buffer do not overlap, and are given away as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import fx

from shardfx.ir.ops import memory_ops
from shardfx.ir.program.aliasing import Aliasing, ResultOwnership, renewed
from shardfx.ir.program.rank_program import RankProgram

from .rank_pass import RankContext, RankPass


@dataclass(frozen=True)
class OwnOutputs(RankPass):
    """Copy gradients and new contents that share memory with an input, or with another result."""

    name: ClassVar[str] = "own-outputs"
    establishes: ClassVar[frozenset[str]] = frozenset({"OWN_OUTPUTS"})

    def run(self, program: RankProgram, context: RankContext) -> bool:
        """Copy what is shared."""
        output = program.result()
        given_away = ResultOwnership(Aliasing(program.graph.nodes), renewed(program))
        results: list[Any] = list(output.args[0])  # type: ignore[arg-type]
        changed = False
        for i, (planned, result) in enumerate(zip(program.outputs, results, strict=True)):
            if not isinstance(result, fx.Node) or given_away.take(result) or not planned.kind.is_given_away:
                continue
            with program.graph.inserting_before(output):
                results[i] = program.graph.call_function(memory_ops.own, (result,))
            results[i].meta = {key: value for key, value in result.meta.items() if key == "shardfx"}
            changed = True
        if changed:
            output.args = (tuple(results),)
        return changed
