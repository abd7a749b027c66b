"""What the oracle says of a plan's rules: of the user's at planning, of all in the verdict of ``pm.verify()``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shardfx.ir.errors import Error
from shardfx.ir.graph import Graph, Node, factors_text, op_name
from shardfx.ir.oracle.rule_check import PlanChecked, check_plan
from shardfx.ir.program.loops.unrolled import loops_as_ranks
from shardfx.ir.rulebook import default_rules
from shardfx.ir.rules.book import RuleEntry
from shardfx.ir.rules.sharding_rule import rule_text
from shardfx.passes.base import Context
from shardfx.passes.finite import sure_facts
from shardfx.passes.finite_results import NONZERO
from shardfx.runtime.verify.fault import Fault, place
from shardfx.runtime.verify.verdict import Status, Verdict, text

ASSUMPTIONS = (
    "torch's kernels on one device",
    "the capture: that the captured graph is the model (that of one with content and at most 16 million elements is "
    "compared with eager on its example, with gradients and buffers)",
    "that a sum in another order is the same sum",
    "op rules beyond the small shapes and values on which their shares of this plan were executed",
)
"""What a proof assumes; README has the same words."""


def check_own_rules(graph: Graph, context: Context, own: Sequence[RuleEntry]) -> None:
    """Execute what a plan shards by the rules of ``Hints(rules=...)``.

    Raises:
        Error: one is wrong. It names the op, its sharding, and the two numbers.
    """
    for node, why in _checked(graph, context, own).wrong if own else ():
        raise Error(
            _is_wrong(node, why),
            where=f"Hints(rules=...), for {node.where}  {node.where.code}",
            expected="a rule by which the shards of each rank give what the op gives on one device",
            got=rule_text(context.cache.rule(node)),
            remedy="mark with ! what must stay whole, or write local= (docs/writing_rules.md); see sx.check_rule",
        )


def with_rules(verdict: Verdict, graph: Graph, context: Context) -> Verdict:
    """The verdict on a planned graph, with what executing its rules says: a wrong rule makes it false."""
    if not verdict:
        return verdict
    found = _checked(graph, context)
    counts = {"shares executed": found.executed, "executed before": found.known}
    left_out = [f"the rule of {op}: {why}" for op, why in sorted(found.left_out.items())]
    verdict = replace(
        verdict,
        checked={**verdict.checked, **{what: count for what, count in counts.items() if count}},
        assumptions=(*ASSUMPTIONS, *verdict.assumptions, *left_out),
    )
    if not found.wrong:
        return verdict
    node, why = found.wrong[0]
    what = _is_wrong(node, why)
    fault = Fault(what, "", None, node.outs[0].name if node.outs else "", place(node), certain=True)
    return replace(verdict, status=Status.REFUTED, why=text(fault), fault=fault, programs=())


def _checked(graph: Graph, context: Context, own: Sequence[RuleEntry] | None = None) -> PlanChecked:
    facts = sure_facts(graph, context.cache.rule)
    nonzero = frozenset(value for value, sure in facts.items() if NONZERO in sure)
    return check_plan(
        replace(graph, mesh=loops_as_ranks(graph.mesh)), context.rules, default_rules(), nonzero, only=own
    )


def _is_wrong(node: Node, why: str) -> str:
    made = node.strategy
    assert made is not None
    shardings = f"sharding {factors_text(made.shardings)}" if made.shardings else "sharded not at all"
    return f"the rule of {op_name(node.op)} is wrong, {shardings}: {why}"
