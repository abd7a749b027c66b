"""What is claimed of a plan: the captured program's inputs, constants and outputs, in three verdicts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import shardfx as sx
from shardfx.ir.graph import OutputKind
from tests.damage_plan import DROPS, MORE, SOUND, WRONG, Change, Changes, ChangesFirst

aten = torch.ops.aten
X, Y = torch.randn(8, 6), torch.randint(0, 4, (8,))


class Net(nn.Module):
    """A constant, a buffer that is updated, two results."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = F.relu(self.norm(self.up(x)))
        return self.down(h) * torch.tensor([1.0, 2.0, 3.0, 4.0]), h.sum(1)


def loss(out: tuple[Tensor, Tensor], y: Tensor) -> Tensor:
    return F.cross_entropy(out[0], y) + out[1].mean()


def planned(*passes: sx.Pass, mesh: sx.Mesh | None = None) -> sx.ParallelModule:
    torch.manual_seed(0)
    hints = sx.Hints((X,), loss=loss, targets=(Y,), specs={"args.0": "dp, -"}, passes=passes)
    return sx.parallelize(Net(), mesh or sx.Mesh(dp=2), hints, virtual=True)


@pytest.mark.parametrize("name", [*DROPS, *MORE])
def test_outputs_and_constants_are_part_of_the_claim(name: str) -> None:
    pm = planned(Changes((DROPS | MORE)[name]))
    for verdict in (pm.verify(), pm.verify(run=True), pm.verify(every_pass=True)):
        assert not verdict and verdict.status == "refuted"
        assert verdict.fault is not None and verdict.fault.output


def test_the_proof_is_of_all_programs() -> None:
    verdict = planned().verify()
    assert verdict and verdict.status == "proven"
    assert verdict.programs == ("loss and gradients", "loss", "results")


def test_the_programs_of_other_calls_are_proven() -> None:
    pm = planned()
    pm.eval()
    pm(X, Y)
    assert "in evaluation mode: loss" in str(pm.verify())


@pytest.mark.parametrize("name", SOUND)
def test_what_changes_nothing_is_proven(name: str) -> None:
    verdict = planned(ChangesFirst(SOUND[name])).verify(every_pass=True)
    assert verdict, verdict.why


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_node_is_named_with_numbers(name: str) -> None:
    pm = planned(ChangesFirst(WRONG[name]))
    verdict = pm.verify()
    assert verdict.status == "refuted" and verdict.fault is not None
    made = [node for node in pm.after.nodes if node.made_by == "changes-first"]
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
    verdict = sx.prove(GRAPH, text)
    assert verdict, verdict.why
    assert sx.prove(text, GRAPH)


def test_what_cannot_be_followed_is_unknown() -> None:
    """``relu(x) = max(x, 0)``: equal, in a way that no rule knows."""
    before = GRAPH.replace("aten.add.Tensor(%1, %x)", "aten.relu(%1)")
    after = GRAPH.replace("aten.add.Tensor(%1, %x)", "aten.clamp_min(%1, 0)")
    verdict = sx.prove(before, after)
    assert not verdict and verdict.status == "unknown"
    assert verdict.fault is not None and verdict.fault.node == "2" and not verdict.fault.numbers


def test_a_lost_output_of_each_kind_is_named() -> None:
    for kind, change in (
        (OutputKind.LOSS, MORE["the loss is dropped"]),
        (OutputKind.RESULT, DROPS["a result is dropped"]),
    ):
        check: Change = change
        assert f"{kind.value} " in planned(Changes(check)).verify().why


# ---- programs that are not well formed ---------------------------------------------------------------------------


def damaged(name: str, module: fx.GraphModule) -> object:
    """A rank's module with something wrong in its form."""
    graph = module.graph
    relu = next(n for n in graph.nodes if n.target is aten.relu.default)
    end = graph.output_node()
    results = list(end.args[0])
    if name == "extra arguments":
        relu.args = (*relu.args, 3, 4)
    elif name == "no argument":
        relu.args = ()
    elif name == "an unknown keyword":
        relu.kwargs = {"how": 1}
    elif name == "a view that needs a copy":
        with graph.inserting_after(relu):
            turned = graph.call_function(aten.t.default, (relu,))
        with graph.inserting_after(turned):
            flat = graph.call_function(aten.view.default, (turned, [-1]))
        with graph.inserting_after(flat):
            graph.call_function(aten.neg.default, (flat,))
    elif name == "None is returned":
        end.args = ((None, *results[1:]),)
    elif name == "an output is missing":
        end.args = (tuple(results[1:]),)
    elif name == "no output":
        graph.erase_node(end)
    elif name == "an unknown collective":
        group = next(n.args[-1] for n in graph.nodes if "all_reduce" in str(n.target))
        with graph.inserting_after(relu):
            graph.call_function(torch.ops._c10d_functional.broadcast.default, (relu, 0, group))
    elif name == "a foreign function":
        relu.target = len
    elif name == "no module":
        return graph
    return module


ERRORS = {
    "an output is missing": "not a program of this plan",
    "no output": "not a program of this plan",
    "no module": "not a program",
}
SILENT = ("a foreign function", "an unknown collective")
"""What a run may not notice."""


@pytest.mark.parametrize(
    "name",
    [
        "extra arguments",
        "no argument",
        "an unknown keyword",
        "a view that needs a copy",
        "None is returned",
        "an output is missing",
        "no output",
        "an unknown collective",
        "a foreign function",
        "no module",
    ],
)
def test_a_malformed_program_is_refused(name: str, plan_of_two: sx.ParallelModule) -> None:
    pm = plan_of_two
    changed = {rank: damaged(name, pm.rank_module(rank)) for rank in range(2)}
    for run in (False, True):
        if name in ERRORS:
            with pytest.raises(sx.Error, match=ERRORS[name]):
                pm.verify(changed, run=run)  # type: ignore[arg-type]
        elif not run or name not in SILENT:
            assert not pm.verify(changed, run=run)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def plan_of_two() -> sx.ParallelModule:
    return planned()
