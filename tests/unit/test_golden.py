"""Every built-in pass on texts: what goes in, what comes out."""

from __future__ import annotations

import pytest

from shardfx.passes import BUILT_IN
from tests.golden import ALWAYS, FOLDER, Golden, goldens, header, rest

ALL = list(goldens())


@pytest.mark.parametrize("golden", ALL, ids=str)
def test_a_pass_makes_of_a_text_what_its_file_says(golden: Golden) -> None:
    """If a change is meant: ``python -m tests.golden`` writes the files anew."""
    assert golden.made() == golden.expected


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_pass_has_models_and_a_small_case(name: str) -> None:
    mine = [golden for golden in ALL if golden.pass_name == name]
    assert name not in ALWAYS or sum(not golden.by_hand for golden in mine) >= 4
    assert any(golden.by_hand for golden in mine)


@pytest.mark.parametrize("name", ALWAYS)
def test_the_rest_of_the_pipeline_gives_the_same_from_any_pass_on(name: str) -> None:
    """All that was decided before a pass is in the text: nothing else is handed on."""
    text = next(golden for golden in ALL if str(golden) == f"{name}/gpt").given
    last = (FOLDER / ALWAYS[-1] / "gpt.txt").read_text(encoding="utf-8")
    assert header(text) + rest(name, text) + "\n" == last
