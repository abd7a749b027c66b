"""Random models, meshes and hints equal one device, or are refused with an Error (see tests/fuzz.py)."""

from __future__ import annotations

import warnings

import pytest

from tests.fuzz import check, draw

QUICK, ALL, CHUNK = 40, 2000, 20


@pytest.mark.parametrize(
    "first",
    [pytest.param(seed, marks=() if seed < QUICK else pytest.mark.slow) for seed in range(0, ALL, CHUNK)],
)
def test_random_cases_equal_one_device(first: int) -> None:
    refused = 0
    for seed in range(first, first + CHUNK):
        example = draw(seed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                refused += check(example) != "equal"
            except Exception as error:
                raise AssertionError(f"{error}\n{example}") from error
    assert refused <= CHUNK // 4, "most cases must be equal, not refused"
