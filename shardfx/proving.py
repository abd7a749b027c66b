"""Two graphs compared: for tests of passes, and to name the pass that broke a plan."""

from __future__ import annotations

from shardfx.ir.graph import Graph
from shardfx.ir.rules.book import RuleBook
from shardfx.ir.text import parse_graph
from shardfx.runtime.verify.fault import Fault
from shardfx.runtime.verify.numeric_check import Counterexample
from shardfx.runtime.verify.proof.terms import same_function
from shardfx.runtime.verify.verdict import Verdict

from .plugins import all_rules

CLAIM = "both graphs compute the same"


def prove(before: Graph | str, after: Graph | str, rules: RuleBook | None = None) -> Verdict:
    """Whether two graphs (or their texts) are the same function of their inputs: true, or false with ``.why``.

    Inputs, constants' contents, outputs and their order are the same. Ops are compared as they are named: sums may be
    reordered, an op may be decomposed, or made of its decomposition, and communication and copies change
    nothing. Where that is not enough both graphs are run on random numbers: they are ``"refuted"`` if those differ,
    ``"unknown"`` if not.

    Raises:
        Error: a text is no graph.

    Example::

        before = parse_graph(TEXT)
        MyPass().run(after := before.copy(), context)
        assert sx.proving.prove(before, after)
    """
    first, second = (parse_graph(each) if isinstance(each, str) else each for each in (before, after))
    found = same_function(first, second, rules or all_rules())
    checked = {"nodes": len(second.nodes), "outputs": len(second.outputs)}
    if isinstance(found, Fault):
        shown = found if found.certain else Counterexample(first, second, {}).of_graph(found)
        return Verdict.of(shown, checked=checked, claim=CLAIM)
    return Verdict.of(None, checked=checked | {"terms": len(found.terms.types)}, claim=CLAIM)
