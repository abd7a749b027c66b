"""Features of memory on real ranks (gloo), alone and in pairs: one device's numbers, proven, in the memory
predicted."""

from __future__ import annotations

import pytest

from tests.pairs import MODELS
from tests.torchrun.launch import on_ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1000)]
EVERY = 5
"""Of the pairs one in so many is tried on each model, on each another one."""


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("model", MODELS)
def test_features_equal_one_device(model: str, ranks: int) -> None:
    on_ranks(ranks, f"features_equal_one_device:{model},{MODELS.index(model)},{EVERY}", timeout=900)


@pytest.mark.parametrize("model", ["gpt_separate", "resnet"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_features_hold_what_is_predicted(model: str, ranks: int) -> None:
    on_ranks(ranks, f"features_hold_what_is_predicted:{model}", timeout=900)
