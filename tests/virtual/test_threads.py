"""Threads that call one module take iterations."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from torch import nn

from shardfx.runtime import rendezvous
from tests.virtual.test_calls import batch, near, parallel


@pytest.mark.long
def test_threads_take_iterations(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that calls while another is in a call waits: no running statistics are lost."""
    x, y = batch()
    model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4)).double()
    pm, alone = parallel(model), copy.deepcopy(model)
    within, done, perform = threading.Event(), threading.Event(), rendezvous.perform

    def wait(*given: Any) -> list[torch.Tensor]:
        if not within.is_set():
            within.set()
            done.wait(0.5)
        return perform(*given)

    def other() -> None:
        within.wait()
        pm(2 * x, y)
        done.set()

    thread = threading.Thread(target=other)
    monkeypatch.setattr(rendezvous, "perform", wait)
    thread.start()
    pm(x, y)
    thread.join()
    alone(x), alone(2 * x)
    ours, theirs = pm.full_state_dict(), alone.state_dict()
    assert all(near(ours[name], tensor) for name, tensor in theirs.items()), (ours, theirs)
