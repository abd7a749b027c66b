"""Iterations in units: forward of one iteration, backward of another, in an order that is data; loss and gradients
stay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import fx

import shardfx as sx
from shardfx.ir.cost.amounts import Cost
from shardfx.ir.cost.replay import replay
from shardfx.ir.ops import memory_ops
from shardfx.ir.ops.loop import loop_ops
from shardfx.ir.program.validate_program import ProgramError, validate_program
from shardfx.module.programs import TRAIN
from tests.damage_loops import Damage, reordered
from tests.live_memory import check_footprint, held_in_a_step
from tests.plans import plan
from tests.reference import rel_err, single_device
from tests.unit_orders import ONE_AHEAD, ORDERS, in_order, lowered, one_forward_one_backward, program
from tests.zoo import make

PLANS: Sequence[tuple[str, str, sx.Mesh, dict[str, Any]]] = [
    ("mlp3", "1f1b", sx.Mesh(dp=2), {"zero": 3, "zero_min_numel": 0}),
    ("mlp3", "gpipe", sx.Mesh(dp=2, tp=2), {}),
    ("dropout_mlp", "any", sx.Mesh(dp=2), {}),
]


@pytest.mark.long
@pytest.mark.parametrize(("name", "how", "mesh", "hints"), PLANS)
def test_units_in_any_order_are_the_whole_batch(name: str, how: str, mesh: sx.Mesh, hints: dict[str, Any]) -> None:
    case = make(name)
    pm = in_order(name, mesh, ORDERS[how], **hints)
    torch.manual_seed(0)
    loss = pm(*case.args, *case.targets)
    loss.backward()
    if name == "dropout_mlp":
        whole = plan(make(name), mesh, grad_accumulation=4)
        torch.manual_seed(0)
        alone = whole(*case.args, *case.targets)
        alone.backward()
        losses, expected = [alone.item()], whole.full_grads()
    else:
        reference = single_device(make(name), 1)
        losses, expected = reference.losses, reference.grads
    assert rel_err(loss, losses[0]) < 1e-9
    grads = pm.full_grads()
    assert grads.keys() == expected.keys()
    assert max(rel_err(grads[key], each) for key, each in expected.items()) < 1e-9
    assert pm.verify()


@pytest.mark.long
def test_ranks_that_meet_do_iterations_in_one_order() -> None:
    pm = in_order("mlp3", sx.Mesh(tp=2), ONE_AHEAD)
    assert pm.verify()
    pm._programs.step.put(1, TRAIN, program(pm, 1, ORDERS["any"]))
    assert "is of iteration 3 of mb, and of iteration 0 of mb on rank 0" in pm.verify().why


# ---- memory


HELD: list[tuple[str, str, sx.Mesh, dict[str, Any]]] = [
    ("mlp3", "any", sx.Mesh(dp=2), {"zero": 3, "zero_min_numel": 0}),
    ("mlp3", "plain", sx.Mesh(dp=2), {"zero": 2, "zero_min_numel": 0}),
]


@pytest.mark.long
@pytest.mark.parametrize(("name", "how", "mesh", "hints"), HELD)
def test_units_hold_what_a_run_holds(name: str, how: str, mesh: sx.Mesh, hints: dict[str, Any]) -> None:
    pm = in_order(name, mesh, ORDERS[how], **hints)
    held = held_in_a_step(pm, make(name))
    for rank in range(pm.mesh.size):
        check_footprint(pm.rank_program(rank), held[rank])


@pytest.mark.long
def test_as_many_iterations_are_held_as_the_order_keeps_under_way() -> None:
    pm = plan(make("gpt_fused"), sx.Mesh(one=1), grad_accumulation=8)
    whole = replay(pm.rank_program(0))
    held, costs = [], []
    for ahead in (1, 2, 3, 4, 8):
        found = replay(program(pm, 0, one_forward_one_backward(ahead, 8)))
        held.append(max(found.by_category["activations"]))
        costs.append(found.cost)
    each = held[1] - held[0]
    assert each > 0 and [most - held[0] for most in held] == [0, each, 2 * each, 3 * each, 7 * each]
    assert held[0] == max(whole.by_category["activations"])
    assert all(but_views(cost) == but_views(whole.cost) for cost in costs)


def but_views(cost: Cost) -> Cost:
    """Without views: units take theirs of what they are handed."""
    return replace(cost, work={work: count for work, count in cost.work.items() if work.kind != "view"})


# ---- damaged orders


def begin(graph: fx.Graph) -> fx.Node:
    return next(node for node in graph.nodes if node.target is loop_ops.begin and len(node.args) > 3)


def backward_first(words: list[str]) -> list[str]:
    forward, backward = words.index("F0.2"), words.index("B0.2")
    words[forward], words[backward] = words[backward], words[forward]
    return words


def unit(graph: fx.Graph, name: str) -> fx.Node:
    return next(node for node in graph.nodes if node.target is loop_ops.action and node.args[1] == name)


def shared_memory(graph: fx.Graph) -> None:
    """What F0 makes for B0 lies in memory of all iterations."""
    relu = next(node for node in graph.nodes if node.target is torch.ops.aten.relu.default)
    with graph.inserting_before(begin(graph)):
        memory = graph.call_function(memory_ops.empty, ([1, 64], torch.float64, "cpu"))
    with graph.inserting_after(relu):
        written = graph.call_function(memory_ops.write, (memory, relu))
    written.meta = dict(relu.meta)
    relu.replace_all_uses_with(written, delete_user_cb=lambda user: user is not written)
    opens, closes = begin(graph), next(user for user in begin(graph).users if user.target is loop_ops.end)
    opens.args = (*opens.args[:2], [*opens.args[2], memory], opens.args[3])
    closes.args = (*closes.args[:2], [*closes.args[2], memory])


FORMS: list[tuple[Damage, str]] = [
    (reordered(lambda words: words[:-1]), "B0.3 is done 0 times"),
    (reordered(lambda words: [*words, words[0]]), "F0.0 is done twice"),
    (reordered(lambda words: [*words, "F0.4", "B0.4"]), "F0.4 is of none of 4 iterations"),
    (reordered(lambda words: [*words, "B0"]), "'B0' is no unit of an iteration"),
    (reordered(lambda words: []), "no unit of these iterations"),
    (reordered(backward_first), "is used in B0 of iteration 2, before F0 makes it"),
    (lambda graph: unit(graph, "F0").prepend(unit(graph, "F0").next), "stands in no unit of its iterations"),
    (lambda graph: unit(graph, "B0").update_arg(1, "B1"), "B1 is no unit of these iterations"),
    (lambda graph: unit(graph, "B0").update_arg(1, "F0"), "F0 is no unit of these iterations, or stands twice"),
    (lambda graph: graph.erase_node(unit(graph, "B0")), "there is no unit B0"),
    (shared_memory, "in the memory empty of all iterations"),
]


@pytest.mark.parametrize(("damage", "said"), FORMS)
def test_an_order_that_cannot_be_done_is_no_program(damage: Damage, said: str) -> None:
    made = lowered(plan(make("mlp3"), sx.Mesh(dp=2), grad_accumulation=4), 1, ONE_AHEAD)
    validate_program(made, ends=False)
    damage(made.graph)
    with pytest.raises(ProgramError, match=said):
        validate_program(made, ends=False)


def test_debug_nan_sees_units() -> None:
    case, pm = make("mlp3"), in_order("mlp3", sx.Mesh(dp=2), ONE_AHEAD)
    with pm.debug_nan():
        assert pm(*case.args, *case.targets).isfinite()
