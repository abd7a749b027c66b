"""Threads that call one module take iterations."""

from __future__ import annotations

import copy
import threading

import pytest
from torch import nn

from shardfx.runtime.rendezvous import listeners
from tests.virtual.test_calls import batch, near, parallel


@pytest.mark.long
def test_threads_take_iterations() -> None:
    """A thread that calls while another is in a call waits: no running statistics are lost."""
    x, y = batch()
    model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4)).double()
    pm, alone = parallel(model), copy.deepcopy(model)
    within, done = threading.Event(), threading.Event()

    def wait(*_: object) -> None:
        if not within.is_set():
            within.set()
            done.wait(0.5)

    def other() -> None:
        within.wait()
        pm(2 * x, y)
        done.set()

    thread = threading.Thread(target=other)
    listeners.append(wait)
    try:
        thread.start()
        pm(x, y)
        thread.join()
    finally:
        listeners.remove(wait)
    alone(x), alone(2 * x)
    ours, theirs = pm.full_state_dict(), alone.state_dict()
    assert all(near(ours[name], tensor) for name, tensor in theirs.items()), (ours, theirs)
