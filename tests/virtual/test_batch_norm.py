"""Batch norms: with statistics of the global batch, and of each rank's part (``Hints(batch_stats="local")``)."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import shardfx as sx
from tests.reference import check_step

from .test_calls import near


class Net(nn.Module):
    """Norms of pictures and of rows, one without parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.first = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.second, self.head = nn.BatchNorm1d(8, affine=False, momentum=0.3), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(F.relu(self.first(self.conv(x))).mean((2, 3))))


def data(rows: int = 8) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(rows, 3, 6, 6).double(), torch.randint(0, 5, (rows,))


def made(mesh: sx.Mesh, specs: dict[str, str], stats: str | None = "local") -> tuple[Net, sx.ParallelModule]:
    torch.manual_seed(0)
    model = Net().double()
    x, y = data()
    hints = sx.Hints(args=(x,), loss=F.cross_entropy, targets=(y,), specs=specs, batch_stats=stats)
    return copy.deepcopy(model), sx.parallelize(model, mesh, hints)


def as_data_parallel(model: Net, parts: int, x: Tensor, y: Tensor) -> Tensor:
    """A replica for each part; gradients and running statistics are the means of theirs."""
    replicas = [copy.deepcopy(model) for _ in range(parts)]
    rows = zip(replicas, x.chunk(parts), y.chunk(parts), strict=True)
    losses = [F.cross_entropy(each(its_x), its_y) for each, its_x, its_y in rows]
    torch.stack(losses).mean().backward()
    for own, *theirs in zip(model.parameters(), *(each.parameters() for each in replicas), strict=True):
        own.grad = sum(p.grad for p in theirs)  # of the mean's share each
    for own, *theirs in zip(model.buffers(), *(each.buffers() for each in replicas), strict=True):
        own.copy_(torch.stack(theirs).double().mean(0))
    return torch.stack(losses).mean()


DP = {"args.0": "dp, -, -, -"}


@pytest.mark.long
def test_local_statistics_train_as_data_parallelism() -> None:
    model, pm = made(sx.Mesh(dp=2, tp=2), {**DP, "conv.weight": "tp, -, -, -"})
    x, y = data()
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, pm)]
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        expected = as_data_parallel(model, 2, x, y)
        loss = pm(x, y)
        loss.backward()
        assert near(loss, expected)
        for optimizer in optimizers:
            optimizer.step()
    state = pm.full_state_dict()
    assert all(near(state[name].double(), each.double()) for name, each in model.state_dict().items())
    with torch.no_grad():
        assert near(pm.eval()(x, y), F.cross_entropy(model.eval()(x), y))  # by the running ones
    verdict = pm.verify()
    assert verdict and "with batch norms of each rank's part of the batch" in str(verdict)


@pytest.mark.long
def test_local_statistics_send_running_ones_alone() -> None:
    """In one bucket, and not where the norms stand."""
    _, pm = made(sx.Mesh(dp=2), DP)
    sent = [n for n in pm.planned.nodes if str(n.op).startswith("comm.") and n.phase.value == "forward"]
    assert [[value.shape for value in node.outs] for node in sent] == [[(8,)] * 4 + [()], [()]]  # and the loss
    assert "batch norms normalise each of 2 parts of the batch apart" in pm.planned.notes


@pytest.mark.long
def test_local_statistics_of_unequal_parts_are_refused() -> None:
    _, pm = made(sx.Mesh(dp=2), DP)
    with pytest.raises(sx.Error, match=r"wants equal parts(.|\n)*drop_last=True"):
        pm(*data(7))
    flat = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    hints = sx.Hints(args=(torch.randn(2, 3),), specs={"args.0": "dp, -"}, loss=torch.sum, batch_stats="local")
    with pytest.raises(sx.Error, match=r"has one value per channel(.|\n)*more than 2 rows"):
        sx.parallelize(flat, sx.Mesh(dp=2), hints)
    with pytest.raises(sx.Error, match=r"'local' \| 'microbatch'"):
        sx.Hints(batch_stats="rank")


