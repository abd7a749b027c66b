"""``pm.compile()`` of plans of memory: what is offloaded, and an arena."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import shardfx as sx
from tests.plans import MESHES
from tests.stepped import KINDS, batches, small_plan
from tests.virtual.test_memory import blocks
from tests.virtual.test_offload import away


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
