"""Offload on a GPU: copies beside the step, on streams of their own, and memory that is freed in stream order."""

from __future__ import annotations

import pytest
import torch

from shardfx.ir.ops.pools import transfer
from tests.on_gpu import allocated
from tests.virtual.test_memory import blocks
from tests.virtual.test_offload import adamw, away

pytestmark = pytest.mark.gpu


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
