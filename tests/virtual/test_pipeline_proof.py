"""The proof of pipelines: damaged programs of stages are refused; many ranks are proven from a few programs."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import shardfx as sx
from shardfx.ir.ops.loop import loop_ops, stage_transfer
from shardfx.ir.registry import PROGRAM_OPS
from shardfx.runtime.verify import loop_proof
from shardfx.runtime.verify.families import many_ranks
from tests.damage_loops import Damage, calls, reordered
from tests.models import next_tokens

from .test_pipelines import three_stages

aten = torch.ops.aten


def changed(name: str, number: int, at: int, value: Any) -> Damage:
    """Another argument of a call."""
    return lambda graph: calls(graph, name)[number].update_arg(at, value)


def exchanged_iterations(words: list[str]) -> list[str]:
    swap = {"1": "2", "2": "1"}
    return [f"{word[:-1]}{swap.get(word[-1], word[-1])}" for word in words]


def another_value(graph: fx.Graph) -> None:
    first, second, *_ = calls(graph, "stage.send")
    first.args, second.args = (first.args[0], *second.args[1:]), (second.args[0], *first.args[1:])


def another_message(graph: fx.Graph) -> None:
    first, second, *_ = calls(graph, "stage.receive")
    first.update_arg(4, second.args[4])


def other_number(graph: fx.Graph, name: str, which: int, at: int, formula: tuple[int, int]) -> None:
    """The number of an iteration is that of another one."""
    node = calls(graph, name)[which]
    number: Any = node.args[at]
    with graph.inserting_after(number):
        node.update_arg(at, graph.call_function(loop_ops.index, (number.args[0], *formula)))


def a_weight_gradient_lost(graph: fx.Graph) -> None:
    node = calls(graph, "loop.add")[-1]
    node.replace_all_uses_with(node.args[0], delete_user_cb=lambda user: user.op == "output")


def an_activation_written_over(graph: fx.Graph) -> None:
    """What the backward reads is the memory of another value by then."""
    relu = next(node for node in graph.nodes if node.target is aten.relu.default)
    with graph.inserting_after(calls(graph, "c10d.wait_tensor")[-1]):
        graph.call_function(PROGRAM_OPS["memory.write"].function, (relu, calls(graph, "c10d.wait_tensor")[-1]))


def summed_in_another_shape(graph: fx.Graph) -> None:
    """What iterations are added into is a row for what is a matrix: adding broadcasts, or fails when it runs."""
    node = next(node for node in calls(graph, "memory.filled") if len(node.args[0]) == 2)  # type: ignore[arg-type]
    node.update_arg(0, [1, *node.args[0]])  # type: ignore[misc]


STAGES: dict[str, Damage] = {
    "summed in another shape": summed_in_another_shape,
    "to the wrong stage": changed("stage.send", -1, 1, 2),
    "another value": another_value,
    "a message taken for another": another_message,
    "of the iteration before": partial(other_number, name="stage.receive", which=0, at=5, formula=(3, -1)),
    "two iterations exchanged": reordered(exchanged_iterations),
    "a backward before its forward": reordered(lambda words: sorted(words, key=lambda word: word != "B1.3")),
    "a receive left out": reordered(lambda words: [word for word in words if word != "RB2.2"]),
    "a weight's gradient lost": a_weight_gradient_lost,
    "an activation written over": an_activation_written_over,
    "nothing is sent": lambda graph: graph.erase_node(calls(graph, "stage.send")[-1]),
}


def refused(pm: sx.ParallelModule, rank: int, damage: Damage) -> str:
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
@pytest.mark.parametrize("name", STAGES)
def test_damaged_stages_are_refused(name: str) -> None:
    assert refused(three_stages(), 1, STAGES[name])


def test_results_put_into_memory_of_fewer_bits_are_refused() -> None:
    """Each iteration copies its part there, and torch would round it without a word; an integer would lose its
    fraction."""
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double(), torch.randn(4, 4).double()
    pm = sx.parallelize(model, sx.Mesh(pp=2, mb=sx.Loop(2)), sx.Hints((x,), pipeline=sx.Pipeline()), virtual=True)
    for dtype in (torch.float32, torch.int64):
        assert f"memory of {dtype}" in refused(pm, 1, changed("memory.empty", 0, 1, dtype))


def test_a_bucket_of_fewer_bits_is_refused() -> None:
    """Gradients are laid into it before they are reduced: they would be rounded there."""
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double(), torch.randn(4, 4).double()
    hints = sx.Hints((x,), loss=F.mse_loss, targets=(x,), specs={"args.0": "dp, -"}, zero=2, zero_min_numel=0)
    pm = sx.parallelize(model, sx.Mesh(dp=2), hints, virtual=True)
    why = refused(pm, 1, changed("memory.empty", 0, 1, torch.float32))
    assert "torch.float64 is written into memory of torch.float32" in why


# ---- with the step of an optimizer, a weight of two stages, and inputs


@cache
def stepped() -> sx.ParallelModule:
    torch.manual_seed(0)
    layers = (nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))
    parts = {"emb": nn.Embedding(12, 8), "layers": nn.Sequential(*layers), "head": nn.Linear(8, 12, bias=False)}
    model, (x, y) = nn.Sequential(OrderedDict(parts)).double(), torch.randint(12, (2, 4, 3)).unbind()
    model.head.weight = model.emb.weight
    hints = sx.Hints(
        (x,),
        loss=next_tokens,
        targets=(y,),
        pipeline=sx.Pipeline(),
        optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    )
    return sx.parallelize(model, sx.Mesh(pp=2, mb=sx.Loop(2)), hints, virtual=True)


def tied_sum(change: Callable[[fx.Node, fx.Node, fx.Node], object]) -> Damage:
    """Of the gradient of the shared weight: the sum of both stages', this stage's, and the other's."""

    def damage(graph: fx.Graph) -> None:
        (own,) = calls(graph, "loop.index_add")
        both = next(user for user in own.users if user.target is aten.add.Tensor)
        change(both, own, next(each for each in both.all_input_nodes if each is not own))

    return damage


