"""``pm.compile()`` and ``pm.step``: new parameters and states are written where the old ones lie."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardfx as sx
from tests.on_gpu import allocated
from tests.plans import MESHES
from tests.stepped import KINDS, alone, apart, batches, small_plan

ALONE = sx.Mesh(dp=1)


def places(pm: sx.ParallelModule) -> dict[str, list[int]]:
    """Where parameters and states lie."""
    held = {**pm._store.parameters, **pm._store.states}
    return {name: [shard.data_ptr() for shard in shards] for name, shards in held.items()}


@pytest.mark.long
def test_compiled_step_writes_parameters_and_states_in_place() -> None:
    losses, params, _ = alone(KINDS["AdamW"], 4)
    pm = small_plan(KINDS["AdamW"], ALONE)
    pm.compile(backend="aot_eager")
    assert apart(pm, losses[:2], {}) < 1e-12
    before, ((x, y), *_) = places(pm), batches(4)[2:]
    pm.step(x, y)
    assert places(pm) == before
    pm.step(*batches(4)[3])
    state = pm.full_state_dict()
    assert all(torch.allclose(state[name], value, rtol=0, atol=1e-12) for name, value in params.items())


@pytest.mark.long
@pytest.mark.parametrize("zero", [1, 3])
def test_compiled_steps_of_virtual_ranks_equal_one_device(zero: int) -> None:
    """Ranks that share a shard step it once."""
    losses, params, _ = alone(KINDS["AdamW"], 3, clip_grad_norm=0.5)
    pm = small_plan(KINDS["AdamW"], MESHES["dp2"], zero=zero, clip_grad_norm=0.5)
    pm.compile(backend="aot_eager")
    assert apart(pm, losses, params) < 1e-12 and pm.verify()


@pytest.mark.long
def test_compiled_program_writes_buffers_in_place() -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5)).double()
    x, y = torch.randn(8, 6, dtype=torch.float64), torch.randn(8, 5, dtype=torch.float64)
    hints = sx.Hints(args=(x,), targets=(y,), loss=F.mse_loss)
    pm, reference = (sx.parallelize(model, ALONE, hints) for _ in range(2))
    pm.compile(backend="aot_eager")
    text = str(pm.rank_program(0))
    assert "memory.write(%_1_running_mean" in text and pm.verify()
    for each in (pm, reference):
        each(x, y).backward()
        each(x + 1, y)
    wanted = reference.full_state_dict()
    assert all(torch.allclose(value, wanted[name], atol=1e-12) for name, value in pm.full_state_dict().items())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_compiled_step_on_cuda_is_in_place() -> None:
    losses, params, _ = alone(KINDS["AdamW"], 4)
    pm = small_plan(KINDS["AdamW"], ALONE, device="cuda")
    pm.compile()
    assert apart(pm, losses[:2], {}) < 1e-10
    before, held = places(pm), allocated()
    for (x, y), loss in list(zip(batches(4), losses, strict=True))[2:]:
        assert float(pm.step(x, y)) == pytest.approx(loss, abs=1e-10)
    assert places(pm) == before and allocated() == held
    state = pm.full_state_dict()
    assert all(torch.allclose(state[name].cpu(), value, rtol=0, atol=1e-10) for name, value in params.items())


SAVED = """
import sys, torch
sys.path.insert(0, {folder!r})
import rank0
state = torch.load({folder!r} + "/rank0.pt", weights_only=True)
results = rank0.forward(*[state[name] for name in rank0.INPUTS])
torch.save(dict(zip(rank0.OUTPUTS, results)), {folder!r} + "/results.pt")
assert not [name for name in sys.modules if name.startswith("shardfx")]
"""


@pytest.mark.long
def test_saved_program_of_a_compiled_plan_needs_torch_alone(tmp_path: Path) -> None:
    pm = small_plan(KINDS["AdamW"], ALONE, specs={"args.0": "-, -"})  # no group of one rank
    pm.compile(backend="aot_eager")
    pm.save_programs(tmp_path)
    run = subprocess.run(
        [sys.executable, "-c", SAVED.format(folder=str(tmp_path))], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    assert "materialize(" in (tmp_path / "rank0.py").read_text()
    results = torch.load(tmp_path / "results.pt", weights_only=True)
    pm.step(*batches(1)[0])
    for name, value in pm.full_state_dict().items():
        torch.testing.assert_close(results[f"parameter:{name}"], value, rtol=0, atol=1e-12)
