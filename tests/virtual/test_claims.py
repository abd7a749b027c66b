"""What is claimed of a plan: the captured program's inputs, constants and outputs, in three verdicts."""

from __future__ import annotations

import pytest
import torch

import shardfx as sx
from shardfx.ir.graph import OutputKind
from tests.damage_plan import DROPS, MORE, SOUND, WRONG, Change, Changes, ChangesFirst
from tests.wrong.forms import FORMS, malformed
from tests.wrong.nets import X, Y, planned

aten = torch.ops.aten


@pytest.mark.long
@pytest.mark.parametrize("name", [*DROPS, *MORE])
def test_outputs_and_constants_are_part_of_the_claim(name: str) -> None:
    pm = planned(Changes((DROPS | MORE)[name]))
    for verdict in (pm.verify(), pm.verify(run=True), pm.verify(every_pass=True)):
        assert not verdict and verdict.status == "refuted"
        assert verdict.fault is not None and verdict.fault.output


@pytest.mark.long
def test_the_proof_is_of_all_programs() -> None:
    verdict = planned().verify()
    assert verdict and verdict.status == "proven"
    assert verdict.programs == ("loss and gradients", "loss", "results")


@pytest.mark.long
def test_the_programs_of_other_calls_are_proven() -> None:
    pm = planned()
    pm.eval()
    pm(X, Y)
    assert "in evaluation mode: loss" in str(pm.verify())


@pytest.mark.long
@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", SOUND)
def test_what_changes_nothing_is_proven(name: str) -> None:
    verdict = planned(ChangesFirst(SOUND[name])).verify(every_pass=True)
    assert verdict, verdict.why


@pytest.mark.long
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_node_is_named_with_numbers(name: str) -> None:
    pm = planned(ChangesFirst(WRONG[name]))
    verdict = pm.verify()
    assert verdict.status == "refuted" and verdict.fault is not None
    made = [node for node in pm.planned.nodes if node.made_by == "changes-first"]
    assert verdict.fault.node in {value.name for node in made for value in node.outs}
    assert "element [" in verdict.why and "of the model" in verdict.why


GRAPH = """
mesh dp=2
argument %x : f32[8, 4]
parameter %w : f32[4, 4]
parameter %b : f32[4]
forward:
  %0 = aten.mm(%x, %w) : f32[8, 4]
  %1 = aten.add.Tensor(%0, %b) : f32[8, 4]
  %2 = aten.add.Tensor(%1, %x) : f32[8, 4]
outputs:
  result results.0 = %2
"""


@pytest.mark.parametrize(
    "other",
    [
        "  %0 = aten.mm(%x, %w) : f32[8, 4]\n  %1 = aten.add.Tensor(%0, %x) : f32[8, 4]\n"
        "  %2 = aten.add.Tensor(%1, %b) : f32[8, 4]\n",
        "  %0 = aten.addmm(%b, %x, %w) : f32[8, 4]\n  %2 = aten.add.Tensor(%0, %x) : f32[8, 4]\n",
    ],
    ids=["a sum in another order", "an op with a decomposition"],
)
def test_sums_and_fusions_are_proven(other: str) -> None:
    at = GRAPH.index("  %0")
    text = GRAPH[:at] + other + GRAPH[GRAPH.index("outputs:") :]
    verdict = sx.rerun.prove(GRAPH, text)
    assert verdict, verdict.why
    assert sx.rerun.prove(text, GRAPH)


def test_what_cannot_be_followed_is_unknown() -> None:
    """``expm1(x) = exp(x) - 1``: equal but for rounding, which no law says."""
    before = GRAPH.replace("aten.add.Tensor(%1, %x)", "aten.expm1(%1)")
    exp = "%3 = aten.exp(%1) : f32[8, 4]\n  %2 = aten.sub.Scalar(%3, 1)"
    after = GRAPH.replace("%2 = aten.add.Tensor(%1, %x)", exp)
    verdict = sx.rerun.prove(before, after)
    assert not verdict and verdict.status == "unknown"
    assert verdict.fault is not None and verdict.fault.node == "3" and not verdict.fault.numbers
    assert "agrees on 3 random draws" in verdict.why


def test_a_lost_output_of_each_kind_is_named() -> None:
    for kind, change in (
        (OutputKind.LOSS, MORE["the loss is dropped"]),
        (OutputKind.RESULT, DROPS["a result is dropped"]),
    ):
        check: Change = change
        assert f"{kind.value} " in planned(Changes(check)).verify().why


# ---- programs that are not well formed ---------------------------------------------------------------------------


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", FORMS)
def test_a_malformed_program_is_refused(name: str, plan_of_two: sx.ParallelModule) -> None:
    """By a verdict, or an error that says what is wrong with it; on all ranks, or on one."""
    pm = plan_of_two
    for ranks in (range(2), [1]):
        for run in (False, True):
            changed = {rank: malformed(name, pm.rank_module(rank)) for rank in ranks}
            try:
                verdict = pm.verify(changed, run=run)
            except sx.Error:
                continue
            assert not verdict and (verdict.status == "refuted" or not run), str(verdict)


@pytest.fixture(scope="module")
def plan_of_two() -> sx.ParallelModule:
    return planned()
