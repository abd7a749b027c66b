"""What the ranks do, when :mod:`tests.torchrun.fork` has started them."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import shardfx as sx
import shardfx.api
from shardfx.ir.dim_sharding import DimSharding, Part
from shardfx.ir.ops.table import OwnOp
from shardfx.ir.shards import local_shard
from shardfx.ir.spec import Spec
from tests.plans import MESHES, plan, train_beside
from tests.reference import rel_err
from tests.zoo import make

WORKERS: dict[str, Callable[..., None]] = {}
CALLED = {
    "all_reduce": "all_reduce",
    "all_gather": "all_gather_into_tensor",
    "reduce_scatter": "reduce_scatter_tensor",
    "all_to_all": "all_to_all_single",
}


def worker(function: Callable[..., None]) -> Callable[..., None]:
    WORKERS[function.__name__] = function
    return function


def whole_of(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


# ---- models of the zoo


@worker
def trains_like_one_device(name: str, mesh: str) -> None:
    """Loss, gradients, buffers, and parameters after three steps of AdamW."""
    difference = train_beside(name, MESHES[mesh])
    assert dist.get_world_size() == MESHES[mesh].size
    assert difference.worst < 1e-9, difference


class Counted(TorchDispatchMode):
    """Counts the functional collectives of this rank, by name and group."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: Counter[tuple[str, str]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        namespace, _, name = func._schema.name.partition("::")
        if namespace == "_c10d_functional" and name != "wait_tensor":
            self.calls[name.removesuffix("_out").removesuffix("_").removesuffix("_coalesced"), str(args[-1])] += 1
        return func(*args, **(kwargs or {}))


@worker
def counts_equal_the_graph(name: str, mesh: str) -> None:
    """What runs is what the graph says, and nothing else; gradients are DTensors placed as their parameters, or both
    are plain tensors where no parameter is sharded."""
    case = make(name)
    pm = plan(case, MESHES[mesh])
    with Counted() as counted:
        loss = pm(*case.args, *case.targets, **case.kwargs)
    expected: Counter[tuple[str, str]] = Counter()
    for node in pm.planned.nodes:
        if isinstance(node.op, OwnOp) and not node.op.sends_nothing:
            op = CALLED[node.op.kind]
            expected[op, pm.mesh.group_name(dist.get_rank(), node.kwargs["axes"])] += 1
    assert counted.calls == expected
    loss.backward()
    inputs = {given.name: given.value for given in pm.planned.inputs}
    sharding = any(
        value.spec is not None and value.spec.axes for n, _ in pm.named_parameters() for value in [inputs[n]]
    )
    for name, parameter in pm.named_parameters():
        assert isinstance(parameter.data, DTensor) == isinstance(parameter.grad, DTensor) == sharding, name
        assert getattr(parameter.grad, "placements", ()) == getattr(parameter, "placements", ()), name
        assert parameter.grad is not None and parameter.grad.shape == parameter.shape, name
    whole = pm.full_state_dict()
    for name, parameter in pm.named_parameters():
        assert torch.equal(whole_of(parameter), whole[name]), name
    total = torch.stack([grad.norm() for grad in pm.full_grads().values()]).norm()
    norm = torch.nn.utils.clip_grad_norm_(pm.parameters(), 0.5)
    assert rel_err(norm, total) < 1e-12
    clipped = torch.stack([grad.norm() for grad in pm.full_grads().values()]).norm()
    assert rel_err(clipped, total * min(1.0, 0.5 / (float(total) + 1e-6))) < 1e-12  # as torch writes it


# ---- placements: uneven, in another order than the mesh's, compound


