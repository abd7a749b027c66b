"""Passes as text: what a pass prints is read back; golden texts of every built-in pass."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardfx as sx
from shardfx.compile import new_context
from shardfx.ir.text import print_graph
from shardfx.ir.text.parser import parse_graph
from shardfx.passes import BUILT_IN, steps
from shardfx.passes.pass_text import options_text, parse_pass
from shardfx.rerun import rerun
from tests.golden import ALWAYS, Golden, goldens
from tests.plans import MESHES, plan
from tests.zoo import make


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
        ("every-kind{coun=1}", "has no option 'coun'"),
        ("every-kind{count=1,count=2}", "cannot be read"),
        ("every-kind{count=one}", "'count' has a value of another type"),
        ("every-kind{mode=slow}", "'mode' has a value of another type"),
        ("every-kind{names=[['a', 1]]}", "'names' has a value of another type"),
        ("every-kind{text=open('x')}", "cannot be read"),
        ("needs", "cannot be made"),
        ("needs{_made=1,budget=x}", "has no option '_made'"),
    ],
)
def test_mistakes_are_named(text: str, what: str) -> None:
    with pytest.raises(sx.Error) as caught:
        parse_pass(text, find)
    assert what in caught.value.what
    assert "coun=" not in text or caught.value.remedy == "did you mean 'count'?"


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


@pytest.mark.long
def test_the_rest_of_the_pipeline_makes_the_same_of_a_text() -> None:
    compiled = plan(make("dropout_mlp"), MESHES["dp2tp2"])._compiled
    graph = compiled.before.copy()
    texts = [print_graph(graph, reasons=True)]
    texts += [print_graph(graph, reasons=True) for _ in rerun(compiled, graph)]
    after = compiled.after.copy()
    after.notes = [each for each in after.notes if not each.startswith("redundant compute")]  # no pass writes these
    assert texts[-1] == print_graph(after, reasons=True)
    for number, text in enumerate(texts[:-1]):
        read = parse_graph(text)
        assert print_graph(read, reasons=True) == text
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _ in steps(read, compiled.passes[number:], new_context(compiled.hints, read, compiled.context.rules)):
                pass
        assert print_graph(read, reasons=True) == texts[-1], f"from {compiled.passes[number]} on"