SUMS = [PROGRAM_OPS[name].function for name in ("loop.add", "loop.addmm", "loop.index_add")]


def without_the_iterations(graph: fx.Graph) -> fx.Node:
    """The step is done with what gradients were before any was added; gives its segment."""
    sums: dict[fx.Node, Any] = {node: node.args[0] for node in graph.nodes if node.target in SUMS}
    (segment,) = (node for node in calls(graph, "update.segment") if sums.keys() & set(node.all_input_nodes))
    for each in segment.all_input_nodes:
        if each in sums:
            segment.replace_input_with(each, sums[each])
    return segment


def in_each_backward(graph: fx.Graph) -> None:
    sums = [node for node in graph.nodes if node.target in SUMS]
    (segment,) = (node for node in calls(graph, "update.segment") if {*sums} & {*node.all_input_nodes})
    calls(graph, "loop.end")[-1].prepend(segment)


def old_weights_are_sent(graph: fx.Graph) -> None:
    stepped = {user for segment in calls(graph, "update.segment") for user in segment.users}
    (new,) = (node for node in calls(graph, "stage.send") if node.args[0] in stepped)
    weight = next(node for node in graph.nodes if node.name == "emb_weight")
    with graph.inserting_before(calls(graph, "loop.begin")[-1]):
        new.update_arg(0, graph.call_function(aten.clone.default, (weight,)))


STEPPED: dict[str, Damage] = {
    "a tied sum is this stage's": tied_sum(lambda both, own, other: both.replace_all_uses_with(own)),
    "a tied gradient twice": tied_sum(lambda both, own, other: setattr(both, "args", (own, own))),
    "a step before the iterations": lambda graph: calls(graph, "loop.begin")[-1].prepend(without_the_iterations(graph)),
    "a step in each backward": in_each_backward,
    "a step without the iterations": without_the_iterations,
    "old weights are sent": old_weights_are_sent,
    "rows of another iteration": partial(other_number, name="loop.slice", which=0, at=2, formula=(2, -2)),
}


@pytest.mark.long
@pytest.mark.parametrize("name", STEPPED)
def test_damaged_steps_are_refused(name: str) -> None:
    assert refused(stepped(), 0, STEPPED[name])


# ---- many ranks, proven from a few programs


OTHER = 2
"""A rank of the middle stage that is not in the line of ranks whose whole programs are interpreted."""


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


