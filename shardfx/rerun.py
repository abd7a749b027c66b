"""Reruns of a plan's passes, one by one: for pictures, diffs, and to name the pass that broke a plan."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Iterator
from dataclasses import replace

from shardfx.compile import Compiled, new_context, no_collection, own_constants
from shardfx.ir.errors import Error, did_you_mean
from shardfx.ir.graph import Graph, Value
from shardfx.ir.rules.book import RuleBook
from shardfx.ir.text import parse_graph, print_graph
from shardfx.passes import steps
from shardfx.plugins import all_rules
from shardfx.runtime.verify.fault import Fault
from shardfx.runtime.verify.numeric_check import Counterexample
from shardfx.runtime.verify.proof.terms import same_function
from shardfx.runtime.verify.verdict import Verdict

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
        assert sx.rerun.prove(before, after)
    """
    first, second = (parse_graph(each) if isinstance(each, str) else each for each in (before, after))
    found = same_function(first, second, rules or all_rules())
    checked = {"nodes": len(second.nodes), "outputs": len(second.outputs)}
    if isinstance(found, Fault):
        shown = found if found.certain else Counterexample(first, second, {}).of_graph(found)
        return Verdict.of(shown, checked=checked, claim=CLAIM)
    return Verdict.of(None, checked=checked | {"terms": len(found.terms.types)}, claim=CLAIM)


def rerun(compiled: Compiled, graph: Graph) -> Iterator[str]:
    """Run the passes again on a copy of the captured graph; gives each one's name when it has run (``name-2`` for the
    second of that name)."""
    context = new_context(compiled.hints, graph, compiled.context.rules)
    counts: dict[str, int] = {}
    with warnings.catch_warnings(), no_collection():
        warnings.simplefilter("ignore")  # they were said the first time
        for each in steps(graph, compiled.passes, context):
            again = counts[each.name] = counts.get(each.name, 0) + 1
            yield each.name if again == 1 else f"{each.name}-{again}"


def after_each_pass(compiled: Compiled) -> dict[str, Graph]:
    """The graph after each pass, by the pass's name."""
    graph = own_constants(compiled.before.copy())
    return {name: graph.copy() for name in rerun(compiled, graph)}


def diff(compiled: Compiled, name: str) -> str:
    """What a pass changed: a unified diff of the graph's text before and after it; empty if it changed nothing.

    Values keep the numbers that they had before the pass; those that it made are called ``%new0``, ``%new1``, ...

    Raises:
        Error: no pass of the plan has this name.
    """
    graph = own_constants(compiled.before.copy())
    names, text = _state(graph)
    seen = []
    for ran in rerun(compiled, graph):
        if ran == name:
            return "\n".join(
                difflib.unified_diff(text, _named_as(graph, names), f"before {name}", f"after {name}", "", "", 2, "")
            )
        names, text = _state(graph)
        seen.append(ran)
    raise Error(
        f"no pass {name!r} in this plan",
        where="pm.diff",
        expected=f"one of {', '.join(seen)}",
        got=name,
        remedy=did_you_mean(name, seen),
    )


def _state(graph: Graph) -> tuple[dict[Value, str], list[str]]:
    """What each value is called, and the lines of the graph."""
    return {value: value.name for value in graph.values()}, print_graph(graph, sources=False).splitlines()


def _named_as(graph: Graph, names: dict[Value, str]) -> list[str]:
    """The lines of a graph whose values are called as before, and new ones ``new0``, ``new1``, ..."""
    fresh = (f"new{number}" for number in range(1 << 62))
    for value in graph.values():
        value.name = names.get(value) or next(fresh)
    return print_graph(graph, sources=False).splitlines()


def verify_every_pass(compiled: Compiled) -> Verdict:
    """Whether the graph is the captured program after each pass; names the first pass after which it is not."""
    graph = own_constants(compiled.before.copy())
    passed = 0
    for name in rerun(compiled, graph):
        verdict = prove(compiled.before, graph, compiled.context.rules)
        if not verdict:
            return replace(
                verdict, why=f"after pass {name!r}: {verdict.why}", checked={"passes": passed, **verdict.checked}
            )
        passed += 1
    return Verdict.of(None, checked={"passes": passed})
