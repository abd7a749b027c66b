"""Parts of flat memory, and what is seen of them: which programs are well formed."""

from __future__ import annotations

import torch
from torch import fx

from shardfx.ir.ops import memory_ops
from shardfx.ir.program.validate_program import validate_program
from tests.unit.test_rank_passes import flat, program, wrong

aten = torch.ops.aten


def test_what_a_program_may_do_to_parts_of_memory() -> None:
    """See one in the same order, copy one, and read one turned where another is written later."""

    def seen(graph: fx.Graph, a: fx.Node, b: fx.Node) -> tuple[fx.Node, ...]:
        memory, (first, second) = flat(graph, 0, 4)
        written = graph.call_function(memory_ops.write, (first, a))
        turned = graph.call_function(aten.t.default, (written,))
        flattened = graph.call_function(aten.reshape.default, (written, [4]))
        copied = graph.call_function(aten.mul.Tensor, (graph.call_function(memory_ops.write, (second, b)), 1))
        joined = graph.call_function(memory_ops.join, (memory, [flattened, copied], 1))
        return graph.call_function(aten.add.Tensor, (turned, a)), joined

    def turned(graph: fx.Graph, a: fx.Node, b: fx.Node) -> tuple[fx.Node, ...]:
        memory, (first, second) = flat(graph, 0, 4)
        written = [
            graph.call_function(memory_ops.write, (first, a)),
            graph.call_function(memory_ops.write, (second, b)),
        ]
        return (
            graph.call_function(
                memory_ops.join, (memory, [graph.call_function(aten.t.default, (written[0],)), written[1]], 1)
            ),
        )

    def stale(graph: fx.Graph, a: fx.Node, b: fx.Node) -> tuple[fx.Node, ...]:
        memory, (first, second) = flat(graph, 0, 4)
        copied = graph.call_function(aten.clone.default, (graph.call_function(memory_ops.write, (first, a)),))
        again = graph.call_function(memory_ops.write, (first, b))
        other = graph.call_function(memory_ops.write, (second, again))
        return (graph.call_function(memory_ops.join, (memory, [copied, other], 1)),)

    validate_program(program(seen))
    assert "does not lie where" in wrong(turned)
    assert "is read after its memory was written over" in wrong(stale)