@cache
def in_stages() -> sx.ParallelModule:
    x, y = torch.randint(12, (16, 3)), torch.randint(12, (16, 3))
    specs = {"args.0": "mb, -", "targets.0": "mb, -", "*.up.weight": "tp, -", "*.down.weight": "-, tp"}
    hints = sx.Hints(args=(x,), loss=next_tokens, targets=(y,), specs=specs, pipeline=sx.Pipeline())
    model = nn.Sequential(nn.Embedding(12, 8), *(Block(8) for _ in range(3)), nn.Linear(8, 12, bias=False))
    return sx.parallelize(model, sx.Mesh(pp=3, tp=2, mb=sx.Loop(4)), hints, virtual=True)


@pytest.fixture
def each(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From now on every program is interpreted."""
    return lambda: monkeypatch.setattr(many_ranks, "EVERY", 1 << 20)


@pytest.mark.long
def test_one_line_of_ranks_is_interpreted(each: Callable[[], None]) -> None:
    """And all programs, one by one, are proven as well."""
    pm = in_stages()
    verdict = pm.verify()
    assert verdict, verdict
    of_all = len(verdict.programs) * 3
    assert verdict.checked["programs read"] == of_all * 2 * 4
    assert verdict.checked["whole programs"] == 2 * of_all
    each()
    one_by_one = pm.verify()
    assert one_by_one, one_by_one
    assert "programs read" not in one_by_one.checked
    assert one_by_one.checked["outputs"] == verdict.checked["outputs"]


# ---- what is wrong on one rank


def calls_of(graph: fx.Graph, target: Any) -> Iterator[fx.Node]:
    return (node for node in graph.nodes if node.target is target)


def sent(graph: fx.Graph) -> fx.Node:
    return next(calls_of(graph, stage_transfer.send))


def exchanged(node: fx.Node) -> None:
    iteration = node.args[-2]
    assert isinstance(iteration, fx.Node)
    with node.graph.inserting_after(iteration):
        other = node.graph.call_function(
            loop_ops.piecewise_index, (iteration.args[0], [(0, 1, 0), (1, 0, 0), (2, 2, 1)])
        )
    node.args = (*node.args[:-2], other, node.args[-1])


def an_add_left_out(graph: fx.Graph) -> None:
    *_, add = calls_of(graph, torch.ops.aten.add.Tensor)
    add.replace_all_uses_with(add.args[0])  # type: ignore[arg-type]


def something_else_is_sent(graph: fx.Graph) -> None:
    node, came = sent(graph), next(calls_of(graph, stage_transfer.receive))
    node.args = (next(iter(came.users)), *node.args[1:])


def sent_twice(graph: fx.Graph) -> None:
    node = sent(graph)
    with graph.inserting_after(node):
        graph.node_copy(node)


DAMAGE: dict[str, Callable[[fx.Graph], object]] = {
    "two iterations exchanged": lambda graph: exchanged(sent(graph)),
    "an add left out": an_add_left_out,
    "something else is sent": something_else_is_sent,
    "sent twice": sent_twice,
}
NOT_OF_MESSAGES = ("an add left out", "something else is sent")


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "ordered"), [*((name, False) for name in DAMAGE if name != "an add left out"), ("an add left out", True)]
)
def test_what_is_wrong_on_one_rank_is_refused(name: str, ordered: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the order of messages; and by the proof, if that would let it pass."""
    if not ordered:
        monkeypatch.setattr(loop_proof, "out_of_order", lambda *_: None)
    program = in_stages().rank_program(OTHER)
    DAMAGE[name](program.graph)
    verdict = in_stages().verify(modules={OTHER: program.module()})
    assert not verdict and verdict.fault is not None
    assert ("programs read" in verdict.checked) == (not ordered or name in NOT_OF_MESSAGES)


@pytest.mark.long
def test_what_both_ends_name_otherwise_is_proven() -> None:
    there, here = in_stages().rank_program(OTHER), in_stages().rank_program(OTHER + 2)
    exchanged(sent(there.graph))
    exchanged(next(calls_of(here.graph, stage_transfer.receive)))
    verdict = in_stages().verify(modules={OTHER: there.module(), OTHER + 2: here.module()})
    assert verdict, verdict
    assert verdict.checked["programs read"] < len(verdict.programs) * 24
