"""``Hints(grad_accumulation=4)``: iterations of the batch beside what hints say, or why there are none."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardfx as sx
from shardfx.ir.ops import pack
from shardfx.module.programs import TRAIN
from tests.reference import check_step
from tests.zoo import make


@pytest.mark.long
def test_a_batch_that_has_too_few_rows_says_how_many_it_needs() -> None:
    case = make("gpt_fused")
    x, y = case.args[0][:6], case.targets[0][:6]
    hints = sx.Hints(args=(x,), loss=case.loss, targets=(y,), specs={"args.0": "dp, -"}, grad_accumulation=4)
    with pytest.raises(sx.Error, match="too few rows to be done in micro-batches") as error:
        sx.parallelize(case.model, sx.Mesh(dp=2), hints, virtual=True)
    said = str(error.value)
    assert "args.0" in said and "at least 8 rows, one for each of 4 micro-batches by 2 ranks" in said


@pytest.mark.long
def test_iterations_of_the_batch_stand_beside_iterations_of_another_dim() -> None:
    """What shards another dim over time already is split into iterations of the batch all the same."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    x, y = torch.randn(8, 4, 6, dtype=torch.float64), torch.randn(8, 4, 3, dtype=torch.float64)
    for mesh, spec, expected in (
        (sx.Mesh(chunk=sx.Loop(2)), "-, chunk, -", "[.{mb}, .{chunk}, .]"),
        (sx.Mesh(chunk=sx.Loop(2)), "chunk, -, -", "[.{mb,chunk}, ., .]"),
    ):
        hints = sx.Hints(args=(x,), loss=F.mse_loss, targets=(y,), specs={"args.0": spec}, grad_accumulation=2)
        pm = sx.parallelize(copy.deepcopy(model), mesh, hints, virtual=True)
        assert str(pm.planned.input("args.0").value.spec) == expected
        model.zero_grad()
        check_step(pm, model, F.mse_loss, (x,), (y,), bound=1e-12)


class Experts(nn.Module):
    """A mixture of dense experts, whose columns are what goes through it in iterations where the rows are too few."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.gate, self.head = nn.Embedding(12, 6), nn.Linear(6, 3), nn.Linear(6, 5)
        self.weight = nn.Parameter(torch.randn(3, 6, 6) / 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.embed(x)
        y = torch.einsum("btd,edf,bte->btf", y, self.weight, self.gate(y).softmax(-1))
        out: torch.Tensor = self.head(y)
        return out


@pytest.mark.filterwarnings(
    "ignore::shardfx.ShardfxWarning"
)  # eight rows are too few for three iterations by three ranks
@pytest.mark.slow
@pytest.mark.parametrize("reduce", ["last", "each"])
def test_a_parameter_of_which_a_iteration_reads_a_part_is_stored_in_all_of_them(reduce: str) -> None:
    """It was stored sharded over iterations, and the optimizer's step of it could not be placed: KeyError 'mb'."""
    torch.manual_seed(0)
    model = Experts().double()
    x, y = torch.randint(12, (8, 8)), torch.randint(5, (8, 8))

    def loss(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(out.flatten(0, 1), y.flatten())

    specs = {"args.0": "a, -", "gate.weight": "a, -", "head.weight": "-, a", "head.bias": "a"}
    hints = sx.Hints(
        args=(x,), loss=loss, targets=(y,), specs=specs, grad_accumulation=3, reduce=reduce,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    )  # fmt: skip
    pm = sx.parallelize(copy.deepcopy(model), sx.Mesh(a=3), hints, virtual=True)
    sharding = [given.name for given in pm.planned.inputs if given.name == "weight" and "mb" in given.value.spec.axes]
    assert not sharding
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        optimizer.zero_grad()
        alone = loss(model(x), y)
        alone.backward()
        optimizer.step()
        assert abs(pm.step(x, y).item() - alone.item()) < 1e-12
    state = pm.full_state_dict()
    assert all((state[name] - p).abs().max() < 1e-12 for name, p in model.state_dict().items())
    assert pm.verify()


@pytest.mark.long
def test_sums_that_are_fused_may_be_as_long_as_a_iterations_rows() -> None:
    """The check of a program took the lengths of iterations that are not alike for numbers: TypeError of torch.Size."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2)).double()
    x = torch.randn(5, 4, dtype=torch.float64)
    specs = {"0.weight": "a, -", "1.weight": "a", "2.weight": "-, a"}
    hints = sx.Hints(args=(x,), loss=lambda out: out.pow(2).mean(), specs=specs, grad_accumulation=2)
    pm = sx.parallelize(copy.deepcopy(model), sx.Mesh(a=2), hints, virtual=True)
    check_step(pm, model, lambda out: out.pow(2).mean(), (x,), bound=1e-12, proven=False)
    assert any(node.target is pack.unflatten for node in pm._programs.running(0, TRAIN).graph.nodes)