@pytest.mark.long
def test_sync_batch_norm_needs_no_process_group() -> None:
    """In a process group they would, and on CPUs refuse to."""
    model = nn.SyncBatchNorm.convert_sync_batchnorm(Net().double())
    alone, (x, y) = copy.deepcopy(model), data()
    hints = sx.Hints(args=(x,), loss=F.cross_entropy, targets=(y,), specs=DP)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        pm = sx.parallelize(model, sx.Mesh(dp=2), hints, virtual=True)
        loss = pm(x, y)
    finally:
        dist.destroy_process_group()
    expected = F.cross_entropy(alone(x), y)
    loss.backward(), expected.backward()
    grads = pm.full_grads()
    assert near(loss, expected) and isinstance(pm.first, nn.SyncBatchNorm)
    assert all(near(grads[name], p.grad) for name, p in alone.named_parameters() if p.grad is not None)


# ---- of the whole batch ------------------------------------------------------------------------------------


WHOLE: dict[str, Any] = {
    "beside channels": (sx.Mesh(dp=2, tp=2), {**DP, "conv.weight": "tp, -, -, -"}, 1),
    "uneven shards": (sx.Mesh(dp=3), DP, 1),
    "rows of pictures": (sx.Mesh(dp=2, sp=2), {"args.0": "dp, -, sp, -"}, None),
}


@pytest.mark.long
@pytest.mark.parametrize("name", WHOLE)
def test_global_statistics_are_one_collective_each_way(name: str) -> None:
    mesh, specs, each = WHOLE[name]
    model, pm = made(mesh, specs, None)
    x, y = data()
    check_step(pm, model, F.cross_entropy, (x,), (y,))
    if each is not None:
        sent = [n for n in pm.planned.nodes if str(n.op).startswith("comm.") and n.where.module in ("first", "second")]
        assert sum(n.phase.value == "forward" and n.kwargs["axes"] != ["tp"] for n in sent) == 2 * each
        assert len([n for n in sent if n.phase.value == "backward"]) <= 2


def test_moments_of_shards_do_not_cancel() -> None:
    """Numbers far from zero: squares of what is not centred would leave nothing of the variance in float32."""
    torch.manual_seed(0)
    x = 1000 + torch.randn(8, 3, 4, 4)
    model = nn.BatchNorm2d(3)
    hints = sx.Hints(args=(x,), loss=lambda out: (out * out.sin()).sum(), specs=DP)
    pm = sx.parallelize(model, sx.Mesh(dp=4), hints, virtual=True)
    whole = x.double().var((0, 2, 3), unbiased=True)
    pm(x).backward()
    torch.testing.assert_close(pm.full_state_dict()["running_var"].double(), 0.9 + 0.1 * whole, rtol=1e-5, atol=0)


@pytest.mark.long
def test_norms_in_bf16_have_statistics_in_float32() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 6, 1), nn.BatchNorm2d(6)).bfloat16()
    x = torch.randn(8, 3, 4, 4, dtype=torch.bfloat16)
    hints = sx.Hints((x,), loss=lambda out: out.square().sum(), specs=DP)
    pm = sx.parallelize(copy.deepcopy(model), sx.Mesh(dp=2), hints, virtual=True)
    pm(x).backward()
    verdict = pm.verify()
    assert verdict, verdict
    joined = [v.type.dtype for n in pm.planned.nodes if "joined_moments" in str(n.op) for v in n.outs]
    assert joined == [torch.float32, torch.float32]
    assert {name: each.dtype for name, each in pm.named_buffers()} == {
        name: each.dtype for name, each in model.named_buffers()
    }


@pytest.mark.long
def test_cumulative_running_statistics_match_one_device() -> None:
    """``momentum=None``: by the number of batches, which is data."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4, momentum=None)).double()
    alone, x = copy.deepcopy(model), torch.randn(8, 8, dtype=torch.float64)
    pm = sx.parallelize(model, sx.Mesh(dp=2), sx.Hints(args=(x,), loss=torch.var, specs={"args.0": "dp, -"}))
    for given in (x, x.sin(), x[:6]):
        assert torch.allclose(pm(given), alone(given).var(), rtol=0, atol=1e-12)
    state = pm.full_state_dict()
    assert all(torch.allclose(state[n], t, rtol=0, atol=1e-12) for n, t in alone.state_dict().items())
