"""What the oracle says of a plan's rules, as part of the verdict of ``pm.verify()``."""

from __future__ import annotations

from dataclasses import replace

from shardfx.ir.graph import Graph, factors_text, op_name
from shardfx.ir.oracle.planned.plan_check import check_plan
from shardfx.ir.program.looped.unrolled import as_ranks
from shardfx.ir.rulebook import default_rules
from shardfx.passes.base import Context
from shardfx.passes.finite import sure_facts
from shardfx.passes.finite_results import NONZERO
from shardfx.runtime.verify.fault import Fault, place
from shardfx.runtime.verify.verdict import Status, Verdict, text

GIVEN = (
    "torch's kernels on one device",
    "the capture: that the captured graph is the model (that of one with content and at most 16 million elements is "
    "run beside it on its example, with gradients and buffers)",
    "that a sum in another order is the same sum",
    "op rules beyond the small shapes and values on which their shares of this plan were executed",
)
"""What a proof takes as given; README has the same words."""


def with_rules(verdict: Verdict, graph: Graph, context: Context) -> Verdict:
    """The verdict on a planned graph, with what executing its rules says: a wrong rule makes it false."""
    if not verdict:
        return verdict
    facts = sure_facts(graph, context.cache.rule)
    nonzero = frozenset(value for value, sure in facts.items() if NONZERO in sure)
    found = check_plan(replace(graph, mesh=as_ranks(graph.mesh)), context.rules, default_rules(), nonzero)
    counts = {"shares executed": found.executed, "executed before": found.known}
    left_out = [f"the rule of {op}: {why}" for op, why in sorted(found.left_out.items())]
    verdict = replace(
        verdict,
        checked={**verdict.checked, **{what: count for what, count in counts.items() if count}},
        given=(*GIVEN, *verdict.given, *left_out),
    )
    if not found.wrong:
        return verdict
    node, why = found.wrong[0]
    made = node.strategy
    assert made is not None
    cuts = f"cut {factors_text(made.cuts)}" if made.cuts else "cut not at all"
    what = f"the rule of {op_name(node.op)} is wrong, {cuts}: {why}"
    fault = Fault(what, "", None, node.outs[0].name if node.outs else "", place(node), certain=True)
    return replace(verdict, status=Status.REFUTED, why=text(fault), fault=fault, programs=())
