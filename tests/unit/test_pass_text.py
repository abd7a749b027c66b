"""Passes as text: what a pass prints is read back, and what cannot be read says why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardfx as sx
from shardfx.passes import BUILT_IN
from shardfx.passes.pass_text import options_text, parse_pass


@dataclass(frozen=True)
class Every(sx.Pass):
    """A pass with options of all kinds."""

    name: ClassVar[str] = "every-kind"

    count: int = 1
    ratio: float = 0.5
    on: bool = False
    text: str = "auto"
    maybe: str | int | None = None
    mode: Literal["fast", "safe"] = "fast"
    names: Sequence[Sequence[str]] = ()
    pair: tuple[int, float] = (1, 2.0)
    sizes: Mapping[str, int] = field(default_factory=dict)
    anything: Any = None


@dataclass(frozen=True)
class Needs(sx.Pass):
    name: ClassVar[str] = "needs"

    budget: str
    _made: int = field(default=0, init=False)


def find(name: str) -> type[sx.Pass]:
    return {"every-kind": Every, "needs": Needs, **BUILT_IN}[name]


texts = st.text(max_size=8) | st.sampled_from(
    ["None", "1", "inf", "nan", "True", "8GiB", "a.*", "a,b=c", "}", "'", '"']
)
passes = st.builds(
    Every,
    count=st.integers(),
    ratio=st.floats(allow_nan=False),
    on=st.booleans(),
    text=texts,
    maybe=texts | st.integers() | st.none(),
    mode=st.sampled_from(["fast", "safe"]),
    names=st.lists(st.lists(texts, max_size=2), max_size=3),
    pair=st.tuples(st.integers(), st.floats(allow_nan=False, allow_infinity=False)),
    sizes=st.dictionaries(texts, st.integers(), max_size=2),
    anything=st.none() | texts | st.tuples(texts),
)


@pytest.mark.long
@given(passes)
def test_what_a_pass_prints_is_read_back(made: Every) -> None:
    assert parse_pass(str(made), find) == made


@pytest.mark.parametrize("kind", BUILT_IN.values())
def test_built_in_passes_print_and_parse(kind: type[sx.Pass]) -> None:
    assert parse_pass(str(kind()), find) == kind()


def test_the_form() -> None:
    assert parse_pass("needs{budget=8GiB}", find) == Needs("8GiB")
    assert str(Needs("8GiB")) == "needs{budget=8GiB}"
    assert str(Needs("a, b")) == "needs{budget='a, b'}"
    assert parse_pass(" bucket-comm ", find) == BUILT_IN["bucket-comm"]()
    assert parse_pass("every-kind{ratio = 2, names=[['a.*', 'b'], ()],}", find) == Every(
        ratio=2.0, names=[["a.*", "b"], ()]
    )
    assert options_text(Needs) == "budget: str"
    assert options_text(BUILT_IN["bucket-comm"]).startswith("mb: float = 25.0")


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "not a pass"),
        ("fuse comm", "not a pass"),
        ("every-kind{count}", "cannot be read"),
        ("every-kind{coun=1}", "has no option 'coun'"),
        ("every-kind{count=1,count=2}", "cannot be read"),
        ("every-kind{count=one}", "'count' has a value of another type"),
        ("every-kind{count=1.5}", "'count' has a value of another type"),
        ("every-kind{on=1}", "'on' has a value of another type"),
        ("every-kind{mode=slow}", "'mode' has a value of another type"),
        ("every-kind{names=[['a', 1]]}", "'names' has a value of another type"),
        ("every-kind{text=open('x')}", "cannot be read"),
        ("every-kind{names=[['a']}", "cannot be read"),
        ("every-kind{text='a}", "cannot be read"),
        ("every-kind{count=1)(on=True}", "cannot be read"),
        ("needs", "cannot be made"),
        ("needs{_made=1,budget=x}", "has no option '_made'"),
    ],
)
def test_mistakes_are_named(text: str, what: str) -> None:
    with pytest.raises(sx.Error) as caught:
        parse_pass(text, find)
    assert what in caught.value.what


def test_an_option_that_is_nearly_right_is_said() -> None:
    with pytest.raises(sx.Error) as caught:
        parse_pass("every-kind{coun=1}", find)
    assert caught.value.remedy == "did you mean 'count'?"
