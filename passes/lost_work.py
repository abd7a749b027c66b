"""What is computed whole on every rank of a data axis, though hints cut the batch over it: said in a warning.

A batch of 4 does not feed three ranks, and an op in the middle of a mixture of experts may need all tokens: what comes
behind is then the same work on each rank of the axis.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable

from shardfx.ir.cost.flops import flops_of
from shardfx.ir.errors import ShardfxWarning
from shardfx.ir.graph import Graph, Node, op_name
from shardfx.ir.ops.alike import alike
from shardfx.ir.ops.traits import is_heavy

WORTH_SAYING = 0.01
"""Of all arithmetic of the program, the share from which on a loss is said."""


def report_lost_work(graph: Graph, axes: Iterable[str]) -> None:
    """Warn, once for each of these (data) axes, of the arithmetic that is not shared between its ranks."""
    priced: dict[object, int] = {}
    flops: dict[Node, int] = {}
    for node in graph.nodes:
        if is_heavy(node):
            key = alike(node)
            if key not in priced:
                priced[key] = flops_of(node)
            flops[node] = priced[key]
    total = sum(flops.values())
    for axis in sorted(axes):
        size = graph.mesh.extent((axis,))
        if size == 1:
            continue
        behind = _behind(graph, axis)
        lost = [node for node in flops if node in behind and not _uses(node, axis)]
        work = sum(flops[node] for node in lost)
        if work <= WORTH_SAYING * total:
            continue
        cause = _cause(lost[0], behind, axis)
        text = (
            f"not shared over {axis}: {work / total:.0%} of the arithmetic, {len(lost)} ops from {op_name(lost[0].op)} "
            f"({lost[0].where} {lost[0].where.code}) on, is done whole on each of {size} ranks: {work:.3g} FLOPs in "
            f"place of {work / size:.3g}. It begins at {op_name(cause.op)} ({cause.where} {cause.where.code}), which "
            "needs more than a rank's part, or has too little for all ranks"
        )
        graph.notes.append(text)
        warnings.warn(text, ShardfxWarning, stacklevel=2)


def _behind(graph: Graph, axis: str) -> set[Node]:
    """The nodes that are made of an input whose hint cuts it over the axis."""
    cut = {
        given.value
        for given in graph.inputs
        if given.value.hint is not None and given.value.type.ndim and axis in given.value.hint.dims[0].axes
    }
    found: set[Node] = set()
    for node in graph.nodes:
        if any(value in cut for value in node.operands):
            found.add(node)
            cut.update(node.outs)
    return found


def _cause(node: Node, behind: set[Node], axis: str) -> Node:
    """The first of the ops before a node by which it is not shared."""
    while True:
        makers = (value.node for value in node.operands)
        before = next((each for each in makers if each in behind and each is not None and not _uses(each, axis)), None)
        if before is None:
            return node
        node = before


def _uses(node: Node, axis: str) -> bool:
    made = node.strategy
    assert made is not None
    return any(axis in axes for _, axes in made.cuts)
