"""Two graphs compared: for tests of passes, and to name the pass that broke a plan."""

from __future__ import annotations

from shardfx.ir.graph import Graph
from shardfx.ir.rules.book import RuleBook
from shardfx.ir.text import parse_graph
from shardfx.runtime.verify.fault import Fault
from shardfx.runtime.verify.proof.same_function import same_function
from shardfx.runtime.verify.verdict import Verdict, text

from .plugins import all_rules

CLAIM = "both graphs compute the same"


def prove(before: Graph | str, after: Graph | str, rules: RuleBook | None = None) -> Verdict:
    """Whether two graphs (or their texts) are the same function of their inputs: true, or false with ``.why``.

    Ops are compared as they are named, not run: two graphs may compute the same by other ops, and are "not proven".
    Sums may be reordered, an op may be taken apart into its decomposition, and communication changes nothing.

    Raises:
        Error: a text is no graph.

    Example::

        before = parse_graph(TEXT)
        MyPass().run(after := before.copy(), context)
        assert sx.prove(before, after)
    """
    first, second = (parse_graph(each) if isinstance(each, str) else each for each in (before, after))
    found = same_function(first, second, rules or all_rules())
    checked = {"nodes": len(second.nodes), "outputs": len(second.outputs)}
    if isinstance(found, Fault):
        return Verdict(False, text(found), checked=checked, fault=found, claim=CLAIM)
    return Verdict(True, checked=checked | {"terms": len(found.terms.types)}, claim=CLAIM)
