"""What is offloaded on a rank that has several stages: each fetches when it needs, in the order of the schedule."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardfx as sx


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
