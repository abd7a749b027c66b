"""cast-placement: casts are moved to where fewer bytes are sent, before a gather that they shrink, behind a scatter.

    parameter %w : f32[8{dp}, 6]                                 parameter %w : f32[8{dp}, 6]
    %1 = aten._to_copy(%w, bf16) : bf16[8, 6]                    %1 = aten._to_copy(%w, bf16) : bf16[8{dp}, 6]
         needs [8, 6]: a gather of 4 bytes a number       ->     %2 = aten.t(%1)  needs [8, 6]: a gather of 2 bytes

So does the cast of a gradient to its parameter's dtype: it is of the rank's shard. One that is to be reduced after
(``REDUCE_AFTER``) is left to ``sum-placement``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from shardfx.ir.graph import Graph, InputKind, Node, OutputKind, Phase
from shardfx.ir.ops.traits import is_cast, narrows
from shardfx.ir.program.store_layout import as_made
from shardfx.ir.rules.strategy import REDUCE_AFTER, as_placed
from shardfx.ir.spec import Spec
from shardfx.passes.base import SHARDED, Pass, PassContext


@dataclass(frozen=True)
class CastPlacement(Pass):
    """Cast stored parameters before they are gathered, and gradients behind where they are scattered."""

    name: ClassVar[str] = "cast-placement"
    requires: ClassVar[frozenset[str]] = frozenset({SHARDED})

    def run(self, graph: Graph, context: PassContext) -> bool:
        users, changed = graph.users(), False
        for inp in graph.of_kind(InputKind.PARAMETER):
            for node in users[inp.value]:
                if narrows(node) and node.phase is not Phase.UPDATE and inp.value.spec is not None:
                    changed |= _place(node, inp.value.spec, context)
        for output in graph.outputs:
            made = as_made(output.value) if output.kind is OutputKind.GRADIENT else None
            if made is None or made.node is None or not is_cast(made.node) or made.node.attrs.get(REDUCE_AFTER):
                continue
            steps = (user for user in users[made] if user.phase is Phase.UPDATE and user.strategy is not None)
            needs = (n.strategy.operands[n.operands.index(made)] for n in steps if n.strategy is not None)
            spec = next(needs, output.spec if made is output.value else None)
            if spec is not None and not spec.partial:
                changed |= _place(made.node, spec, context)
        return changed


def _place(node: Node, spec: Spec, context: PassContext) -> bool:
    """Compute a cast on its tensor as it is placed so; says whether it was otherwise."""
    made = as_placed(context.cache.rule(node), node, context.planner.mesh, lambda value: spec)
    changed = made != node.strategy
    node.strategy, node.outs[0].spec = made, made.results[0]
    return changed
