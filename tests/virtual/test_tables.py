"""Embedding tables that are sharded over the batch's own axis, compared with one device; bytes; errors."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim

import shardfx as sx
from tests.reference import check_step

DLRM = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "dlrm.py"))
ROWS, BATCH = (300, 161, 97), 24
SPECS = {"args.*": "dp, -", "targets.0": "dp"}
BY_ROWS, BY_COLUMNS = {"tables.*.weight": "dp, -"}, {"tables.*.weight": "-, dp"}
LOSS = F.binary_cross_entropy_with_logits
Tensors = tuple[Tensor, Tensor, Tensor]


def batch(seed: int = 0, rows: tuple[int, ...] = ROWS, size: int = BATCH) -> Tensors:
    dense, ids, labels = DLRM["batch"](rows, size, seed)
    return dense.double(), ids, labels.double()


def plan(ranks: int, tables: dict[str, str], **options: Any) -> tuple[sx.ParallelModule, nn.Module]:
    """A plan of the example's model, and the model alone."""
    torch.manual_seed(0)
    model = DLRM["DLRM"](ROWS, 8).double()
    dense, ids, labels = batch()
    hints = sx.Hints(args=(dense, ids), loss=LOSS, targets=(labels,), specs=SPECS | tables, **options)
    alone = deepcopy(model)
    return sx.parallelize(model, sx.Mesh(dp=ranks), hints, virtual=True), alone


def travels(pm: sx.ParallelModule) -> list[tuple[int, ...]]:
    """The shapes of what is sent and is as large as the smallest table."""
    sent = [value for node in pm.planned.nodes if str(node.op).startswith("comm.") for value in node.operands]
    return [value.shape for value in sent if value.type.numel >= min(ROWS) * 8]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("tables", [BY_ROWS, BY_COLUMNS], ids=["rows", "columns"])
def test_tables_over_the_batch_axis_match_single_device(ranks: int, tables: dict[str, str]) -> None:
    pm, alone = plan(ranks, tables)
    dense, ids, labels = batch(1)
    check_step(pm, alone, LOSS, (dense, ids), (labels,), bound=1e-12)
    assert travels(pm) == []


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "SGD": lambda params: optim.SGD(params, lr=0.1),
    "Adagrad": lambda params: optim.Adagrad(params, lr=0.1),
    "Adam": lambda params: optim.Adam(params, lr=0.01),
}


@pytest.mark.parametrize("inside", [True, False], ids=["step", "own optimizer"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_tables_train_as_on_one_device(name: str, inside: bool) -> None:
    make = OPTIMIZERS[name]
    tables = {"tables.0.weight": "dp, -", "tables.1.weight": "-, dp"}
    pm, alone = plan(4, tables, **({"optimizer": make} if inside else {}))
    theirs, ours = make(alone.parameters()), None if inside else make(pm.parameters())
    for seed in range(3):
        dense, ids, labels = batch(seed)
        theirs.zero_grad()
        wanted = LOSS(alone(dense, ids), labels)
        wanted.backward()
        theirs.step()
        if ours is None:
            got = pm.step(dense, ids, labels)
        else:
            ours.zero_grad()
            got = pm(dense, ids, labels)
            got.backward()
            ours.step()
        torch.testing.assert_close(got.detach(), wanted.detach(), rtol=1e-12, atol=1e-12)
    state = pm.full_state_dict()
    for key, value in alone.state_dict().items():
        torch.testing.assert_close(state[key], value, rtol=1e-12, atol=1e-12)
    assert pm.verify()
