"""``accelerate`` on parallel modules, beside what it does on one device. (Loops are in test_examples.)"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader

import shardfx as sx
from shardfx.integrations.accelerate import ParallelAccelerator

from .test_calls import SPECS, batch, mlp, near, parallel

X, Y = batch()
HINTS = sx.Hints(args=(X,), loss=F.cross_entropy, targets=(Y,), specs={**SPECS, "0.weight": "tp, -"})
MESH = sx.Mesh(dp=2, tp=2)


@pytest.fixture(autouse=True)
def one_process() -> Iterator[None]:
    AcceleratorState._reset_state(True)
    yield
    AcceleratorState._reset_state(True)


def test_mixed_precision_of_accelerate_is_autocast() -> None:
    model = mlp().float()
    hints = sx.Hints(args=(X.float(),), loss=F.cross_entropy, targets=(Y,), specs=SPECS)
    accelerator = ParallelAccelerator(mesh=sx.Mesh(dp=2), hints=hints, cpu=True, mixed_precision="bf16")
    pm = accelerator.prepare(copy.deepcopy(model))
    accelerator.backward(loss := pm(X.float(), Y))
    AcceleratorState._reset_state(True)
    alone = Accelerator(cpu=True, mixed_precision="bf16").prepare(model)
    expected = F.cross_entropy(alone(X.float()), Y)
    expected.backward()
    assert near(loss, expected) and not near(loss, F.cross_entropy(mlp().float()(X.float()), Y))
    grads = pm.full_grads()
    assert all(torch.allclose(grads[n], p.grad, atol=1e-2) for n, p in model.named_parameters() if p.grad is not None)


@pytest.mark.long
def test_saved_state_and_model_are_full_tensors(tmp_path: Path) -> None:
    accelerator = ParallelAccelerator(mesh=MESH, hints=HINTS, cpu=True)
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    pm = accelerator.prepare(model)
    prepared = accelerator.prepare(optimizer)  # one by one, too
    accelerator.backward(pm(X, Y))
    prepared.step()
    accelerator.save_state(tmp_path / "state")
    accelerator.save_model(pm, tmp_path)
    state, moments = pm.full_state_dict(), prepared.state_dict()
    assert all(torch.equal(state[name], each) for name, each in load_file(tmp_path / "model.safetensors").items())
    accelerator.backward(pm(X, Y))
    prepared.step()
    assert not near(pm.full_state_dict()["0.weight"], state["0.weight"])
    accelerator.load_state(tmp_path / "state")
    assert all(torch.equal(each, state[name]) for name, each in pm.full_state_dict().items())
    now = prepared.state_dict()["state"]
    assert all(torch.equal(now[i]["exp_avg"], each["exp_avg"]) for i, each in moments["state"].items())
    assert accelerator.get_state_dict(nn.Linear(2, 2)).keys() == {"weight", "bias"}


def test_metrics_need_no_gathering() -> None:
    accelerator = ParallelAccelerator(mesh=MESH, hints=HINTS, cpu=True)
    found: list[Any] = []
    for rows in accelerator.prepare(DataLoader(list(range(7)), batch_size=4)):
        found += accelerator.gather_for_metrics((rows, rows.sum().repeat(4)))
        found += [accelerator.gather_for_metrics(["text"]), accelerator.reduce(accelerator.gather(rows))]
    assert [each.tolist() if isinstance(each, torch.Tensor) else each for each in found] == [
        [0, 1, 2, 3], [6, 6, 6, 6], ["text"], [0, 1, 2, 3], [4, 5, 6], [15, 15, 15], ["text"], [4, 5, 6],
    ]  # fmt: skip


@pytest.mark.long
def test_several_models_must_be_parallel_before() -> None:
    accelerator = ParallelAccelerator(cpu=True)
    with pytest.raises(sx.Error, match=r"no plan for this model(.|\n)*pass shardfx.parallelize"):
        accelerator.prepare(mlp())
    one, other = parallel(mlp()), parallel(mlp())
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (one, other)]
    prepared = accelerator.prepare(one, other, *optimizers)
    assert prepared[:2] == (one, other) and [each.pm for each in prepared[2:]] == [one, other]
    assert accelerator.prepare(one) is one
    AcceleratorState._reset_state(True)
    accelerator = ParallelAccelerator(mesh=MESH, hints=HINTS, cpu=True)
    accelerator.prepare(mlp())
    with pytest.raises(sx.Error, match="no plan for this model"):
        accelerator.prepare(mlp())
