"""Ranks that plan, or do between calls, what the others do not (see :mod:`.workers`)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import shardfx as sx
import shardfx.api
from shardfx.compile import compile_model
from tests.reference import rel_err

from .call_workers import BATCH, error, planned
from .workers import WORKERS, worker

__all__ = ["WORKERS"]

APART = "the ranks' parameters are no longer the same"
SHARDING = {**BATCH, "0.weight": "dp, -", "0.bias": "dp", "3.weight": "dp, -", "3.bias": "dp"}
"""No other rank holds the same."""


class Scaled(nn.Module):
    """A model with a number in its code; it cannot be captured with 3."""

    def __init__(self, factor: float = 1.0, activation: type[nn.Module] = nn.ReLU) -> None:
        super().__init__()
        self.inner, self.factor = nn.Sequential(nn.Linear(6, 4), activation()), factor

    def forward(self, x: Tensor) -> Tensor:
        if self.factor == 3:
            raise ValueError("no such factor")
        return self.inner(x) * torch.tensor([self.factor, 1.0, 1.0, 1.0])


@contextmanager
def planning_anew() -> Iterator[None]:
    """Without the plans that ranks inherit, which are known by types and shapes."""
    remembering = shardfx.api.compile_model
    shardfx.api.compile_model = compile_model
    try:
        yield
    finally:
        shardfx.api.compile_model = remembering


def plan(model: nn.Module, mesh: sx.Mesh | None = None, loss: Any = F.mse_loss, **hints: Any) -> sx.ParallelModule:
    given = sx.Hints((torch.zeros(8, 6),), loss=loss, targets=(torch.zeros(8, 4),), specs=BATCH, **hints)
    return sx.parallelize(model, mesh or sx.Mesh(dp=2), given)


@worker
def ranks_that_plan_otherwise_are_told_where() -> None:
    """The first thing that is another one, on all ranks; and they go on."""
    rank, size = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
    zero = {"zero": 3, "zero_min_numel": 0} if rank else {}
    other: list[tuple[Callable[[], object], str, str]] = [
        (lambda: plan(Scaled(activation=nn.Tanh if rank else nn.ReLU)), "aten.relu(", "aten.tanh("),
        (lambda: plan(Scaled(1.0 + rank)), "= [1.0, 1.0,", "= [2.0, 1.0,"),
        (lambda: plan(nn.Linear(6, 4), **zero), "the plan (", "the plan ("),
        (
            lambda: plan(nn.Linear(6, 4), optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.1 * (1 + rank))),
            "momentum_buffer, 0.1)",
            "momentum_buffer, 0.2)",
        ),
    ]
    with planning_anew():
        for make, here, there in other:
            text = error(make)
            assert text.startswith("the ranks have made different plans"), text
            first, second = [line for line in text.splitlines() if "rank 0: " in line or "rank 1: " in line]
            assert here in first and there in second and first[9:] != second[9:], text
        text = error(lambda: plan(Scaled(3.0 if rank else 1.0)))
        assert ("a call failed on another rank" in text) == (rank == 0) and "no such factor" in text, text
        text = error(lambda: plan(Scaled(), sx.Mesh(dp=size, tp=1 + rank)))
        assert ("a call failed on another rank" in text) == (rank == 0) and "a mesh of 2 ranks" in text, text

        def reduced(out: Tensor, y: Tensor) -> Tensor:
            found = F.mse_loss(out, y)
            dist.all_reduce(found)
            return found / size

        text = error(lambda: plan(Scaled(), loss=reduced))
        assert "communicates by itself" in text and "agreement_workers.py" in text and "all_reduce" in text, text
        sharded = nn.Sequential(nn.Linear(6, 4))
        fully_shard(sharded, mesh=init_device_mesh("cpu", (size,)))
        assert "sharded already" in error(lambda: plan(sharded))
        pm = plan(Scaled())
    x, y = torch.randn(8, 6), torch.randn(8, 4)
    dist.broadcast(x, 0), dist.broadcast(y, 0)
    weights = pm.full_state_dict()
    whole = Scaled()
    whole.load_state_dict(weights)
    assert rel_err(pm(x, y), F.mse_loss(whole(x), y)) < 1e-6
    text = error((lambda: plan(Scaled())) if rank == 0 else (lambda: pm(x, y)))
    assert "the ranks do not make the same call" in text and "rank 0: runs: parallelize(...)" in text, text
    if rank == 0:
        deepcopy(pm)  # which is numbered apart
    again = plan(Scaled())
    assert rel_err(again(x, y), pm(x, y)) > 0


def lasts(pm: sx.ParallelModule, x: Tensor, y: Tensor, said: str, whole: dict[str, Tensor], loss: Tensor) -> None:
    """It is said at each call, until what is whole is loaded."""
    for _ in range(2):
        text = error(lambda: pm(x, y))
        assert text.startswith(APART) and said in text, text
    assert APART in error(pm.full_state_dict)
    pm.load_full_state_dict(whole)
    pm.zero_grad()
    assert rel_err(pm(x, y), loss) < 1e-12


@worker
def what_is_done_between_calls_is_compared() -> None:
    """A rate, a scale, gradients that stay, a step that one rank leaves out: also of shards that no other one holds."""
    rank = dist.get_rank()
    for specs in (BATCH, SHARDING):
        model, _, x, y = planned(True, dp=2)
        hints = sx.Hints((x,), loss=F.mse_loss, targets=(y,), specs=specs)
        pm = sx.parallelize(deepcopy(model), sx.Mesh(dp=2), hints)
        whole, loss = model.state_dict(), F.mse_loss(model(x), y)
        optimizer = torch.optim.AdamW(pm.parameters(), lr=0.01)
        for _ in range(2):
            pm(x, y).backward()
            optimizer.step()
            optimizer.zero_grad()
        pm.load_full_state_dict(whole)

        pm(x, y).backward()
        optimizer.param_groups[0]["lr"] = 0.01 * (1 + rank)
        optimizer.step()
        lasts(pm, x, y, "rank 1: done since the last call: a backward of 1.0 times the loss, ", whole, loss)
        optimizer.param_groups[0]["lr"] = 0.01

        (pm(x, y) * (1 + rank)).backward()
        lasts(pm, x, y, "a backward of 2.0 times the loss, with no gradients before", whole, loss)

        pm(x, y).backward()
        pm.zero_grad() if rank else None
        pm(x, y).backward()
        lasts(pm, x, y, "rank 0: done since the last call: a backward of 1.0 times the loss, added to", whole, loss)

        pm(x, y).backward()
        optimizer.step() if rank else None
        lasts(pm, x, y, "AdamW stepped with lr 0.01, betas (0.9, 0.999)", whole, loss)


@worker
def what_several_ranks_hold_is_compared() -> None:
    """Checkpoints that are not the same, and writes: noticed where they come to be used."""
    rank = dist.get_rank()
    model, pm, x, y = planned(dp=2)
    whole, loss = model.state_dict(), F.mse_loss(model(x), y)
    for _ in range(3):
        pm(x, y)
    held = deepcopy(pm.state_dict())
    pm.load_state_dict({name: tensor + rank for name, tensor in held.items()})
    lasts(pm, x, y, "done since the last call: 4 tensors of a state dict were loaded, with content ", whole, loss)
    pm.load_state_dict(held)
    assert rel_err(pm(x, y), loss) < 1e-12
    with torch.no_grad():
        for _ in range(1 + rank):
            next(pm.parameters()).mul_(1.0)
    lasts(pm, x, y, "rank 1: parameters were written into since the last call: 2 times", whole, loss)
    if rank == 0:
        pm.load_state_dict(held)
    assert "; done since the last call: 4 tensors of a state dict" in error(lambda: pm(x, y))
    if rank == 1:
        pm.load_state_dict(held)
    assert rel_err(pm(x, y), loss) < 1e-12


@worker
def a_step_that_one_stage_leaves_out_is_noticed() -> None:
    """Found infinite by its own gradients, say; ranks have other parameters each."""
    rows = {"args.0": "mb, -", "targets.0": "mb, -"}
    x, y = torch.linspace(-1, 1, 48).view(8, 6), torch.linspace(-1, 1, 32).view(8, 4)
    with planning_anew():
        model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
        hints = sx.Hints((x,), loss=F.mse_loss, targets=(y,), specs=rows, pipeline=sx.Pipeline())
        pm = sx.parallelize(model, sx.Mesh(pp=2, mb=sx.Loop(2)), hints)
    optimizer, whole = torch.optim.SGD(pm.parameters(), lr=0.1), pm.full_state_dict()
    for _ in range(3):
        pm(x, y).backward()
        optimizer.step()
    pm(x, y).backward()
    for stepping in (dist.get_rank() == 0, True):
        optimizer.step() if stepping else None
        assert APART in error(lambda: pm(x, y))
    pm.load_full_state_dict(whole)
    pm(x, y).backward()


@worker
def rates_that_one_rank_changes_are_noticed() -> None:
    """At the first step that differs."""
    with planning_anew():
        pm = plan(Scaled(), optimizer=lambda params: torch.optim.SGD(params, lr=0.1))
    x, y = torch.linspace(-1, 1, 48).view(8, 6), torch.linspace(-1, 1, 32).view(8, 4)
    for _ in range(6):
        pm.step(x, y)
    if dist.get_rank() == 0:
        pm.optimizer.param_groups[0]["lr"] = 0.05
    for _ in range(2):
        text = error(lambda: pm.step(x, y))
        assert "the ranks do not make the same call" in text and "rank 0: optimizer.0.lr: 0.05" in text, text
    pm.optimizer.param_groups[0]["lr"] = 0.05
    pm.step(x, y)


NOTES = {"saved": 0}


class Noted(nn.Module):
    """Reads a note, which leads to another program at 3."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.dropout = nn.Linear(6, 4), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc(self.dropout(x))
        return out * 2 if NOTES["saved"] == 3 else out