class Gated(nn.Module):
    """A fused projection in heads (so that its sharding is a compound one), batch norm, sizes that 2 and 4 do not
    divide."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(12, 24)
        self.out = nn.Linear(8, 105)
        self.norm = nn.BatchNorm1d(105)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.view(-1, 4, 2) for part in self.qkv(x).split(8, -1))
        return self.norm(self.out(F.relu(q.softmax(-1) * k + v).flatten(1)))


BATCH = {"args.0": "dp, -", "targets.0": "dp, -"}
ODD = Spec((DimSharding(("tp", "dp"), (Part(3), Part(7, ("tp",)), Part(5, ("dp",)))), DimSharding()))
PLANS = {
    "megatron": (sx.Mesh(dp=2, tp=2), {**BATCH, "qkv.weight": "tp, -", "out.weight": "-, tp"}),
    "crossed": (sx.Mesh(dp=2, tp=2), {**BATCH, "qkv.weight": "tp dp, -", "out.weight": ODD, "norm.weight": "tp"}),
    "tp": (sx.Mesh(tp=4), {"qkv.weight": "tp, -", "out.weight": "-, tp", "norm.weight": "tp"}),
    "dp": (sx.Mesh(dp=4), {**BATCH, "qkv.weight": "-, dp", "out.weight": "dp, -"}),
    "unsharded": (sx.Mesh(dp=4), BATCH),
}


def gated(name: str, seed: int = 0) -> tuple[nn.Module, sx.ParallelModule, Tensor, Tensor]:
    torch.manual_seed(seed)
    model, x, y = Gated().double(), torch.randn(8, 12).double(), torch.randn(8, 105).double()
    mesh, specs = PLANS[name]
    return model, sx.parallelize(model, mesh, sx.Hints((x,), loss=F.mse_loss, targets=(y,), specs=specs)), x, y


def train(module: nn.Module, loss_of: Callable[[], Tensor], optimizer: torch.optim.Optimizer) -> float:
    for _ in range(3):
        optimizer.zero_grad()
        loss = loss_of()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 0.1)
        optimizer.step()
    return loss.item()


def same_state(a: dict[str, Tensor], b: dict[str, Tensor], tolerance: float) -> None:
    assert set(a) == set(b)
    worst = {name: rel_err(a[name], b[name]) for name in a}
    assert max(worst.values()) <= tolerance, worst


@worker
def checkpoints_move_between_plans(folder: str) -> None:
    """Train on one plan, save with DCP, load into the next: parameters, buffers and AdamW's state are the same."""
    names = list(PLANS)
    for i, source in enumerate(names):
        model, pm, x, y = gated(source)
        mine, theirs = torch.optim.AdamW(pm.parameters(), lr=1e-2), torch.optim.AdamW(model.parameters(), lr=1e-2)
        loss = train(pm, lambda pm=pm, x=x, y=y: pm(x, y), mine)
        assert rel_err(loss, train(model, lambda model=model, x=x, y=y: F.mse_loss(model(x), y), theirs)) < 1e-12
        state = pm.full_state_dict()
        same_state(state, model.state_dict(), 1e-6)
        assert list(pm.state_dict()) == list(model.state_dict())
        for name, parameter in pm.named_parameters():
            if not pm._state.store._shards[name].guarded:
                assert torch.equal(whole_of(parameter), state[name]), name
        held, moments = get_state_dict(pm, mine)
        dcp.save({"model": held, "optimizer": moments}, checkpoint_id=f"{folder}/{source}")
        _, other, _, _ = gated(names[(i + 1) % len(names)], seed=1)
        optimizer = torch.optim.AdamW(other.parameters(), lr=1e-2)
        held, moments = get_state_dict(other, optimizer)
        dcp.load({"model": held, "optimizer": moments}, checkpoint_id=f"{folder}/{source}")
        set_state_dict(other, optimizer, model_state_dict=held, optim_state_dict=moments)
        same_state(other.full_state_dict(), state, 0.0)
        for (name, a), b in zip(pm.named_parameters(), other.parameters(), strict=True):
            old, new = mine.state[a]["exp_avg_sq"], optimizer.state[b]["exp_avg_sq"]
            assert torch.equal(pm._state.store.full(name, old), other._state.store.full(name, new)), name


@worker
def what_dtensor_cannot_say_is_an_error() -> None:
    _, pm, x, y = gated("crossed")
    pm(x, y).backward()
    with pytest.raises(sx.Error, match="DTensor cannot describe"):
        pm.out.weight.full_tensor()


# ---- calling


