"""Damaged programs of stages: whatever is sent, added up or stepped otherwise is refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import shardfx as sx
from shardfx.ir.ops.loop import loop_ops
from shardfx.ir.registry import PROGRAM_OPS

from .test_pipelines import three_stages

aten = torch.ops.aten


def of(graph: fx.Graph, name: str) -> list[fx.Node]:
    return [node for node in graph.nodes if node.target is PROGRAM_OPS[name].function]


def to_the_wrong_stage(graph: fx.Graph) -> None:
    node = of(graph, "stage.send")[-1]
    node.args = (node.args[0], 2, *node.args[2:])


def another_value(graph: fx.Graph) -> None:
    first, second, *_ = of(graph, "stage.send")
    first.args, second.args = (first.args[0], *second.args[1:]), (second.args[0], *first.args[1:])


def of_the_iteration_before(graph: fx.Graph) -> None:
    node = of(graph, "stage.receive")[0]
    number = node.args[5]
    with graph.inserting_after(number):
        other = graph.call_function(loop_ops.index, (number.args[0], 3, -1))
    node.args = (*node.args[:5], other, node.args[6])


def order(graph: fx.Graph, change: Callable[[list[str]], list[str]]) -> None:
    node = of(graph, "loop.begin")[-1]
    node.args = (*node.args[:3], " ".join(change(str(node.args[3]).split())))


def two_iterations_exchanged(graph: fx.Graph) -> None:
    swap = {"1": "2", "2": "1"}
    order(graph, lambda words: [f"{word[:-1]}{swap.get(word[-1], word[-1])}" for word in words])


def a_backward_left_out(graph: fx.Graph) -> None:
    order(graph, lambda words: [word for word in words if word != "B1.3"])


def a_backward_twice(graph: fx.Graph) -> None:
    order(graph, lambda words: [*words, "B1.3"])


def a_weight_gradient_lost(graph: fx.Graph) -> None:
    node = of(graph, "loop.add")[-1]
    node.replace_all_uses_with(node.args[0], delete_user_cb=lambda user: user.op == "output")


def nothing_is_sent(graph: fx.Graph) -> None:
    graph.erase_node(of(graph, "stage.send")[-1])


def a_backward_before_its_forward(graph: fx.Graph) -> None:
    order(graph, lambda words: sorted(words, key=lambda word: word != "B1.3"))


def a_receive_left_out(graph: fx.Graph) -> None:
    order(graph, lambda words: [word for word in words if word != "RB2.2"])


def a_message_taken_for_another(graph: fx.Graph) -> None:
    first, second, *_ = of(graph, "stage.receive")
    first.update_arg(4, second.args[4])


def from_the_wrong_stage(graph: fx.Graph) -> None:
    of(graph, "stage.receive")[0].update_arg(3, 2)


def added_twice(graph: fx.Graph) -> None:
    total = of(graph, "loop.add")[-1]
    with graph.inserting_after(total):
        again = graph.call_function(total.target, (total, total.args[1]))
    again.meta = dict(total.meta)
    total.replace_all_uses_with(again, delete_user_cb=lambda user: user.op == "output")


def an_activation_written_over(graph: fx.Graph) -> None:
    """What the backward reads is the memory of another value by then."""
    relu = next(node for node in graph.nodes if node.target is aten.relu.default)
    with graph.inserting_after(of(graph, "c10d.wait_tensor")[-1]):
        graph.call_function(PROGRAM_OPS["memory.write"].function, (relu, of(graph, "c10d.wait_tensor")[-1]))


def summed_in_another_shape(graph: fx.Graph) -> None:
    """What iterations are added into is a row for what is a matrix: adding broadcasts, or fails when it runs."""
    node = next(node for node in of(graph, "memory.filled") if len(node.args[0]) == 2)  # type: ignore[arg-type]
    node.update_arg(0, [1, *node.args[0]])  # type: ignore[misc]


MUTANTS = [
    summed_in_another_shape,
    to_the_wrong_stage,
    from_the_wrong_stage,
    another_value,
    a_message_taken_for_another,
    of_the_iteration_before,
    two_iterations_exchanged,
    a_backward_left_out,
    a_backward_twice,
    a_backward_before_its_forward,
    a_receive_left_out,
    a_weight_gradient_lost,
    added_twice,
    an_activation_written_over,
    nothing_is_sent,
]


def refused(pm: sx.ParallelModule, rank: int, damage: Callable[[fx.Graph], None]) -> str:
    """Why a damaged program is: as no program, or as another one."""
    program = pm.rank_program(rank)
    before = str(program)
    damage(program.graph)
    assert str(program) != before
    try:
        verdict = pm.verify(modules={rank: program.module()})
    except sx.Error as error:
        return str(error)
    return "" if verdict else verdict.why


@pytest.mark.long
def test_undamaged_ones_are_proven() -> None:
    for pm, rank in ((three_stages(), 1), (stepped(), 0)):
        assert pm.verify(modules={rank: pm.rank_module(rank)})


@pytest.mark.long
@pytest.mark.parametrize("damage", MUTANTS)
def test_damaged_stages_are_refused(damage: Callable[[fx.Graph], None]) -> None:
    assert refused(three_stages(), 1, damage)


def test_results_put_into_memory_of_fewer_bits_are_refused() -> None:
    """Each iteration copies its part there, and torch would round it without a word; an integer would lose its
    fraction."""
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double(), torch.randn(4, 4).double()
    pm = sx.parallelize(model, sx.Mesh(pp=2, mb=sx.Loop(2)), sx.Hints((x,), pipeline=sx.Pipeline()), virtual=True)
    for dtype in (torch.float32, torch.int64):

        def fewer(graph: fx.Graph, dtype: torch.dtype = dtype) -> None:
            of(graph, "memory.empty")[0].update_arg(1, dtype)

        assert f"memory of {dtype}" in refused(pm, 1, fewer)


def test_a_bucket_of_fewer_bits_is_refused() -> None:
    """Gradients are laid into it before they are reduced: they would be rounded there."""
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double(), torch.randn(4, 4).double()
    hints = sx.Hints((x,), loss=F.mse_loss, targets=(x,), specs={"args.0": "dp, -"}, zero=2, zero_min_numel=0)
    pm = sx.parallelize(model, sx.Mesh(dp=2), hints, virtual=True)
    assert "torch.float64 is written into memory of torch.float32" in refused(
        pm, 1, lambda graph: of(graph, "memory.empty")[0].update_arg(1, torch.float32)
    )


# ---- with the step of an optimizer, a weight of two stages, and inputs


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb, self.head = nn.Embedding(12, 8), nn.Linear(8, 12, bias=False)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))
        self.head.weight = self.emb.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.emb(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def loss_of(out: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(out.flatten(0, 1), labels.flatten())


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


@cache
def stepped() -> sx.ParallelModule:
    torch.manual_seed(0)
    model, (x, y) = Tied().double(), torch.randint(12, (2, 4, 3)).unbind()
    hints = sx.Hints((x,), loss=loss_of, targets=(y,), pipeline=sx.Pipeline(), optimizer=momentum)
    return sx.parallelize(model, sx.Mesh(pp=2, mb=sx.Loop(2)), hints, virtual=True)


def named(graph: fx.Graph, name: str) -> fx.Node:
    return next(node for node in graph.nodes if node.name == name)


def total_of_a_table(graph: fx.Graph) -> tuple[fx.Node, fx.Node]:
    """The gradient of the shared weight from this stage, and the sum of both stages'."""
    (own,) = of(graph, "loop.index_add")
    return own, next(user for user in own.users if user.target is aten.add.Tensor)


