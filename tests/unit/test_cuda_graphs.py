"""``pm.compile(cuda_graphs=True)``: what is refused; and recorded steps, with a double in the place of the graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardfx as sx
from shardfx.module import execution_target
from shardfx.module.execution_target import CompileOptions
from shardfx.runtime.cuda_graphs import WARM_UP, GraphedStep, graphed
from tests.plans import MESHES
from tests.stepped import KINDS, alone, batches, small_plan

ALONE = sx.Mesh(dp=1)


class Double(GraphedStep):
    """Runs anew, on the tensors of the capture, what a graph would replay."""

    made: list[Double]

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.made.append(self)
        self.did: list[str] = []

    def warm_up(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        self.did.append("runs")
        return self._start(*inputs)

    def capture(self, inputs: Sequence[Tensor]) -> None:
        self.did.append("is captured")
        self._captured = inputs

    def replay(self) -> Sequence[Tensor]:
        self.did.append("is replayed")
        return self._start(*self._captured)


def with_doubles(pm: sx.ParallelModule, monkeypatch: pytest.MonkeyPatch) -> list[Double]:
    """Let ``pm`` record its steps; gives the graphs that are made from now on."""
    monkeypatch.setattr(Double, "made", [], raising=False)
    make, options = type(pm._target).make_compiled, CompileOptions({"backend": "eager"}, cuda_graphs=True)
    monkeypatch.setattr(execution_target, "graphed", lambda write, device: graphed(write, device, Double))
    monkeypatch.setattr(type(pm._target), "make_compiled", lambda self, graph, _: make(self, graph, options))
    pm.compile(backend="eager")
    return Double.made


@pytest.mark.long
def test_recorded_steps_equal_one_device_under_a_schedule_and_after_a_load(monkeypatch: pytest.MonkeyPatch) -> None:
    def rate(step: int) -> float:
        return 1e-2 * 0.5**step

    losses, params, _ = alone(KINDS["AdamW"], 6, rate=rate)
    pm = small_plan(KINDS["AdamW"], ALONE)
    graphs = with_doubles(pm, monkeypatch)
    schedule = torch.optim.lr_scheduler.ExponentialLR(pm.optimizer, 0.5)
    for i, ((x, y), loss) in enumerate(zip(batches(6), losses, strict=True)):
        if i == 4:
            state = {name: tensor.clone() for name, tensor in pm.full_state_dict().items()}
            states = pm.optimizer.full_state_dict()
            pm.step(x, y)
            pm.load_full_state_dict(state)
            pm.optimizer.load_full_state_dict(states)
        assert float(pm.step(x, y)) == pytest.approx(loss, abs=1e-12)
        schedule.step()
    now = pm.full_state_dict()
    assert all(torch.allclose(now[name], value, rtol=0, atol=1e-12) for name, value in params.items())
    (graph,) = graphs
    assert graph.did == ["runs"] * WARM_UP + ["is captured"] + ["is replayed"] * 5


@pytest.mark.long
def test_losses_and_results_of_recorded_steps_stay_what_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a replay gives is not written over by the next; dropout draws anew; each batch size has a graph."""
    model = nn.Sequential(nn.Linear(6, 32), nn.Dropout(), nn.BatchNorm1d(32), nn.Linear(32, 4)).double()
    x, y = torch.randn(8, 6, dtype=torch.float64), torch.randn(8, 4, dtype=torch.float64)
    hints = sx.Hints(args=(x,), targets=(y,), loss=F.mse_loss, optimizer=lambda params: torch.optim.SGD(params, lr=0.0))
    pm, plain = (sx.parallelize(model, ALONE, hints) for _ in range(2))
    graphs = with_doubles(pm, monkeypatch)
    steps: list[list[Any]] = []
    for each in (pm, plain):
        torch.manual_seed(0)
        steps.append([each.step(a, b, with_results=True) for n in range(5) for a, b in ((x, y), (x[:4] + n, y[:4]))])
    assert torch.allclose(torch.stack([loss for loss, _ in steps[0]]), torch.stack([loss for loss, _ in steps[1]]))
    assert all(torch.allclose(mine, theirs) for (_, mine), (_, theirs) in zip(*steps, strict=True))
    assert len({float(loss) for loss, _ in steps[0]}) == 10
    assert [graph.did.count("is replayed") for graph in graphs] == [3, 3]
    wanted = plain.full_state_dict()
    assert all(torch.allclose(value, wanted[name]) for name, value in pm.full_state_dict().items())
    assert torch.allclose(pm.eval()(x), plain.eval()(x)) and len(graphs) == 2


def refused(pm: sx.ParallelModule, match: str, device: str = "cuda", **options: Any) -> None:
    with pytest.raises(sx.Error, match=match) as caught:
        CompileOptions(options, True).check(pm._compiled, torch.device(device), pm._target.virtual)
    assert caught.value.remedy and "cuda_graphs=True" in str(caught.value.where)


@pytest.mark.long
@pytest.mark.parametrize(
    ("match", "mesh", "hints"),
    [
        ("without optimizer", ALONE, {"optimizer": None}),
        ("2 virtual ranks", MESHES["dp2"], {}),
        ("plan with offload", ALONE, {"offload": [sx.Offload("optimizer", min_numel=0)]}),
        ("guards, which", ALONE, {"guard": True}),
    ],
)
def test_plans_without_a_step_to_record_are_refused(
    match: str, mesh: sx.Mesh, hints: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    pm = small_plan(hints.pop("optimizer", KINDS["AdamW"]), mesh, **hints)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    refused(pm, match)


@pytest.mark.long
def test_compile_refuses_options_that_it_does_not_know_and_graphs_without_a_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pm = small_plan(KINDS["SGD"], ALONE)
    with pytest.raises(sx.Error, match=r"is no option of torch.compile(.|\n)*did you mean 'fullgraph'"):
        pm.compile(full_graph=True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(sx.Error, match=r"is_available\(\) is False"):
        pm.compile(cuda_graphs=True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    refused(pm, "a plan on cpu", "cpu")
    refused(pm, "mode='reduce-overhead'", mode="reduce-overhead")
    assert pm._compiling is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_cuda_graphs_equal_compiled_steps() -> None:
    """Under a schedule, with dropout, other contents and two batch sizes, and behind a load."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 32), nn.Dropout(), nn.BatchNorm1d(32), nn.Linear(32, 4)).double()
    data = [(torch.randn(n, 6).double(), torch.randn(n, 4).double()) for n in (8, 8, 4) * 4]
    hints = sx.Hints(data[0][:1], targets=data[0][1:], loss=F.mse_loss, optimizer=KINDS["AdamW"], device="cuda")
    runs = []
    for graphs in (True, False):
        pm = sx.parallelize(model, ALONE, hints)
        pm.compile(cuda_graphs=graphs)
        schedule = torch.optim.lr_scheduler.ExponentialLR(pm.optimizer, 0.9)
        torch.manual_seed(1)
        losses, start = [], pm.full_state_dict()
        for i, (x, y) in enumerate(data):
            if i == len(data) - 2:
                pm.load_full_state_dict(start)
            losses.append(pm.step(x.cuda(), y.cuda()))
            schedule.step()
        runs.append((torch.stack(losses), pm.full_state_dict(), pm.eval()(data[0][0].cuda())))
    (losses, state, out), (wanted, theirs, expected) = runs
    torch.testing.assert_close(losses, wanted, rtol=0, atol=1e-9)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-9)
    assert all(torch.allclose(state[name], value, rtol=0, atol=1e-9) for name, value in theirs.items())
