"""Odd models that are sound equal one device, are proven, and nothing is said of them."""

from __future__ import annotations

import pytest

from tests.odd import ODD, run

pytestmark = pytest.mark.long
OPEN = {"OneStore": "a copy splits the sum of the gradients of overlapping views, which ranks add as one"}
"""Models that are not proven with shards of weights."""


@pytest.mark.parametrize("name", ODD)
def test_odd_model_equals_one_device_and_is_proven(name: str) -> None:
    wrong = run(ODD[name])
    assert not [each for each in wrong if not (name in OPEN and each.startswith("unknown"))]
