"""Rules put to the oracle by hand: ``sx.check_rule``, and the command ``shardfx rules``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from shardfx.ir.errors import Error
from shardfx.ir.graph import op_name
from shardfx.ir.oracle.instance import Instance, instance
from shardfx.ir.oracle.rule_check import SECONDS, example, wrong_trials
from shardfx.ir.oracle.run_isolated import Lost, isolated
from shardfx.ir.rules.book import RuleEntry


def check_rule(rule: RuleEntry, *args: Any, op: Any = None, **kwargs: Any) -> None:
    """Execute all that a rule allows of one call of its op: every sharding, every partial sum, and some together.

    Each is tried on values of both signs, zeros, ties, indices over their whole range, and pieces that lie in memory
    in several ways; and without numbers, by the op's fake version. It runs in a process of its own.

    Args:
        rule: what :func:`shardfx.rule` gives.
        args, kwargs: those of the call. Small tensors will do, in float64, with dims of 4 to 12 elements.
        op: the op, where the rule is of several.

    Raises:
        Error: the rule allows something that is wrong: it names op, sharded, and the two numbers; or it has no op to
            call.

    Example::

        sx.check_rule(sx.rule(torch.ops.mylib.scale_rows.default, "n d, n -> n d"), torch.randn(6, 4), torch.randn(6))
    """
    found = _refutations(rule, instance(_op_of(rule, op), args, kwargs))
    if found:
        raise Error(
            f"the rule of {op_name(_op_of(rule, op))} is wrong",
            where=f"check_rule({rule.text})" if rule.text else "check_rule(...)",
            expected="what the whole op gives, of every sharded and partial sum that the rule allows",
            got="\n".join(found),
            remedy="mark what must stay whole with !, say linear= of fewer operands, or write local=",
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


def _refutations(rule: RuleEntry, of: Instance) -> list[str]:
    """What is wrong with a rule, by an instance; found in a process of its own."""
    try:
        return isolated(lambda: [str(each) for each in wrong_trials(rule, of)], SECONDS)
    except Lost as lost:
        return [f"{of!r}\n    {lost}"]


class RuleInfo(NamedTuple):
    """An installed rule, and what the oracle says of it on a call that is made up from its template."""

    name: str
    text: str
    origin: str
    said: str
    wrong: Sequence[str]


def rule_infos(rules: Sequence[tuple[RuleEntry, str]]) -> Iterator[RuleInfo]:
    """Each op that rules are of; where a call can be made up, checked on it."""
    for rule, origin in rules:
        for op in rule.ops:
            of = example(rule, op) if isinstance(op, torch._ops.OpOverload) else None
            wrong = _refutations(rule, of) if of is not None else []
            said = f"{'wrong' if wrong else 'right'} on {of!r}" if of is not None else "not checked: see sx.check_rule"
            yield RuleInfo(op_name(op), rule.text, origin, said, wrong)
