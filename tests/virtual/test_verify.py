"""Verdicts of ``pm.verify()``: right plans are proven, wrong ones refuted with numbers, shares of sums told apart."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import shardfx as sx
from shardfx.runtime.verify import numeric_check
from tests.damage_plan import DROPS, MORE, SOUND, WRONG, Changes, ChangesFirst
from tests.plans import MESHES, plan
from tests.wrong.forms import FORMS, malformed
from tests.wrong.nets import X, Y, planned
from tests.zoo import make


@pytest.mark.long
@pytest.mark.parametrize(("mesh", "name"), [("dp2tp2", "dropout_mlp"), ("tp2", "moe_loop")])
def test_the_plan_of_a_case_is_proven_and_agrees_where_it_runs(mesh: str, name: str) -> None:
    pm = plan(make(name), MESHES[mesh])
    for verdict in (pm.verify(), pm.verify(run=True)):
        assert verdict, verdict.why
        assert verdict.checked["ranks"] == pm.mesh.size


def test_an_unknown_rank_is_an_error() -> None:
    pm = plan(make("mlp3"), MESHES["dp2"])
    with pytest.raises(sx.Error, match="no rank 7"):
        pm.verify({7: pm.rank_module(0)})


def test_running_a_model_that_is_too_large_is_an_error() -> None:
    model = torch.nn.Linear(2**14, 2**13, device="meta")
    hints = sx.Hints(args=(torch.empty(4, 2**14, device="meta"),), specs={"weight": "tp, -"})
    pm = sx.parallelize(model, MESHES["tp2"], hints)
    assert pm.verify()
    with pytest.raises(sx.Error, match="too large to be run here") as error:
        pm.verify(run=True)
    assert "8192, 16384" in str(error.value) and "remedy" in str(error.value)


aten = torch.ops.aten


@pytest.mark.long
@pytest.mark.parametrize("name", [*DROPS, *MORE])
def test_outputs_and_constants_are_part_of_the_claim(name: str) -> None:
    pm = planned(Changes((DROPS | MORE)[name]))
    for verdict in (pm.verify(), pm.verify(run=True), pm.verify(every_pass=True)):
        assert not verdict and verdict.status == "refuted"
        assert verdict.fault is not None and verdict.fault.output


@pytest.mark.long
def test_the_programs_of_other_calls_are_proven() -> None:
    pm = planned()
    assert pm.verify().programs == ("loss and gradients", "loss", "results")
    pm.eval()
    pm(X, Y)
    assert "_modules['norm'].training == True fails: loss" in str(pm.verify())


@pytest.mark.long
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


# ---- programs that are not well formed ---------------------------------------------------------------------------


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


CHANGED = 21


class Net(nn.Module):
    """Tokens through two linears."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(48, 8), nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 24), nn.Linear(24, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(self.norm(self.embed(x)))))


@cache
def changed_plan(**hints: Any) -> sx.ParallelModule:
    torch.manual_seed(0)
    x, y = torch.randint(48, (16, 3)), torch.randn(16, 3, 8, dtype=torch.float64)
    specs = {"args.0": "dp, -", "up.weight": "tp, -", "embed.weight": "tp, -"}
    given = sx.Hints(args=(x,), loss=F.mse_loss, targets=(y,), specs=specs, **hints)
    return sx.parallelize(Net().double(), sx.Mesh(dp=8, tp=3), given, virtual=True)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.1)


def with_relu(pm: sx.ParallelModule) -> tuple[fx.GraphModule, fx.Node]:
    """The program of a rank with a relu for its gelu, which is given too."""
    changed = pm.rank_module(CHANGED)
    node = next(node for node in changed.graph.nodes if node.target is aten.gelu.default)
    node.target = aten.relu.default
    changed.recompile()
    return changed, node


NORM: dict[str, Any] = {"zero": 2, "zero_min_numel": 1, "optimizer": adamw, "clip_grad_norm": 1.0}


@pytest.mark.long
@pytest.mark.parametrize("hints", [{}, NORM], ids=["plain", "clip"])
def test_a_changed_program_of_many_ranks_is_refuted_with_numbers(hints: dict[str, Any]) -> None:
    pm = changed_plan(**hints)
    changed, relu = with_relu(pm)
    verdict = pm.verify(modules={CHANGED: changed})
    assert verdict.status == "refuted" and verdict.fault is not None
    assert verdict.fault.node == relu.name and verdict.fault.rank == CHANGED
    with pytest.raises(sx.Error, match="of the model"):
        pm.use({CHANGED: changed})


@pytest.mark.long
def test_a_changed_program_of_ranks_too_many_to_run_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    pm = changed_plan()
    monkeypatch.setattr(numeric_check, "MOST_CALLS", 12 * len(pm.planned.nodes))
    changed, relu = with_relu(pm)
    verdict = pm.verify(modules={CHANGED: changed})
    assert verdict.status == "unknown" and verdict.fault is not None and "agrees" not in verdict.why
    assert verdict.fault.node == relu.name and verdict.fault.rank == CHANGED


