"""Are the rules right that a plan goes by? Each distinct op, arguments and strategy of it is put to the oracle once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from shardfx.ir.graph import Graph, Node, Value, op_name
from shardfx.ir.mesh import Mesh
from shardfx.ir.ops.alike import alike
from shardfx.ir.oracle.findings import default_folder
from shardfx.ir.oracle.instance import describe
from shardfx.ir.oracle.running.apart import Lost, apart
from shardfx.ir.rules.book import RuleBook, RuleEntry
from shardfx.ir.rules.strategy import partial_operands

from .kept_answers import AnswersFolder, kept_answers
from .share_check import Answer, check_share
from .small_share import used_axes

SECONDS_EACH = 20.0
"""For one share, in a process of its own."""
_answered: dict[tuple[int, str], tuple[Answer, RuleEntry]] = {}
"""What was found in this process of rules that are not built in, by the entry's id; the entry is held, so that no other
has its id."""


@dataclass(frozen=True)
class Share:
    """One distinct op, arguments and strategy of a plan, and the rule that it goes by.

    ``nonzero`` are the operands, by number, no element of which is zero in the plan, where others are partial sums.
    """

    node: Node
    entry: RuleEntry
    built_in: bool
    nonzero: tuple[int, ...] = ()

    def question(self, mesh: Mesh) -> str:
        """All that the answer depends on, beside the code."""
        made = self.node.strategy
        assert made is not None
        sizes = {axis: mesh[axis].size for axis in used_axes(made)}
        there = [value is not None for value in self.node.results]
        limits = f"; nonzero {self.nonzero}" if self.nonzero else ""
        return f"{describe(self.node)} -> {there}; {made}; {sizes}{limits}"


@dataclass(frozen=True)
class PlanChecked:
    """What the oracle says of a plan.

    ``executed`` shares in this process, ``known`` ones in an earlier one; ``left_out`` could not be executed; ``wrong``
    are refuted.
    """

    executed: int
    known: int
    left_out: Mapping[str, str]
    wrong: Sequence[tuple[Node, str]]


def check_plan(
    graph: Graph,
    rules: RuleBook,
    built_in: RuleBook,
    nonzero: Set[Value] = frozenset(),
    folder: AnswersFolder | None = None,
    only: Sequence[RuleEntry] | None = None,
) -> PlanChecked:
    """Put the shares of a planned graph to the oracle.

    Args:
        built_in: rules whose answers are kept on disk; those of others are found anew in every process.
        nonzero: values that are sure to have no zero among their elements: by others no partial sum may be divided.
        folder: where they are kept; None: where the user's caches are.
        only: rules of which alone the shares are executed.
    """
    folder = folder if folder is not None else kept_answers(default_folder())
    left_out: dict[str, str] = {}
    wrong = []
    asked = [(share, share.question(graph.mesh)) for share in shares(graph, rules, built_in, nonzero)]
    if only is not None:
        asked = [(share, question) for share, question in asked if any(share.entry is entry for entry in only)]
    before = {}
    for share, question in asked:
        kept = folder.get(share.node.op, question) if share.built_in else None
        there = _answered.get((id(share.entry), question))
        before[question] = kept if share.built_in else there[0] if there else None
    fresh = [(share, question) for share, question in asked if before[question] is None]
    made = dict(zip([question for _, question in fresh], _ask([share for share, _ in fresh], graph.mesh), strict=True))
    for share, question in fresh:
        if share.built_in:
            folder.put(share.node.op, question, made[question])
        else:
            _answered[id(share.entry), question] = made[question], share.entry
    for share, question in asked:
        answer = before[question] or made[question]
        if answer.wrong:
            wrong.append((share.node, answer.wrong))
        if answer.left_out:
            left_out[op_name(share.node.op)] = answer.left_out
    folder.write()
    return PlanChecked(len(fresh), len(asked) - len(fresh), left_out, wrong)


def shares(graph: Graph, rules: RuleBook, built_in: RuleBook, nonzero: Set[Value] = frozenset()) -> list[Share]:
    """The distinct shares of a planned graph that are cut, or partial, by a rule."""
    found: dict[Any, Share | None] = {}
    for node in graph.nodes:
        if node.strategy is None:
            continue
        sure = tuple(i for i, value in enumerate(node.operands) if value in nonzero)
        sure = sure if partial_operands(node.strategy) else ()
        key = (alike(node), node.strategy, sure)
        if key in found:
            continue
        entry = rules.entry(node.op) if used_axes(node.strategy) else None
        own = entry is not None and built_in.entry(node.op) is entry
        found[key] = None if entry is None else Share(node, entry, own, sure)
    return [share for share in found.values() if share is not None]


def _ask(asked: Sequence[Share], mesh: Mesh) -> list[Answer]:
    """The answers, found in a process of its own: those of built-in rules in one, unless that is lost."""

    def answers(several: Sequence[Share]) -> list[Answer]:
        return [check_share(share.node, share.entry, mesh, share.nonzero) for share in several]

    together = [share for share in asked if share.built_in]
    found: dict[int, Answer] = {}
    if len(together) > 1:
        try:
            made = apart(lambda: answers(together), SECONDS_EACH * len(together))
            found = {id(share): answer for share, answer in zip(together, made, strict=True)}
        except Lost:  # by one of them: each is asked alone then, and that one is left out
            found = {}
    for share in asked:
        if id(share) not in found:
            try:
                (found[id(share)],) = apart(lambda share=share: answers([share]), SECONDS_EACH)  # type: ignore[misc]
            except Lost as lost:
                found[id(share)] = Answer(left_out=str(lost))
    return [found[id(share)] for share in asked]
