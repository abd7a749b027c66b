"""Every built-in pass on texts: what goes in, what comes out; and a text is all that the rest of the pipeline needs."""

from __future__ import annotations

import warnings

import pytest

from shardfx.compile import new_context
from shardfx.ir.text import print_graph
from shardfx.ir.text.parser import parse_graph
from shardfx.passes import BUILT_IN, steps
from shardfx.rerun import rerun
from tests.golden import ALWAYS, Golden, goldens
from tests.plans import MESHES, plan
from tests.zoo import CASES, make

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


QUICK = ("mlp3", "dropout_mlp")


@pytest.mark.long
@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in CASES])
def test_the_rest_of_the_pipeline_makes_the_same_of_a_text(name: str) -> None:
    case = make(name)
    compiled = plan(case, MESHES["dp2tp2"], sequence=bool(case.sequence_specs))._compiled
    graph = compiled.before.copy()
    texts = [print_graph(graph, reasons=True)]
    texts += [print_graph(graph, reasons=True) for _ in rerun(compiled, graph)]
    assert texts[-1] == print_graph(compiled.after, reasons=True)
    for number, text in enumerate(texts[:-1]):
        read = parse_graph(text)
        assert print_graph(read, reasons=True) == text
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _ in steps(read, compiled.passes[number:], new_context(compiled.hints, read, compiled.context.rules)):
                pass
        assert print_graph(read, reasons=True) == texts[-1], f"from {compiled.passes[number]} on"
