"""gather-into: what is gathered comes into memory that stays.

    sent = all_gather_into_tensor(w, 2, ...)      memory = memory.empty([16, 6], float32)
                                             ->   sent = c10d.all_gather_into(w, 2, ..., out=memory)

Fresh memory is dear where the system hands it out page by page: on CPUs. On other devices torch itself keeps memory,
which activations use as well: there gathers have no destinations, and stored parameters that lie side by side are sent
as they lie, without a copy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from shardfx.ir.graph import Node
from shardfx.ir.ops import memory_ops, pack
from shardfx.ir.ops.pools.pool_ops import computed_beside
from shardfx.ir.program.aliasing import Aliasing
from shardfx.ir.program.rank_program import RankProgram

from .rank_pass import RankContext, RankPass

c10d = torch.ops._c10d_functional
GATHERS = (c10d.all_gather_into_tensor.default, pack.unflatten, pack.flatten)


@dataclass(frozen=True)
class GatherInto(RankPass):
    """On a CPU gather into memory that the program asks for; stored parameters that lie side by side are not joined
    first."""

    name: ClassVar[str] = "gather-into"

    def run(self, program: RankProgram, context: RankContext) -> bool:
        """Give gathers destinations."""
        changed = False
        nodes, beside = list(program.graph.nodes), computed_beside(context.graph)
        share = Aliasing(nodes if any(node.target is pack.flatten for node in nodes) else ())
        for node in nodes:
            made = node.meta.get("shardfx") if node.target in GATHERS else None
            operands = made.operands if isinstance(made, Node) and made not in beside else ()
            if not operands:
                continue
            dtype = operands[0].type.dtype
            if node.target is pack.flatten and node.args[1] == 1 and _may_lie_side_by_side(node.args[0], share):
                _swap(node, memory_ops.adjoin, node.args[:1], {})
            elif context.device != "cpu":
                continue
            elif node.target is c10d.all_gather_into_tensor.default and "shape" in node.meta:
                memory = _before(node, memory_ops.empty, list(node.meta["shape"]), dtype, context.device)
                _swap(node, memory_ops.all_gather_into, node.args, {"out": memory})
            elif node.target is pack.unflatten and node.args[2] != 1 and len(node.all_input_nodes) == 1:
                shapes: Any = node.args[1]
                sizes = [torch.Size(shape).numel() for shape in shapes]
                memory = _before(node, memory_ops.empty, [sum(sizes)], dtype, context.device)
                _swap(node, memory_ops.spread, (memory, *node.args), {})
            else:
                continue
            changed = True
        return changed


def _may_lie_side_by_side(tensors: Any, share: Aliasing) -> bool:
    """Stored inputs may, and parts of one memory. What was made apart does not, nor is it to be taken for one."""
    return all(each.op == "placeholder" for each in tensors) or len({share.root(each) for each in tensors}) == 1


def _before(node: fx.Node, target: Any, *args: Any) -> fx.Node:
    with node.graph.inserting_before(node):
        made = node.graph.call_function(target, args)
    made.meta["shardfx"] = node.meta["shardfx"]
    return made


def _swap(node: fx.Node, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Another call in a node's place."""
    node.target, node.args, node.kwargs = target, args, kwargs
