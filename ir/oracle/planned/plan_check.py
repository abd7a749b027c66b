"""Are the rules right that a plan goes by? Each distinct op, arguments and strategy of it is put to the oracle once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardfx.ir.ops.alike import alike
from shardfx.ir.rules.book import RuleBook, RuleEntry

from ...graph import Graph, Node, op_name
from ...mesh import Mesh
from ..findings import default_folder
from ..instance import describe
from ..running.apart import Lost, apart
from .kept_answers import AnswersFolder, kept_answers
from .share_check import Answer, check_share
from .small_share import used_axes

SECONDS_EACH = 20.0
"""For one share by a rule that is not built in, in a process of its own."""
_answered: dict[tuple[int, str], tuple[Answer, RuleEntry]] = {}
"""What was found in this process of rules that are not built in, by the entry's id; the entry is held, so that no other
has its id."""


@dataclass(frozen=True)
class Share:
    """One distinct op, arguments and strategy of a plan, and the rule that it goes by."""

    node: Node
    entry: RuleEntry
    built_in: bool

    def question(self, mesh: Mesh) -> str:
        """All that the answer depends on, beside the code."""
        made = self.node.strategy
        assert made is not None
        sizes = {axis: mesh[axis].size for axis in used_axes(made)}
        there = [value is not None for value in self.node.results]
        return f"{describe(self.node)} -> {there}; {made}; {sizes}"


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


def check_plan(graph: Graph, rules: RuleBook, built_in: RuleBook, folder: AnswersFolder | None = None) -> PlanChecked:
    """Put the shares of a planned graph to the oracle.

    Args:
        built_in: rules whose answers are kept on disk; those of others are found anew in every process.
        folder: where they are kept; None: where the user's caches are.
    """
    folder = folder if folder is not None else kept_answers(default_folder())
    executed = known = 0
    left_out: dict[str, str] = {}
    wrong = []
    for share in shares(graph, rules, built_in):
        question = share.question(graph.mesh)
        key = (id(share.entry), question)
        before = _answered.get(key)
        answer = folder.get(share.node.op, question) if share.built_in else before[0] if before else None
        if answer is not None:
            known += 1
        else:
            executed += 1
            answer = _ask(share, graph.mesh)
            if share.built_in:
                folder.put(share.node.op, question, answer)
            else:
                _answered[key] = answer, share.entry
        if answer.wrong:
            wrong.append((share.node, answer.wrong))
        if answer.left_out:
            left_out[op_name(share.node.op)] = answer.left_out
    folder.write()
    return PlanChecked(executed, known, left_out, wrong)


def shares(graph: Graph, rules: RuleBook, built_in: RuleBook) -> list[Share]:
    """The distinct shares of a planned graph that are cut, or partial, by a rule."""
    found: dict[Any, Share | None] = {}
    for node in graph.nodes:
        if node.strategy is None:
            continue
        key = (alike(node), node.strategy)
        if key in found:
            continue
        entry = rules.entry(node.op) if used_axes(node.strategy) else None
        own = entry is not None and built_in.entry(node.op) is entry
        found[key] = None if entry is None else Share(node, entry, own)
    return [share for share in found.values() if share is not None]


def _ask(share: Share, mesh: Mesh) -> Answer:
    if share.built_in:
        return check_share(share.node, share.entry, mesh)
    try:
        return apart(lambda: check_share(share.node, share.entry, mesh), SECONDS_EACH)
    except Lost as lost:
        return Answer(left_out=str(lost))
