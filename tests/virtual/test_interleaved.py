"""Iterations that are interleaved: one's collectives travel while another one computes; loss and gradients stay."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from torch import fx

import shardfx as sx
from shardfx.ir.ops.loop import loop_ops
from shardfx.ir.program.loops.loop_regions import ActionOrder, action_order
from shardfx.ir.program.validate_program import ProgramError, validate_program
from shardfx.ir.registry import PROGRAM_OPS
from tests.plans import plan, specs_of
from tests.reference import rel_err, single_device
from tests.zoo import make


def with_hints(
    name: str, hints: dict[str, Any], sequence: bool = False, iterations: int = 2, interleave: bool = True, **axes: int
) -> sx.ParallelModule:
    """The plan of a case whose batch is split into iterations, before ranks shard it."""
    case = make(name)
    mesh = sx.Mesh(mb=sx.Loop(iterations, interleave=interleave), **axes)
    rows = "mb dp" if "dp" in axes else "mb"
    inputs = [(f"args.{i}", t) for i, t in enumerate(case.args)] + [(f"kwargs.{k}", t) for k, t in case.kwargs.items()]
    specs = specs_of(case, mesh, sequence)
    if sequence:
        specs |= {key: rows + specs[key][specs[key].index(",") :] for key in case.sequence_specs or {}}
    specs |= {name: ", ".join([rows, *["-"] * (t.dim() - 1)]) for name, t in inputs}
    specs |= {f"targets.{i}": ", ".join([rows, *["-"] * (t.dim() - 1)]) for i, t in enumerate(case.targets)}
    return plan(case, mesh, specs=specs, **hints)


def check(name: str, pm: sx.ParallelModule) -> None:
    """Loss and gradients are one device's, it is proven, and its memory is that of the replay."""
    case, reference = make(name), single_device(make(name), 1)
    loss = pm(*case.args, *case.targets, **case.kwargs)
    loss.backward()
    grads = pm.full_grads()
    assert rel_err(loss, reference.losses[0]) < 1e-9
    assert max(rel_err(grads[key], each) for key, each in reference.grads.items()) < 1e-9
    assert "loop.action" in str(pm.rank_program(0))
    verdict = pm.verify()
    assert verdict.status == "proven", verdict


PLANS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gpt, tp": ("gpt_fused", {"tp": 2}, {}),
    "gpt, tokens over tp": ("gpt_fused", {"tp": 2, "sequence": True}, {}),
    "zero 3": ("gpt_fused", {"dp": 2}, {"zero": 3, "zero_min_numel": 0}),
    "gpt, dp and tp": ("gpt_fused", {"dp": 2, "tp": 2, "sequence": True}, {}),
    "llama, tp": ("llama", {"tp": 2}, {}),
    "llama, tokens over tp": ("llama", {"tp": 2, "sequence": True}, {}),
    "llama, dp and tp": ("llama", {"dp": 2, "tp": 2, "sequence": True}, {}),
    "zero 2": ("llama", {"dp": 2}, {"zero": 2, "zero_min_numel": 0}),
    "recompute": ("gpt_fused", {"tp": 2, "sequence": True}, {"recompute": "layers.*"}),
    "3 iterations of 4 rows": ("gpt_fused", {"tp": 2, "iterations": 3}, {}),
    "4 iterations": ("llama", {"tp": 2, "iterations": 4}, {}),
    "sums of each iteration": ("gpt_fused", {"dp": 2, "tp": 2}, {"reduce": "each"}),
    "offloaded": ("gpt_fused", {"tp": 2}, {"offload": ("activations",)}),
    "encoder and decoder": ("hf_t5", {"tp": 2}, {}),
    "in stages": ("gpt_fused", {"pp": 2, "tp": 2, "iterations": 4}, {"pipeline": sx.Pipeline()}),
}


@pytest.mark.slow
@pytest.mark.parametrize("which", PLANS)
def test_iterations_side_by_side_are_the_whole_batch(which: str) -> None:
    name, axes, hints = PLANS[which]
    check(name, with_hints(name, hints, **axes))


@cache
def beside(interleave: bool) -> sx.ParallelModule:
    return with_hints("gpt_fused", {}, sequence=True, interleave=interleave, tp=2)


