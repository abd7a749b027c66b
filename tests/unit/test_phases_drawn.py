"""Phases above a course of memory: where they begin, though some calls are made ahead; and no name over another."""

from __future__ import annotations

import re
from pathlib import Path

from shardfx.visualize import draw_memory
from shardfx.visualize.memory_chart import starts

AHEAD = ["backward", *["forward"] * 40, *["backward"] * 60, *["update"] * 20]


def test_a_call_that_is_made_ahead_begins_no_phase() -> None:
    assert starts(AHEAD) == [0, 41, 101]
    assert starts(["forward"] * 3) == [0, 3, 3]


def test_names_of_phases_stand_apart(tmp_path: Path) -> None:
    for phases, names in ((AHEAD, ["forward", "backward", "update"]), (["forward", *["backward"] * 99], ["backward"])):
        course = [{"parameters": 1}] * len(phases)
        svg = draw_memory(course, phases, 0, 1, (), tmp_path / "memory.svg", "Memory").read_text()
        assert re.findall(r">(forward|backward|update)<", svg) == names
