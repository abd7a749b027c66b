"""cast-placement: casts stand where less is sent, before a gather that they make smaller, and behind a scatter.

    parameter %w : f32[8{dp}, 6]                                 parameter %w : f32[8{dp}, 6]
    %1 = aten._to_copy(%w, bf16) : bf16[8, 6]                    %1 = aten._to_copy(%w, bf16) : bf16[8{dp}, 6]
         needs [8, 6]: a gather of 4 bytes a number       ->     %2 = aten.t(%1)  needs [8, 6]: a gather of 2 bytes

So does the cast of a gradient to its parameter's dtype: it is of what the rank keeps of it. What says ``sums_behind``
stays, for it is passed by partial sums.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from shardfx.ir.graph import Graph, InputKind, Node, OutputKind, Phase, Value
from shardfx.ir.ops.traits import is_cast, narrows
from shardfx.ir.rules.as_placed import SUMS_BEHIND, as_placed
from shardfx.ir.spec import Spec
from shardfx.passes.base import SHARDED, Context, Pass
from shardfx.passes.update_placement import as_made


@dataclass(frozen=True)
class CastPlacement(Pass):
    """Cast stored parameters before they are gathered, and gradients behind where they are scattered."""

    name: ClassVar[str] = "cast-placement"
    requires: ClassVar[frozenset[str]] = frozenset({SHARDED})

    def run(self, graph: Graph, context: Context) -> bool:
        users = graph.users()
        changed = False
        for given in graph.of_kind(InputKind.PARAMETER):
            for node in users[given.value]:
                if narrows(node) and node.phase is not Phase.UPDATE and given.value.spec is not None:
                    changed |= self._place(node, given.value.spec, graph, context)
        for output in graph.outputs:
            made = as_made(output.value) if output.kind is OutputKind.GRADIENT else None
            if made is None or made.node is None or not is_cast(made.node) or made.node.attrs.get(SUMS_BEHIND):
                continue
            leaves = output.spec if made is output.value else None
            spec = next((need for user in users[made] if (need := _needed(user, made))), leaves)
            if spec is not None and not spec.partial:
                changed |= self._place(made.node, spec, graph, context)
        return changed

    def _place(self, node: Node, spec: Spec, graph: Graph, context: Context) -> bool:
        """MixedPrecision a cast on its tensor as it is placed so; says whether it was otherwise."""
        made = as_placed(context.cache.rule(node), node, graph.mesh, lambda value: spec)
        changed = made != node.strategy
        node.strategy = made
        node.outs[0].spec = made.results[0]
        return changed


def _needed(user: Node, value: Value) -> Spec | None:
    """How a node of the optimizer's step needs a value."""
    if user.phase is not Phase.UPDATE or user.strategy is None:
        return None
    return user.strategy.operands[user.operands.index(value)]
