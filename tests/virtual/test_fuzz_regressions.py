"""Cases of the fuzzer that were wrong once (``make fuzz`` draws new ones; see tests/fuzz)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.fuzz.case import draw
from tests.fuzz.check import check, sharing

FAULTS = {
    2356: "a parameter that was stored sharded over iterations",
    5461: "a strided view of a weight in a gathered segment",
    7388: "stages that lay elsewhere in evaluation",
    8388: "a view recomputed in a stage that comes later",
    10588: "updates in the stage of another weight",
    20254: "rounding divided by rounding",
    22441: "rows that were moved behind a slice, of which a rank had none",
}


@pytest.mark.long
@pytest.mark.parametrize("seed", FAULTS)
def test_random_case_that_was_wrong_once_equals_one_device_and_is_proven(seed: int) -> None:
    """(Heads were not drawn in chunks then.)"""
    case = draw(seed)
    specs = tuple((name, spec) for name, spec in case.specs if "chunk" not in spec)
    case = replace(case, specs=specs, staged=case.staged and replace(case.staged, chunk=0))
    with sharing() as captures:
        outcome = check(case, captures, verify=True)
    assert (outcome.result, outcome.alarm) == ("equal", "")
