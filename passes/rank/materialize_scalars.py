"""materialize-scalars: 0-d values of an optimizer's step are computed once, not in every element of its kernels.

    pow = aten.pow.Scalar(0.999, step)          pow = aten.pow.Scalar(0.999, step)
    correction = aten.rsub(pow, 1)              correction = aten.rsub(pow, 1)
                                          ->    scalar = memory.materialize(correction)
    new = aten.div(v, correction)               new = aten.div(v, scalar)

For programs whose memory a compiler plans. Inductor computes a 0-d value within each kernel that takes it, for every
element: the two powers in float64 of Adam's bias corrections took as long as the memory traffic of the update.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from shardfx.ir.graph import Node, Phase
from shardfx.ir.ops.computing.materialize import materialize
from shardfx.ir.program.rank_program import RankProgram

from .rank_pass import RankContext, RankPass


@dataclass(frozen=True)
class MaterializeScalars(RankPass):
    """Give 0-d pointwise results of the update, where tensors of more dims take them, memory of their own."""

    name: ClassVar[str] = "materialize-scalars"

    def run(self, program: RankProgram, context: RankContext) -> bool:
        """Insert the calls, one for each such result."""
        changed = False
        for node in list(program.graph.nodes):
            if not _is_scalar(node) or not isinstance(node.target, torch._ops.OpOverload):
                continue
            takers = [
                user for user in node.users if isinstance(user.meta.get("shardfx"), Node) and not _is_scalar(user)
            ]
            if not takers or torch.Tag.pointwise not in node.target.tags:
                continue
            with program.graph.inserting_after(node):
                scalar = program.graph.call_function(materialize, (node,))
            scalar.meta = {key: value for key, value in node.meta.items() if key == "shardfx"}
            for user in takers:
                user.replace_input_with(node, scalar)
            changed = True
        return changed


def _is_scalar(node: fx.Node) -> bool:
    """Whether a call is of an optimizer's step, and gives a 0-d tensor."""
    planned = _made_of(node)
    if planned is None or planned.phase is not Phase.UPDATE or len(planned.outs) != 1:
        return False
    return planned.outs[0].type.ndim == 0


def _made_of(node: fx.Node) -> Node | None:
    """The planned node that a call comes from."""
    planned = node.meta.get("shardfx")
    return planned if isinstance(planned, Node) else None
