"""``Hints(reduce="auto")``: once or in each iteration, by what is faster and fits; reports and explanations say why."""

from __future__ import annotations

from typing import Any

import pytest

import shardfx as sx
from shardfx.ir.ops import comm
from shardfx.ir.program.loops.loop_regions import regions
from tests.plans import plan
from tests.zoo import make


def planned(**hints: Any) -> sx.ParallelModule:
    return plan(make("mlp3"), sx.Mesh(dp=2), grad_accumulation=4, zero_min_numel=0, **hints)


def reduced_in_iterations(pm: sx.ParallelModule) -> bool:
    """Whether a gradient is reduced among ranks in iterations."""
    nodes = pm.rank_program(0).graph.nodes
    inside = regions(nodes)
    return any("reduce_scatter" in node.name and inside[node] for node in nodes)


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.slow
def test_it_is_what_fits(zero: int) -> None:
    last, each = (planned(zero=zero, reduce=way) for way in ("last", "each"))
    assert not reduced_in_iterations(last) and reduced_in_iterations(each)
    peaks = [pm.memory(0).peak for pm in (last, each)]
    assert peaks[1] < peaks[0]
    ample, tight = (planned(zero=zero, memory=peak) for peak in (peaks[0], peaks[0] - 1))
    assert not reduced_in_iterations(ample) and reduced_in_iterations(tight)
    assert ample.memory(0).peak == peaks[0] and tight.memory(0).peak == peaks[1]
    for pm, said in ((ample, "reduced once, behind the last iteration"), (tight, "reduced in each iteration")):
        (sent,) = (node for node in pm.planned.nodes if node.op is comm.reduce_scatter)
        assert said in str(pm.explain(f"%{sent.name}"))
    assert any("which is faster" in note for note in ample.report().warnings)
    assert any("may hold" in note for note in tight.report().warnings)
    assert ample.verify() and tight.verify()


@pytest.mark.long
def test_a_machine_that_is_named_says_what_a_rank_may_hold() -> None:
    assert not reduced_in_iterations(planned(zero=2, machine="h100-dgx"))
    assert reduced_in_iterations(planned(zero=2))


def test_whole_gradients_are_reduced_once() -> None:
    pm = planned(zero=0, machine="h100-dgx")
    assert "all_reduce" in str(pm.rank_program(0)) and not any("reduced" in note for note in pm.report().warnings)
