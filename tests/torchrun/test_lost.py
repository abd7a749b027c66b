"""A rank that dies, raises, sticks or makes a NaN ends the others in time, with a message that names it."""

from __future__ import annotations

import json

import pytest

from tests.torchrun.launch import ended
from tests.torchrun.lost import BETWEEN, MODES, TIMEOUT, End

SOON = TIMEOUT + 14.0
"""The time-out, two seconds to hear from one another, and a busy machine: some thirty ranks at once on its cores."""


@pytest.fixture(scope="module")
def ends() -> dict[str, list[End]]:
    return run(*MODES, *BETWEEN)


def run(*modes: str) -> dict[str, list[End]]:
    """How the ranks of each mode end."""
    return json.loads(next(line for line in ended(*modes).splitlines() if line.startswith("ENDS"))[5:])


def others(found: list[End]) -> list[str]:
    """What the ranks beside rank 1 raised; all of them in time."""
    texts = []
    for rank, end in enumerate(found):
        assert rank == 1 or (end is not None and end[0] < SOON), found
        if rank != 1 and end is not None:
            texts.append(end[1])
    assert len(texts) == 3
    return texts


def test_a_rank_that_is_gone(ends: dict[str, list[End]]) -> None:
    assert ends["exits"][1] is None
    for text in others(ends["exits"]):
        assert text.startswith("a rank is missing in all_"), text
        assert "lost.py:4" in text or "node" in text, text
        assert all(word in text for word in ("where:", "expected:", "got:", "remedy:"))


def test_a_rank_whose_program_raises(ends: dict[str, list[End]]) -> None:
    own = ends["raises"][1]
    assert own is not None
    assert "a rank's program failed" in own[1] and "rank 1; node 'addmm'" in own[1], own
    assert "fc1  lost.py:" in own[1] and "RuntimeError: no memory left" in own[1], own
    for text in others(ends["raises"]):
        assert text.startswith("a rank is missing in all_"), text


def test_a_stage_that_raises(ends: dict[str, list[End]]) -> None:
    """Nobody waits for ever for what a rank does not send, nor for one that waits for it."""
    for text in others(ends["stage_raises"]):
        assert text.startswith("a rank is missing in "), text


def test_a_compiled_program_that_raises() -> None:
    """Alone: torch.compile keeps the cores from those that must be in time."""
    (ends,) = run("compiled_raises").values()
    own = ends[1]
    assert own is not None and "a rank's program failed" in own[1] and "no memory left" in own[1], own
    for text in others(ends):
        assert text.startswith("a rank is missing in ") and "in a collective of the compiled program" in text, text


def test_a_rank_that_sticks(ends: dict[str, list[End]]) -> None:
    """The group's time-out ends those that wait; the stuck one hears of it when it comes."""
    texts = others(ends["sticks"])
    assert any("Timed out" in text for text in texts), texts
    assert all(text.startswith("a rank is missing in ") for text in texts), texts
    assert min(end[0] for end in ends["sticks"] if end) >= TIMEOUT - 0.5
    own = ends["sticks"][1]
    assert own is not None and "is missing in" in own[1], own


def test_a_nan_is_named_on_the_rank_that_makes_it(ends: dict[str, list[End]]) -> None:
    own = ends["makes_nan"][1]
    assert own is not None and "was made from finite numbers" in own[1], own
    assert "lost.py:" in own[1] and "backward" in own[1], own
    assert all(end is not None and end[1] for end in ends["makes_nan"]), ends["makes_nan"]


def test_a_rank_that_ends_between_two_calls_is_missing(ends: dict[str, list[End]]) -> None:
    for mode in BETWEEN:
        for text in others(ends[mode]):
            assert text.startswith("a rank is missing in the start of a call"), text