def a_tied_sum_is_this_stages(graph: fx.Graph) -> None:
    own, both = total_of_a_table(graph)
    both.replace_all_uses_with(own)


def a_tied_sum_is_the_other_stages(graph: fx.Graph) -> None:
    own, both = total_of_a_table(graph)
    both.replace_all_uses_with(next(each for each in both.all_input_nodes if each is not own))


def a_tied_gradient_twice(graph: fx.Graph) -> None:
    own, both = total_of_a_table(graph)
    both.args = (own, own)


SUMS = [PROGRAM_OPS[name].function for name in ("loop.add", "loop.addmm", "loop.index_add")]


def segment_of_iterations(graph: fx.Graph) -> tuple[fx.Node, dict[fx.Node, Any]]:
    """The segment that takes gradients as iterations added them up, and what each of these is added into."""
    sums = {node: node.args[0] for node in graph.nodes if node.target in SUMS}
    (found,) = (node for node in of(graph, "update.segment") if sums.keys() & set(node.all_input_nodes))
    return found, {each: sums[each] for each in found.all_input_nodes if each in sums}


def a_step_before_the_iterations(graph: fx.Graph) -> None:
    segment, _ = segment_of_iterations(graph)
    a_step_without_the_iterations(graph)
    of(graph, "loop.begin")[-1].prepend(segment)


def a_step_in_each_backward(graph: fx.Graph) -> None:
    segment, _ = segment_of_iterations(graph)
    of(graph, "loop.end")[-1].prepend(segment)


def a_step_without_the_iterations(graph: fx.Graph) -> None:
    """It is done with what gradients were before any was added."""
    segment, sums = segment_of_iterations(graph)
    for each, memory in sums.items():
        segment.replace_input_with(each, memory)


def old_weights_are_sent(graph: fx.Graph) -> None:
    stepped = {user for segment in of(graph, "update.segment") for user in segment.users}
    (new,) = (node for node in of(graph, "stage.send") if node.args[0] in stepped)
    with graph.inserting_before(of(graph, "loop.begin")[-1]):
        old = graph.call_function(aten.clone.default, (named(graph, "emb_weight"),))
    new.update_arg(0, old)


def other_rows(graph: fx.Graph, which: int) -> None:
    shard = of(graph, "loop.slice")[which]
    number: Any = shard.args[2]
    with graph.inserting_after(number):
        shard.update_arg(2, graph.call_function(loop_ops.index, (number.args[0], 2, -2)))


def rows_of_another_iteration(graph: fx.Graph) -> None:
    other_rows(graph, 0)


def rows_of_another_iteration_in_the_backward(graph: fx.Graph) -> None:
    other_rows(graph, -1)


STEPPED = [
    a_tied_sum_is_this_stages,
    a_tied_sum_is_the_other_stages,
    a_tied_gradient_twice,
    a_step_before_the_iterations,
    a_step_in_each_backward,
    a_step_without_the_iterations,
    old_weights_are_sent,
    rows_of_another_iteration,
    rows_of_another_iteration_in_the_backward,
]


@pytest.mark.long
@pytest.mark.parametrize("damage", STEPPED)
def test_damaged_steps_are_refused(damage: Callable[[fx.Graph], None]) -> None:
    assert refused(stepped(), 0, damage)


# ---- orders of units, by every schedule
