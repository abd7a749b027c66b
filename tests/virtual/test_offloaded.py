"""Plans of memory beyond virtual ranks that are called: compiled, in stages of a schedule, and on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardfx as sx
from shardfx.ir.ops.pools import transfer
from tests.on_gpu import allocated
from tests.plans import MESHES
from tests.stepped import KINDS, batches, small_plan
from tests.virtual.test_memory import blocks
from tests.virtual.test_offload import adamw, away


@pytest.mark.slow
def test_copies_stand_between_what_torch_compiles() -> None:
    """So that nothing that was offloaded stays on the device; and the same comes of it."""
    hints: dict[str, Any] = {"zero": 1, "zero_min_numel": 0}
    plain, pm = (small_plan(KINDS["AdamW"], MESHES["dp2"], **hints, **m) for m in ({}, {"offload": away()}))
    pm.compile(backend="eager")
    for x, y in batches(3):
        assert torch.equal(plain.step(x, y), pm.step(x, y))
    state = pm.full_state_dict()
    assert all(torch.equal(value, state[name]) for name, value in plain.full_state_dict().items())
    assert pm.memory().host > 0 and pm.verify()


def test_torch_compile_plans_the_memory_of_an_arena_itself() -> None:
    pm = blocks(arena=True)
    with pytest.raises(sx.Error, match="Hints\\(arena=True\\)"):
        pm.compile()


@pytest.mark.long
def test_what_two_stages_of_a_rank_need_is_fetched_for_the_one_that_comes_first() -> None:
    """In a V the middle stages lie on one rank: the later one needs for its backward what the earlier one gave."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Conv1d(4, 4, 1), nn.Tanh()) for _ in range(4))).double()
    x, y = torch.randn(2, 4, 4, 6, dtype=torch.float64)
    pipeline = sx.Pipeline(schedule="zb-v", stages_per_rank=2, stages=(1, 1, 1, 1))
    found = []
    for offload in ((), (sx.Offload("activations", min_numel=1, prefetch=8),)):
        specs = {"args.0": "mb, -, -", "targets.0": "mb, -, -"}
        hints = sx.Hints(args=(x,), targets=(y,), loss=F.mse_loss, specs=specs, pipeline=pipeline, offload=offload)
        pm = sx.parallelize(model, sx.Mesh(pp=2, mb=sx.Loop(1)), hints, virtual=True)
        loss = pm(x, y)
        loss.backward()
        found.append([loss, *pm.full_grads().values()])
        assert pm.verify()
    assert pm.memory(1).host > 0
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.gpu
def test_on_a_gpu_copies_run_beside_the_step() -> None:
    """From pinned memory, on a stream for each direction; what is computed stays the same."""
    plain, pm = (blocks(optimizer=adamw, device="cuda", **more) for more in ({}, {"offload": away(prefetch=4)}))
    x = torch.randn(256, 16, device="cuda")
    for _ in range(5):
        torch.testing.assert_close(plain.step(x, x), pm.step(x, x))
    theirs = plain.full_state_dict()
    for name, value in pm.full_state_dict().items():
        # Kernels of the update differ, and Adam divides a gradient near zero by its own size: a step is 1e-2.
        torch.testing.assert_close(value.cpu(), theirs[name].cpu(), rtol=1e-3, atol=1e-3)
    assert all(p.is_pinned() for p in pm.parameters())
    device = torch.device("cuda", torch.cuda.current_device())
    streams = {transfer._stream(device, to_host) for to_host in (True, False)} | {torch.cuda.current_stream()}
    assert len(streams) == 3
    mine, back = transfer.to_host(x), transfer.to_device(transfer.stored(transfer.to_host(x)), "cuda")
    assert torch.equal(transfer.arrived(mine), x.cpu()) and torch.equal(transfer.arrived(back), x)


@pytest.mark.gpu
def test_on_a_gpu_a_source_is_freed_in_stream_order() -> None:
    """Its memory is free behind the wait, not before, and what takes it then does not change the copy."""
    before = allocated()
    x = torch.arange(1 << 24, device="cuda")
    expected, away = x.cpu(), transfer.to_host(x)
    at, nbytes = x.data_ptr(), x.nbytes
    del x
    assert torch.cuda.memory_allocated() - before == nbytes
    transfer.stored(away)
    assert torch.cuda.memory_allocated() == before == torch.cuda.memory_stats()["active_bytes.all.current"]
    other = torch.full((1 << 24,), -1, device="cuda")
    assert other.data_ptr() == at and torch.equal(transfer.arrived(away), expected)
