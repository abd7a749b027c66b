"""Phases above a course of memory: where they begin, though some calls are made ahead; and no name over another."""

from __future__ import annotations

import re

from shardfx.visualize.paint.course import course_svg, starts

AHEAD = ["backward", *["forward"] * 40, *["backward"] * 60, *["update"] * 20]


def test_a_call_that_is_made_ahead_begins_no_phase() -> None:
    assert starts(AHEAD) == [0, 41, 101]
    assert starts(["forward"] * 3) == [0, 3, 3]


def test_names_of_phases_stand_apart() -> None:
    for phases, names in ((AHEAD, ["forward", "backward", "update"]), (["forward", *["backward"] * 99], ["backward"])):
        course = [{"parameters": 1}] * len(phases)
        svg = course_svg(course, phases, 0, 1, (), "Memory")
        assert re.findall(r">(forward|backward|update)<", svg) == names
