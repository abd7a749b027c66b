"""Iterations that are interleaved: one's collectives travel while another one computes; loss and gradients stay."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

import shardfx as sx
from shardfx.ir.ops.loop import loop_ops
from shardfx.ir.program.loops.loop_regions import ActionOrder, action_order
from tests.damage_loops import reordered
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


@pytest.mark.long
def test_ranks_that_run_iterations_in_another_order_are_refused() -> None:
    pm, other = beside(True), {"0": "1", "1": "0"}
    program = pm.rank_program(1)
    reordered(lambda words: [word[:-1] + other[word[-1]] for word in words])(program.graph)
    verdict = pm.verify(modules={1: program.module()})
    assert not verdict and verdict.fault is not None and verdict.fault.rank is not None
