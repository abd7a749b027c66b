"""The measure of differences."""

from __future__ import annotations

import pytest
import torch

from tests.reference import rel_err


def test_rel_err() -> None:
    one, nan = torch.ones(3), torch.tensor([1.0, float("nan"), 1.0])
    assert rel_err(one, one) == 0
    assert rel_err(torch.zeros(3), torch.zeros(3)) == 0
    assert rel_err(one, 1.5 * one) == pytest.approx(1 / 3)
    assert rel_err(nan, nan) == 0
    assert rel_err(nan, one) == float("inf")
    assert rel_err(one, float("inf") * one) == float("inf")
    assert rel_err(one, torch.ones(4)) == float("inf")
    assert rel_err(torch.zeros(0), torch.zeros(0)) == 0
    assert rel_err(2.0, 2.0 + 1e-12) > 0
    assert rel_err(1e-17, -1e-17) < 1e-12