@pytest.mark.long
def test_less_communication_is_exposed() -> None:
    fast = sx.Machine.load("accelerator")
    slow = replace(fast, flops={name: rate / 1e4 for name, rate in fast.flops.items()}, bandwidth=fast.bandwidth / 1e4)
    behind, interleaved = (beside(each).timeline(slow) for each in (False, True))
    assert interleaved.exposed < 0.5 * behind.exposed
    assert interleaved.step < behind.step
    for timeline in (behind, interleaved):
        assert 0 <= timeline.bubble < 1e-9
    first, second = (interleaved.segments(sx.schedules.Action("F", 0, iteration)) for iteration in range(2))
    assert len(first) > 1
    assert len(second) > 1
    assert first[0].end <= second[0].start < first[1].start
    assert sum(each.length for row in (first, second) for each in row) <= interleaved.step


@pytest.mark.long
def test_so_many_iterations_are_under_way_as_the_pass_says() -> None:
    case = make("mlp3")
    specs = {"args.0": "mb, -", "targets.0": "mb", "fc1.weight": "tp, -", "fc2.weight": "-, tp"}
    mesh = sx.Mesh(mb=sx.Loop(4, interleave=True), tp=2)
    for copies in (1, 2, 3):
        hints = {"specs": specs, "rank_passes": [f"interleave{{copies={copies}}}"]}
        program = plan(case, mesh, **hints).rank_program(0)
        begin = next(node for node in reversed(program.graph.nodes) if node.target is loop_ops.begin)
        assert ActionOrder.of(action_order(begin).split()).in_flight == copies
    with pytest.raises(sx.Error, match="1 or more"):
        plan(case, mesh, specs=specs, rank_passes=["interleave{copies=0}"])


# ---- what is wrong is refused


def named(graph: fx.Graph, name: str, last: bool = False) -> fx.Node:
    found = [node for node in graph.nodes if node.target is PROGRAM_OPS[name].function]
    return found[-1 if last else 0]


def ordered(change: Callable[[list[str]], list[str]]) -> Callable[[fx.Graph], None]:
    def damage(graph: fx.Graph) -> None:
        begin = next(node for node in graph.nodes if len(node.args) > 3 and node.target is loop_ops.begin)
        begin.update_arg(3, " ".join(change(begin.args[3].split())))

    return damage


def a_wait_moved(graph: fx.Graph) -> None:
    """What uses the sum stands before it has come."""
    wait = named(graph, "c10d.wait_tensor")
    wait.replace_all_uses_with(wait.args[0])  # type: ignore[arg-type]
    graph.erase_node(wait)


def added_twice(graph: fx.Graph) -> None:
    node = named(graph, "loop.add", last=True)
    with graph.inserting_after(node):
        again = graph.call_function(loop_ops.add, (node, node.args[1]))
    again.meta = dict(node.meta)
    node.replace_all_uses_with(again, delete_user_cb=lambda user: user is not again)


OTHER = {"0": "1", "1": "0"}
WRONG: dict[str, Callable[[fx.Graph], None]] = {
    "one rank comes with the other iteration": ordered(lambda words: [word[:-1] + OTHER[word[-1]] for word in words]),
    "a slice twice": lambda graph: named(graph, "loop.index").update_arg(2, 0),
    "added twice": added_twice,
}
IMPOSSIBLE: dict[str, Callable[[fx.Graph], None]] = {
    "a wait moved": a_wait_moved,
    "a unit waits for what was not started": ordered(lambda words: [words[2], *words[:2], *words[3:]]),
    "a unit left out": ordered(lambda words: words[:-1]),
}


@pytest.mark.long
@pytest.mark.one_in(4)
@pytest.mark.parametrize("damage", WRONG.values(), ids=WRONG)
def test_a_wrong_program_is_not_proven(damage: Callable[[fx.Graph], None]) -> None:
    pm = beside(True)
    program = pm.rank_program(1)
    damage(program.graph)
    verdict = pm.verify(modules={1: program.module()})
    assert not verdict
    assert verdict.fault is not None
    assert verdict.fault.rank is not None


@pytest.mark.parametrize("damage", IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_a_program_that_cannot_be_is_refused(damage: Callable[[fx.Graph], None]) -> None:
    program = beside(True).rank_program(1)
    damage(program.graph)
    with pytest.raises(ProgramError):
        validate_program(program)
