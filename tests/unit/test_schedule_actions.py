"""Units in small programs: memory that units share, waits that stay in theirs, values that are let go in time."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from shardfx.ir.cost.replay import replay
from shardfx.ir.graph import Graph, Output, OutputKind, Value
from shardfx.ir.mesh import Mesh
from shardfx.ir.ops import memory_ops
from shardfx.ir.ops.loop import loop_ops
from shardfx.ir.program.rank_program import RankProgram
from shardfx.ir.program.source import write_source
from shardfx.ir.program.validate_program import ProgramError, validate_program
from shardfx.ir.spec import TensorType
from shardfx.passes.rank import InPlace, RankContext, Waits

aten, c10d = torch.ops.aten, torch.ops._c10d_functional
GROUP = "dp2/dp@0"


def program(order: str, **units: Callable[[fx.Graph, dict[str, fx.Node]], fx.Node]) -> RankProgram:
    """Two iterations; each unit writes calls of what is there by name, ``w`` and ``total`` to begin with, and names
    one."""
    graph = fx.Graph()
    w = graph.call_function(aten.full.default, ([4], 1.0), {"dtype": torch.float64})
    total = graph.call_function(memory_ops.filled, ([4], 0.0, torch.float64, "cpu"))
    begin = graph.call_function(loop_ops.begin, ("mb", 2, [w, total], order))
    there = {"w": w, "total": total}
    for name, write in units.items():
        graph.call_function(loop_ops.action, (begin, name))
        there[name] = write(graph, there)
    graph.call_function(loop_ops.end, (begin, [w], [total]))
    graph.output((next(reversed(there.values())),))
    output = Output(OutputKind.GRADIENT, "w", Value(TensorType((4,), torch.float64)))
    return RankProgram(0, Mesh(dp=2), graph, (), (output,))


def called(graph: fx.Graph, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    return graph.call_function(target, args, kwargs)


def doubled(graph: fx.Graph, there: dict[str, fx.Node]) -> fx.Node:
    return called(graph, aten.mul.Tensor, there["w"], 2.0)


def summed(name: str) -> Callable[[fx.Graph, dict[str, fx.Node]], fx.Node]:
    return lambda graph, there: called(graph, loop_ops.add, there["total"], there[name])


THREE = "F0.0 I0.0 W0.0 F0.1 W0.1 I0.1"
"""Of one iteration I0 is done first, of the other W0."""


def overwriting(order: str) -> RankProgram:
    """I0 reads what F0 made, W0 writes over it."""
    return program(
        order,
        F0=doubled,
        I0=lambda graph, there: called(graph, aten.neg.default, there["F0"]),
        W0=lambda graph, there: called(
            graph, loop_ops.add, there["total"], called(graph, aten.neg.out, there["F0"], out=there["F0"])
        ),
    )


def test_what_is_written_over_is_read_before_in_every_iteration() -> None:
    validate_program(overwriting("F0.0 I0.0 W0.0 F0.1 I0.1 W0.1"), ends=False)
    with pytest.raises(ProgramError, match="W0 uses it before I0 in iteration 1"):
        validate_program(overwriting(THREE), ends=False)


def test_a_value_is_let_go_by_the_unit_that_uses_it_last() -> None:
    made = program(
        THREE,
        F0=doubled,
        I0=lambda graph, there: called(graph, aten.neg.default, there["F0"]),
        W0=summed("F0"),
    )
    validate_program(made, ends=False)
    alive: list[int] = []
    values: list[weakref.ref[torch.Tensor]] = []

    def watch(node: fx.Node, result: Any, operands: tuple[Any, ...]) -> None:
        if node.target is aten.mul.Tensor:
            values.append(weakref.ref(result))
            alive.append(sum(each() is not None for each in values))

    source = write_source(made, watch=watch)
    (total,) = source()
    assert total.tolist() == [4.0] * 4
    assert alive == [1, 1]  # the second is made when the first is gone
    assert all(each() is None for each in values)
    assert "in (1,)" in source.text and "in (0,)" in source.text


def test_as_much_is_held_as_the_order_says() -> None:
    def live(order: str) -> int:
        return replay(program(order, F0=doubled, W0=summed("F0"))).peak.nbytes

    assert live("F0.0 W0.0 F0.1 W0.1") == 3 * 32
    assert live("F0.0 F0.1 W0.0 W0.1") == 4 * 32


def test_a_wait_stays_in_its_unit() -> None:
    def sent(graph: fx.Graph, there: dict[str, fx.Node]) -> fx.Node:
        started = called(graph, c10d.all_reduce.default, doubled(graph, there), "sum", GROUP)
        arrived = called(graph, c10d.wait_tensor.default, started)
        called(graph, aten.neg.default, there["w"])
        return arrived

    made = program("F0.0 F0.1 B0.0 B0.1", F0=sent, B0=summed("F0"))
    assert Waits().run(made, RankContext(Graph(Mesh(dp=2))))
    names = [node.name for node in made.graph.nodes]
    assert names.index("neg_default") < names.index("wait_tensor_default") < names.index("action_1")
    validate_program(made, ends=False)


def test_what_another_unit_made_is_not_reduced_where_it_lies() -> None:
    def reduced(graph: fx.Graph, there: dict[str, fx.Node]) -> fx.Node:
        arrived = called(graph, c10d.wait_tensor.default, all_reduced(graph, there["F0"]))
        return called(graph, loop_ops.add, there["total"], arrived)

    def made_and_reduced(graph: fx.Graph, there: dict[str, fx.Node]) -> fx.Node:
        return called(graph, c10d.wait_tensor.default, all_reduced(graph, doubled(graph, there)))

    made = program(
        THREE,
        F0=made_and_reduced,
        I0=lambda graph, there: called(graph, aten.neg.default, there["F0"]),
        W0=reduced,
    )
    InPlace().run(made, RankContext(Graph(Mesh(dp=2))))
    targets = [node.target for node in made.graph.nodes]
    assert (targets.count(memory_ops.all_reduce_), targets.count(c10d.all_reduce.default)) == (1, 1)
    validate_program(made, ends=False)


def all_reduced(graph: fx.Graph, x: fx.Node) -> fx.Node:
    return called(graph, c10d.all_reduce.default, x, "sum", GROUP)
