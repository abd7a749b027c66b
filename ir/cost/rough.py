"""What a planned node costs, roughly: from its placements alone, and so the same figure for every rank.

Nothing is lowered: each rank is taken to hold as much as that which holds most. Whoever asks on ranks for what all of
them must decide alike asks here; what a program really does is priced by its replay (:mod:`.replay`).
"""

from __future__ import annotations

import torch

from shardfx.ir.graph import Node
from shardfx.ir.mesh import Mesh
from shardfx.ir.ops.sends import is_comm
from shardfx.ir.ops.traits import base_name, is_view

from .amounts import Cost, Work
from .flops import flops_of, formula
from .traffic import over_time


def rough_cost(node: Node, mesh: Mesh) -> Cost:
    """What a rank does each time that a placed node is done, in one turn of each axis of time."""
    if is_comm(node):
        if over_time(node, mesh):
            return Cost()
        return Cost(sent={mesh.sort(node.kwargs["axes"]): node.op.sends(node, mesh)})
    if is_view(node):
        return Cost()
    flops = 0.0
    if formula(node.op) is not None:
        ways = node.strategy.cuts if node.strategy is not None else ()
        flops = flops_of(node) / mesh.extent(axis for _, axes in ways for axis in axes)
    values = (*node.operands, *node.outs)
    touched = sum(value.local_bytes(mesh) for value in values)
    real = [value.type.dtype for value in values if value.type.dtype.is_floating_point]
    return Cost({Work(flops, touched, real[0] if real else torch.float32, base_name(node)): 1})
