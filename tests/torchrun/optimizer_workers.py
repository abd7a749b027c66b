"""Ranks whose own optimizers step shards (see :mod:`.workers`)."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim

import shardfx as sx
from tests.reference import rel_err
from tests.stepped import Lamb
from tests.virtual.test_tables import shop, sparse_steps

from .workers import WORKERS, gated, same_state, whole_of, worker

__all__ = ["WORKERS"]

Make = Callable[[Any], optim.Optimizer]
LOCAL: dict[str, Make] = {
    "AdamW": lambda params: optim.AdamW(params, lr=1e-2, amsgrad=True),
    "fused": lambda params: optim.Adam(params, lr=1e-2, fused=True),
    "SGD": lambda params: optim.SGD(params, lr=1e-2, momentum=0.9, nesterov=True),
    "Rprop": lambda params: optim.Rprop(params, lr=1e-2),
}
"""Torch's own, which step elements."""


def steps(module: nn.Module, loss_of: Callable[[], Tensor], optimizer: optim.Optimizer, count: int = 3) -> None:
    """Some steps by a schedule."""
    schedule = optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=8, cycle_momentum=False)
    for _ in range(count):
        optimizer.zero_grad()
        loss_of().backward()
        optimizer.step()
        schedule.step()


FREE = ("out.bias", "norm.running_mean")
"""What a norm takes away again: its gradient is rounding."""


def same(pm: sx.ParallelModule, model: nn.Module) -> None:
    """They have the same parameters and buffers."""
    mine, theirs = pm.full_state_dict(), model.state_dict()
    same_state(*({n: t for n, t in each.items() if n not in FREE} for each in (mine, theirs)), 1e-9)


@worker
def torchs_optimizers_step_shards(name: str) -> None:
    """As one device does; states are shown as their parameters are."""
    for kind, make in LOCAL.items():
        model, pm, x, y = gated(name)
        mine, theirs = make(pm.parameters()), make(model.parameters())
        steps(pm, lambda pm=pm, x=x, y=y: pm(x, y), mine)
        steps(model, lambda model=model, x=x, y=y: F.mse_loss(model(x), y), theirs)
        same(pm, model)
        for (path, p), q in zip(pm.named_parameters(), model.parameters(), strict=True):
            if path in FREE:
                continue
            for key, whole in theirs.state[q].items():
                held = mine.state[p][key]
                if isinstance(whole, Tensor) and whole.dim():
                    assert (held.placements, held.shape) == (p.placements, p.shape), (kind, path, key)
                    assert rel_err(pm._state.store.full(path, held), whole) < 1e-9, (kind, path, key)
                else:
                    assert held == whole, (kind, path, key)
        saved = pm.full_optimizer_state_dict(mine)
        pm.load_full_optimizer_state_dict(mine, saved)
        steps(pm, lambda pm=pm, x=x, y=y: pm(x, y), mine, 1)


@worker
def other_optimizers_step_what_is_shown(name: str) -> None:
    """One that looks at full tensors does so."""
    model, pm, x, y = gated(name)
    steps(pm, lambda: pm(x, y), Lamb(pm.parameters()))
    steps(model, lambda: F.mse_loss(model(x), y), Lamb(model.parameters()))
    same(pm, model)


@worker
def steps_among_others(name: str) -> None:
    """Beside parameters that are not the module's; with a penalty outside of it."""
    model, pm, x, y = gated(name)
    heads = [nn.Parameter(torch.ones(3, dtype=torch.float64)) for _ in range(2)]

    def penalised(module: nn.Module, head: Tensor, loss: Tensor) -> Tensor:
        weight: Tensor = dict(module.named_parameters())["out.weight"]
        return loss + whole_of((weight * weight).sum()) * 0.1 + (head * head).sum() * loss

    mine = optim.AdamW([*pm.parameters(), heads[0]], lr=1e-2, foreach=True)
    theirs = optim.AdamW([*model.parameters(), heads[1]], lr=1e-2, foreach=True)
    steps(pm, lambda: penalised(pm, heads[0], pm(x, y)), mine)
    steps(model, lambda: penalised(model, heads[1], F.mse_loss(model(x), y)), theirs)
    same(pm, model)
    assert rel_err(*heads) < 1e-12


@worker
def sparse_adam_steps_rows_of_shards() -> None:
    """Of tables by rows, and by columns; their gradients are dense."""
    for table in ("dp, -", "-, dp"):
        sparse_steps(*shop(sx.Mesh(dp=4), "dp", table, virtual=None, sparse=True))


@worker
def modules_and_state_dicts_are_copied(name: str) -> None:
    """Before a backward and with gradients: an average, a copy, the best state so far. (Torch copies no DTensor whose
    shard lies behind others.)"""
    model, pm, x, y = gated(name)
    for _ in range(2):
        averages = [optim.swa_utils.AveragedModel(each, use_buffers=True) for each in (pm, model)]
        best, copied = deepcopy(pm.state_dict()), deepcopy(pm)
        mine, theirs = optim.SGD(pm.parameters(), lr=0.1), optim.SGD(model.parameters(), lr=0.1)
        before = pm.full_state_dict()
        mine.zero_grad(), theirs.zero_grad()
        pm(x, y).backward(), F.mse_loss(model(x), y).backward()
        mine.step(), theirs.step()
        for average, each in zip(averages, (pm, model), strict=True):
            average.update_parameters(each)
        same_state(averages[0].module.full_state_dict(), averages[1].module.state_dict(), 1e-9)
        same_state(copied.full_state_dict(), before, 0.0)
        trained = pm.full_state_dict()
        pm.load_state_dict(best)
        same_state(pm.full_state_dict(), before, 0.0)
        pm.load_full_state_dict(trained)
