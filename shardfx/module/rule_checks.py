"""Op rules checked by the oracle: of a plan in ``pm.verify()``; by hand, ``sx.check_rule`` and ``shardfx rules``."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from shardfx.ir.errors import Error
from shardfx.ir.graph import Graph, Node, factors_text, op_name
from shardfx.ir.oracle.instance import Instance, instance
from shardfx.ir.oracle.rule_check import SECONDS, PlanChecked, check_plan, wrong_trials
from shardfx.ir.oracle.run_isolated import Lost, isolated
from shardfx.ir.oracle.soundness import undisturbed
from shardfx.ir.program.loops.unrolled import loops_as_ranks
from shardfx.ir.rulebook import default_rules
from shardfx.ir.rules.book import RuleEntry
from shardfx.ir.rules.sharding_rule import rule_text
from shardfx.ir.rules.template import Template
from shardfx.passes.base import PassContext
from shardfx.runtime.verify.fault import Fault, place
from shardfx.runtime.verify.verdict import Status, Verdict, text

ASSUMPTIONS = (
    "torch's kernels on one device",
    "the capture: that the captured graph is the model (that of one with content and at most 16 million elements is "
    "compared with eager on its example, with gradients and buffers)",
    "that a sum in another order is the same sum",
    "that what follows from finite inputs is finite",
    "op rules beyond the small shapes and values on which their shares of this plan were executed",
)
"""What a proof assumes; README has the same words."""


def check_own_rules(graph: Graph, context: PassContext, own: Sequence[RuleEntry]) -> None:
    """Execute the strategies of a plan that come from ``Hints(rules=...)``.

    Raises:
        Error: one is wrong. It names the op, its sharding, and the two numbers.
    """
    for node, why in _checked(graph, context, own).wrong if own else ():
        raise Error(
            _is_wrong(node, why),
            where=f"Hints(rules=...), for {node.where}  {node.where.code}",
            expected="a rule by which the shards of each rank give what the op gives on one device",
            got=rule_text(context.cache.rule(node)),
            remedy="mark with ! what must be replicated, or write local= (docs/writing_rules.md); see sx.check_rule",
        )


def with_rules(verdict: Verdict, graph: Graph, context: PassContext) -> Verdict:
    """The verdict on a planned graph, combined with the execution of its rules: a wrong rule makes it false."""
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


def _checked(graph: Graph, context: PassContext, own: Sequence[RuleEntry] | None = None) -> PlanChecked:
    on_ranks = replace(graph, mesh=loops_as_ranks(graph.mesh))
    return check_plan(on_ranks, context.rules, default_rules(), only=own)


def _is_wrong(node: Node, why: str) -> str:
    made = node.strategy
    assert made is not None
    shardings = f"sharding {factors_text(made.shardings)}" if made.shardings else "sharded not at all"
    return f"the rule of {op_name(node.op)} is wrong, {shardings}: {why}"


def check_rule(rule: RuleEntry, *args: Any, op: Any = None, **kwargs: Any) -> None:
    """Execute all that a rule allows of one call of its op: every sharding, every partial sum, and some together.

    Each is tried on values of both signs, zeros, ties, indices over their whole range, and shards that lie in memory
    in several ways; and without numbers, by the op's fake version. It runs in a process of its own.

    Args:
        rule: what :func:`shardfx.rule` gives.
        args, kwargs: those of the call. Small tensors will do, in float64, with dims of 4 to 12 elements.
        op: the op, where the rule is of several.

    Raises:
        Error: the rule allows something that is wrong: it names op, sharding, and the two numbers; or it has no op to
            call.

    Example::

        sx.check_rule(sx.rule(torch.ops.mylib.scale_rows.default, "n d, n -> n d"), torch.randn(6, 4), torch.randn(6))
    """
    found = refutations(rule, instance(_op_of(rule, op), args, kwargs))
    if found:
        raise Error(
            f"the rule of {op_name(_op_of(rule, op))} is wrong",
            where=f"check_rule({rule.text})" if rule.text else "check_rule(...)",
            expected="what the op gives on full values, of every sharded and partial sum that the rule allows",
            got="\n".join(found),
            remedy="mark what must be replicated with !, say linear= of fewer operands, or write local=",
        )


def _op_of(rule: RuleEntry, op: Any) -> Any:
    if not isinstance(rule, RuleEntry):
        raise Error("this is no rule", where="check_rule(...)", expected="what shardfx.rule gives", got=repr(rule))
    found = op if op is not None else rule.ops[0]
    if isinstance(found, torch._ops.OpOverloadPacket):
        overloads = [getattr(found, name) for name in found.overloads()]
        found = overloads[0] if len(overloads) == 1 else found
    if not isinstance(found, torch._ops.OpOverload) or (op is None and len(rule.ops) > 1):
        raise Error(
            "the rule is of several ops",
            where="check_rule(...)",
            expected="op=, which of them is called",
            got=", ".join(map(str, rule.ops)),
        )
    return found


def refutations(rule: RuleEntry, of: Instance) -> list[str]:
    """Counterexamples to a rule, on one call; found in a subprocess."""
    try:
        return isolated(lambda: wrong_trials(rule, of), SECONDS)
    except Lost as lost:
        return [f"{of!r}\n    {lost}"]


def example(rule: RuleEntry, op: Any) -> Instance | None:
    """A call of an op by its rule's template: ``n d, n -> n d`` is one of tensors of shapes (4, 6) and (4,), with
    defaults for all that is no tensor; None where that is no call."""
    tensors = rule.make.operands if isinstance(rule.make, Template) else ()
    words = [word for tensor in tensors for word in tensor.words]
    letters = dict.fromkeys(factor for word in words for factor in word.factors)
    if not tensors or any(word.at or word.many not in ("", "..") for word in words):
        return None
    sizes = dict(zip(letters, itertools.count(4, 2), strict=False))
    args = [torch.randn([math.prod(sizes[f] for f in w.factors) for w in t.words]).double() for t in tensors]
    with undisturbed():
        try:
            return instance(op, args)
        except Exception:  # the op takes other arguments than these
            return None
