"""arena: a program's allocations become slots of one memory, at offsets that follow from live intervals.

    flat = memory.empty([48], float32)              arena = memory.arena(448)
    ...                                             flat = memory.slot(arena, 0, [48], float32)
    wait = c10d.wait_tensor(sent)                   ...
    mm = aten.mm(x, w)                        ->    wait = c10d.wait_tensor(sent)
                                                    place = memory.slot(arena, 0, [8, 8], float32)
                                                    mm = aten.mm.out(x, w, out=place)

Buckets, destinations of gathers, and temporaries of ops with an ``out`` form. Outputs of the program have memory of
their own, and so has what is made in loops, or used by units of their iterations. Without an arena buckets are kept
between steps, each by itself, and idle where activations are many; here these lie in their place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from shardfx.ir.cost.fake_calls import TensorLayout
from shardfx.ir.cost.replay import values
from shardfx.ir.ops import memory_ops
from shardfx.ir.ops.local_ops import WITH_DESTINATION
from shardfx.ir.ops.pools.pool_ops import computed_beside
from shardfx.ir.program.arena_layout import BufferIntervals, dense_bytes, pack
from shardfx.ir.program.rank_program import RankProgram
from shardfx.passes.pass_text import check_options

from .rank_pass import RankContext, RankPass, call_before


@dataclass(frozen=True)
class Arena(RankPass):
    """Place buffers, and temporaries of at least ``least`` bytes, in one arena."""

    name: ClassVar[str] = "arena"

    least: int = 2**12

    def __post_init__(self) -> None:
        check_options(self, least=1)

    def run(self, program: RankProgram, context: RankContext) -> bool:
        changed = self._allocate(program, context)
        nodes = list(program.graph.nodes)
        live, found = BufferIntervals(nodes), {}
        for node in (each for each in nodes if each.target is memory_ops.empty):
            shape, dtype, *_ = node.args
            if live.of(node, 0) is None:  # also what has another size in each iteration
                continue
            block = live.of(node, dense_bytes(shape, dtype))
            if block is not None and block.nbytes:
                found[node] = block
        if not found:
            return changed
        packing = pack([*found.values()])
        first = next(node for node in nodes if node.op != "placeholder")
        with program.graph.inserting_before(first):
            arena = program.graph.call_function(memory_ops.arena, (packing.nbytes, context.device))
        for node, offset in zip(found, packing.offsets, strict=True):
            node.target, node.args = memory_ops.slot, (arena, offset, *node.args[:2])
        return True

    def _allocate(self, program: RankProgram, context: RankContext) -> bool:
        """Compute temporaries into memory that the program allocates."""
        nodes = list(program.graph.nodes)
        live, known, changed = BufferIntervals(nodes), dict[str, Any](), False
        in_host = computed_beside(context.graph)
        for node in nodes:
            row = WITH_DESTINATION.get(node.target) if node.op == "call_function" else None
            if row is None or row.into in node.kwargs or node.meta.get("shardfx") in in_host:
                continue
            if not _takes_tensors(node) or live.of(node, 0) is None:
                continue
            known = known or values(program)
            made = known[node.name]
            if not isinstance(made, torch.Tensor):
                continue
            layout = TensorLayout(tuple(made.shape), made.stride(), made.dtype)
            if layout != TensorLayout.dense(layout.shape, layout.dtype) or layout.nbytes < self.least:
                continue
            memory = call_before(node, memory_ops.empty, [*layout.shape], layout.dtype, context.device)
            node.target, node.kwargs = row.function, {**node.kwargs, str(row.into): memory}
            changed = True
        return changed


def _takes_tensors(node: fx.Node) -> bool:
    """Whether all tensor arguments of a call are tensors, not numbers."""
    schema: Any = node.target._schema  # type: ignore[union-attr]
    pairs = zip(schema.arguments, node.args, strict=False)
    return all(isinstance(arg, fx.Node) for argument, arg in pairs if str(argument.type) == "Tensor")
