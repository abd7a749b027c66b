"""write-back: the new content of parameters, optimizer states and buffers is written into the inputs of their names.

    add = aten.add(w, step)                  add = aten.add(w, step)
                                       ->    write = memory.write(w, add)
    return (loss, add)                       return (loss, write)

For programs whose memory a compiler plans: it fuses the write with what computes the value, so that a step has neither
a second copy of its parameters and states nor a kernel that copies them. A write stands behind the last use of the old
content. Where a condition is watched (a guard), nothing that is stored may change before it was looked at, and
all stays as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import fx

from shardfx.ir.ops import memory_ops
from shardfx.ir.program.aliasing import Aliasing
from shardfx.ir.program.rank_program import RankProgram

from .rank_pass import RankContext, RankPass


@dataclass(frozen=True)
class WriteBack(RankPass):
    """Write new contents, which the program made, into the inputs of their names."""

    name: ClassVar[str] = "write-back"

    def run(self, program: RankProgram, context: RankContext) -> bool:
        """Write them."""
        if any(output.guard is not None for output in program.outputs):
            return False
        share, end = Aliasing(program.graph.nodes), program.result()
        given = zip(program.graph.find_nodes(op="placeholder"), program.inputs, strict=True)
        places = {each.name: node for node, each in given if not each.pool}
        results: list[Any] = list(end.args[0])  # type: ignore[arg-type]
        changed = False
        for i, (output, result) in enumerate(zip(program.outputs, results, strict=True)):
            place = places.get(output.name) if output.kind.is_kept else None
            if place is None or not isinstance(result, fx.Node) or not share.owned(result):
                continue
            read = not share.last_use(place, result) or share.sender(place, result) is not None
            with program.graph.inserting_before(end) if read else program.graph.inserting_after(result):
                results[i] = program.graph.call_function(memory_ops.write, (place, result))
            results[i].meta = {key: value for key, value in result.meta.items() if key == "shardfx"}
            changed = True
        end.args = (tuple(results),)
        return changed