@worker
def takes_global_or_local_batches() -> None:
    model, pm, x, y = gated("megatron")
    model.eval()
    rows = slice(0, 4) if dist.get_rank() < 2 else slice(4, 8)
    loss = pm(x, y)
    assert pm(x[rows], y[rows]).item() == loss.item()
    same: list[float | None] = [None] * 4
    dist.all_gather_object(same, loss.item())
    assert len(set(same)) == 1
    mesh, specs = PLANS["megatron"]
    inference = sx.parallelize(
        model, mesh, sx.Hints((x,), specs={k: v for k, v in specs.items() if "targets" not in k})
    )
    with torch.no_grad():
        whole = model(x)
        assert rel_err(inference(x), whole) < 1e-12
        spec = inference.planned.outputs[0].value.spec
        assert rel_err(inference(x[rows]), local_shard(whole, spec, mesh, dist.get_rank())) < 1e-12


@worker
def accumulates_and_scales_gradients() -> None:
    """Two backwards add up; a scaled loss scales; what a caller keeps stays as it is."""
    _, pm, x, y = gated("megatron")
    pm(x, y).backward()
    once = pm.full_grads()
    kept = [p.grad for p in pm.parameters()]
    copies = [g.full_tensor().clone() for g in kept]
    (pm(x, y) * 3.0).backward()
    same_state(pm.full_grads(), {name: grad * 4 for name, grad in once.items()}, 1e-12)
    pm.zero_grad(set_to_none=True)
    pm(x, y).backward()
    same_state(pm.full_grads(), once, 1e-12)
    kept_now = [p.grad for p in pm.parameters()]
    pm.zero_grad(set_to_none=True)
    pm(2 * x, y).backward()
    for grad, before in zip(kept_now, copies, strict=True):
        assert rel_err(grad.full_tensor(), before) < 1e-12
    pm.zero_grad(set_to_none=False)
    pm(x, y).backward()
    same_state(pm.full_grads(), once, 1e-12)


@worker
def dropout_is_drawn_by_rank_0(name: str, mesh: str) -> None:
    """The generators differ, the step does not: replicas agree, and a seed reproduces."""
    case = make(name)
    pm = plan(case, MESHES[mesh])

    def step(seed: int) -> float:
        torch.manual_seed(seed + 100 * dist.get_rank())
        return float(pm(*case.args, *case.targets))

    first, second, again = step(0), step(1), step(0)
    assert first == again != second
    losses: list[float | None] = [None] * 4
    dist.all_gather_object(losses, first)
    assert len(set(losses)) == 1


# ---- starting


@worker
def weights_come_from_rank_0_or_later() -> None:
    """Models that start differently start as rank 0's; a meta model gets its weights by load_full_state_dict."""
    torch.manual_seed(int(os.environ["RANK"]))
    x, y = torch.ones(8, 12).double(), torch.ones(8, 105).double()
    model = Gated().double()
    mesh, specs = PLANS["megatron"]
    hints = sx.Hints((x,), loss=F.mse_loss, targets=(y,), specs=specs)
    pm = sx.parallelize(model, mesh, hints)
    state = pm.full_state_dict()
    if dist.get_rank() == 0:
        same_state(state, model.state_dict(), 0.0)
    with torch.device("meta"):
        empty = Gated().double()
    later = sx.parallelize(empty, mesh, hints)
    with pytest.raises(sx.Error, match="lacks weights"):
        later(x, y)
    with pytest.raises(sx.Error, match=r"missing: out\.bias"):
        later.load_full_state_dict({k: v for k, v in state.items() if k != "out.bias"})
    later.load_full_state_dict(state)
    assert later(x, y).item() == pm(x, y).item()


@worker
def mistakes_are_errors() -> None:
    case = make("mlp3")
    plan(case, MESHES["dp2"])
    with pytest.raises(sx.Error, match="another number of ranks"):
        plan(case, MESHES["dp2tp2"])
    hints = sx.Hints(case.args, loss=case.loss, targets=case.targets)
    virtual = sx.parallelize(case.model, MESHES["dp2tp2"], hints, virtual=True)
    assert rel_err(virtual(*case.args, *case.targets), case.loss(case.model(*case.args), *case.targets)) < 1e-12
    with pytest.raises(sx.Error, match="different plans"):
        plan(case, MESHES["dp2"], specs={"fc1.weight": "dp, -"} if dist.get_rank() else {})