@pytest.mark.long
def test_numbers_that_are_nearly_the_same_are_told_apart() -> None:
    pm = changed_plan()
    changed = pm.rank_module(CHANGED)
    gelu = next(node for node in changed.graph.nodes if node.target is aten.gelu.default)
    with changed.graph.inserting_after(gelu):
        twice = changed.graph.call_function(aten.mul.Tensor, (gelu, 1.000001))
    gelu.replace_all_uses_with(twice, lambda user: user is not twice)
    changed.recompile()
    verdict = pm.verify(modules={CHANGED: changed})
    assert verdict.status == "refuted" and verdict.fault is not None
    got, _, rest = verdict.fault.numbers.partition(" is ")[2].partition(", and ")
    assert float(got) != float(rest.split()[0])


share_aten, c10d = torch.ops.aten, torch.ops._c10d_functional
AXES = {"2x2x2": {"a": 2, "b": 2, "c": 2}, "3x2": {"a": 3, "b": 2}, "2x3": {"a": 2, "b": 3}}


def share_planned(mesh: str, specs: dict[str, str], **hints: object) -> sx.ParallelModule:
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 4 if mesh == "2x2x2" else 5, dtype=torch.float64)
    x, y = torch.randn(4, 6, dtype=torch.float64), torch.randint(4, (4,))
    given = sx.Hints(args=(x,), loss=F.cross_entropy, targets=(y,), specs=specs, **hints)  # type: ignore[arg-type]
    return sx.parallelize(model, sx.Mesh(**AXES[mesh]), given)


@pytest.mark.long
@pytest.mark.parametrize(
    ("mesh", "specs"),
    [("2x2x2", {"weight": "a, c", "bias": "a b c"}), ("2x3", {"args.0": "a, -", "weight": "b a, -"})],
)
def test_a_norm_of_parameters_sharded_over_other_axes_is_proven(mesh: str, specs: dict[str, str]) -> None:
    pm = share_planned(mesh, specs, clip_grad_norm=0.01)
    assert pm.verify(), pm.verify().why


class Squared(torch.nn.Module):
    """A product of a square matrix with itself, which is a sum over what is sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(6, 4, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = x @ self.weight
        return found @ found


@pytest.mark.parametrize("swapped", [False, True])
def test_shares_that_were_made_in_other_ways_are_not_added(swapped: bool) -> None:
    """``share @ sum`` of all ranks add up to the product; that of one rank and ``sum @ share`` of the other do not."""
    torch.manual_seed(0)
    hints = sx.Hints(args=(torch.randn(4, 6, dtype=torch.float64),), specs={"args.0": "-, a", "weight": "a, -"})
    pm = sx.parallelize(Squared(), sx.Mesh(a=2), hints, virtual=True)
    changed = {rank: pm.rank_module(rank) for rank in range(2)}
    for rank, module in changed.items():
        nodes = list(module.graph.nodes)
        first, second = (node for node in nodes if node.target is share_aten.mm.default)
        wait = next(node for node in nodes if node.target is c10d.wait_tensor.default)
        with module.graph.inserting_after(first):
            share = module.graph.call_function(share_aten.clone.default, (first,))
        second.args = (wait, share) if swapped and rank else (share, wait)
        with module.graph.inserting_after(second):
            started = module.graph.call_function(c10d.all_reduce.default, (second, *wait.args[0].args[1:]))
        with module.graph.inserting_after(started):
            done = module.graph.call_function(c10d.wait_tensor.default, (started,))
        second.replace_all_uses_with(done, delete_user_cb=lambda user, last=started: user is not last)  # type: ignore[misc]
        module.recompile()
    assert bool(pm.verify(changed)) == bool(pm.verify(changed, run=True)) == (not swapped)


class Summed(nn.Module):
    """Two projections, one of them of a row without its dim: the gradient of their sum is reshaped in two ways."""

    def __init__(self) -> None:
        super().__init__()
        self.row, self.rows = nn.Linear(8, 8), nn.Linear(6, 8, bias=False)

    def forward(self, row: Tensor, rows: Tensor) -> Tensor:
        out: Tensor = self.rows(rows) + self.row(row.relu()).unsqueeze(1)
        return torch.cat([out, out * 2], 1)


def test_a_squeeze_and_a_view_are_the_same_function() -> None:
    row, rows = torch.randn(4, 8, requires_grad=True), torch.randn(4, 1, 6)
    specs = {"args.0": "dp, -", "args.1": "dp, -, -", "row.weight": "tp, -", "rows.weight": "tp, -"}
    hints = sx.Hints(args=(row, rows), loss=lambda out: (out * out).mean(), specs=specs)
    verdict = sx.parallelize(Summed(), sx.Mesh(dp=2, tp=2), hints, virtual=True).verify()
    assert verdict, verdict.why