@worker
def what_one_ranks_code_reads_may_be_its_own() -> None:
    """As what ``save_pretrained`` writes on rank 0, if it leads to the same plan; at first calls, and at later ones,
    for which ranks do not wait; and with random numbers."""
    x, y = torch.linspace(-1, 1, 48).view(8, 6), torch.linspace(-1, 1, 32).view(8, 4)
    rank = dist.get_rank()
    NOTES["saved"] = 0
    with planning_anew():
        model = Noted()
        pm = plan(model, max_specializations=40)
    model.load_state_dict(pm.full_state_dict())
    pm.dropout.eval()
    model.dropout.eval()
    for number, which in enumerate((0, 1)):
        for call in range(5):
            model.zero_grad(), pm.zero_grad()
            ours, theirs = pm(x, y), F.mse_loss(model(x), y)
            ours.backward(), theirs.backward()
            assert rel_err(ours, theirs) < 1e-6
            for name, grad in pm.full_grads().items():
                assert rel_err(grad, model.get_parameter(name).grad) < 1e-6
            if call in (1, 3) and rank == which:
                NOTES["saved"] = 10 * number + call + 4
    pm.dropout.train()
    pm(x, y)
    NOTES["saved"] += 100 * rank
    losses: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(losses, pm(x, y).item())
    assert len({*losses}) == 1
    NOTES["saved"] = 3 if rank else NOTES["saved"]
    with planning_anew():
        for _ in range(2):
            text = error(lambda: pm(x, y))
            assert text.startswith("the ranks have made different plans"), text
