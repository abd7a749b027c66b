"""reassociate: sums of gradients, ordered so that partial sums meet.

Where a value is used several times its gradient is a chain of adds in the order in which the uses were left. If some
terms are partial over an axis and others are not, the order decides how often is reduced:

    ((r + dq) + dk) + dv        three all-reduces, when dq, dk and dv are partial over tp and r is not
    r + ((dq + dk) + dv)        one
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import ClassVar

import torch

from shardfx.ir.graph import Graph, Node, Phase, Value
from shardfx.ir.rewriter import Rewriter, dead_code
from shardfx.passes.base import SHARDED, Context, Pass

ADD = torch.ops.aten.add.Tensor


@dataclass(frozen=True)
class Reassociate(Pass):
    """Reorder chains of adds in the backward pass, so that partial sums are added before they are reduced."""

    name: ClassVar[str] = "reassociate"
    requires: ClassVar[frozenset[str]] = frozenset({SHARDED})

    def run(self, graph: Graph, context: Context) -> bool:
        users = graph.users()
        kept = {output.value for output in graph.outputs}
        kept |= {value for value in graph.values() if value.hint is not None}
        rewriter = Rewriter(graph)
        inner: set[Node] = set()
        changed = False
        for node in reversed(graph.nodes):
            if node in inner or not _is_sum(node):
                continue
            terms = _terms(node, users, kept, inner)
            groups: dict[object, list[Value]] = {}
            for term in terms:
                groups.setdefault(_partial(term, context), []).append(term)
            apart = [group for key, group in groups.items() if key and len(group) > 1]
            if len(terms) < 3 or not apart or len(groups) < 2:
                continue
            changed = True
            new = _rebuild(node, list(groups.values()), rewriter)
            new.hint, new.hinted_by = node.outs[0].hint, node.outs[0].hinted_by
        if changed:
            rewriter.apply()
            dead_code(graph)
            graph.rename()
        return changed


def _is_sum(node: Node) -> bool:
    return (
        node.op is ADD
        and node.phase is Phase.BACKWARD
        and not node.kwargs
        and len(node.operands) == 2
        and all(v.type == node.outs[0].type for v in node.operands)
    )


def _terms(node: Node, users: dict[Value, list[Node]], kept: Container[Value], inner: set[Node]) -> list[Value]:
    """The terms of a sum: through adds whose result nothing else uses."""
    terms: list[Value] = []
    for value in node.operands:
        maker = value.node
        once = maker is not None and users[value] == [node] and value not in kept
        if once and maker is not None and _is_sum(maker) and node.operands.count(value) == 1:
            inner.add(maker)
            terms += _terms(maker, users, kept, inner)
        else:
            terms.append(value)
    return terms


def _partial(value: Value, context: Context) -> tuple[tuple[str, str], ...]:
    """Over what a value is partial where it is made; seen through ops that only move elements."""
    maker = value.node
    while maker is not None and len(maker.operands) == 1 and context.cache.rule(maker).moves_only:
        value = maker.operands[0]
        maker = value.node
    if maker is None or maker.strategy is None:
        return ()
    return maker.strategy.results[maker.outs.index(value)].partial


def _rebuild(root: Node, groups: list[list[Value]], rewriter: Rewriter) -> Value:
    """The sum of the groups' sums, in the place of ``root``; its adds are computed as that was."""

    def add(a: Value, b: Value) -> Value:
        node = rewriter.before(root, Rewriter.make(ADD, (a, b), root.outs[0].type, like=root))
        node.strategy, node.outs[0].spec = root.strategy, root.outs[0].spec
        return node.outs[0]

    sums = []
    for group in groups:
        total = group[0]
        for term in group[1:]:
            total = add(total, term)
        sums.append(total)
    total = sums[0]
    for other in sums[1:]:
        total = add(total, other)
    rewriter.replace(root.outs[0], total)
    rewriter.erase(root)
    return total
