"""Are two graphs the same function of their inputs? Sums reordered, and decompositions, aside (see :mod:`.terms`)."""

from __future__ import annotations

from collections.abc import Iterable

from shardfx.ir.graph import Graph, Output, Value, op_name
from shardfx.ir.ops.table import OwnOp
from shardfx.ir.rules.book import RuleBook
from shardfx.runtime.verify.decomposition import Unjustified
from shardfx.runtime.verify.fault import Fault
from shardfx.runtime.verify.forms.terms_by_laws import TermsByLaws
from shardfx.runtime.verify.interface import interface_fault

from .terms import Universe, build, differing, is_sum


def same_function(
    before: Graph,
    after: Graph,
    book: RuleBook,
    outputs: Iterable[Output] | None = None,
    universe: Universe | None = None,
) -> Universe | Fault:
    """The terms of both graphs, if ``outputs`` (by default all) are the same terms in both; or the fault that one is
    not.

    Communication is taken as nothing: that placements fit together is the validator's, that the ranks' programs keep to
    them the proof's of these programs. ``universe`` is :func:`.terms.build`'s, if it is there already.
    """
    claim = interface_fault(before, after) if outputs is None else None
    if claim is not None:
        return claim
    wanted = after.outputs if outputs is None else list(outputs)
    try:
        universe = universe or build(before, after, book)
        if differing(universe, wanted) is not None:  # perhaps since ops of the captured program were made one
            universe = build(before, after, book, fused=True)
        if differing(universe, wanted) is not None:
            universe = _by_laws(before, after, book) or universe
    except Unjustified as error:
        return Fault(str(error))
    other = differing(universe, wanted)
    return universe if other is None else _blamed(universe, after, other)


def _by_laws(before: Graph, after: Graph, book: RuleBook) -> Universe | None:
    """The terms of both graphs in normal form; None where a dim has no size yet."""
    values = [v for graph in (before, after) for node in graph.nodes for v in node.outs]
    if not all(isinstance(size, int) for value in values for size in value.type.shape):
        return None
    return build(before, after, book, terms=TermsByLaws())


def _blamed(universe: Universe, after: Graph, output: Output) -> Fault:
    """The first node behind an output that the captured program does not have."""
    name = f"{output.kind.value} {output.name}"
    behind = {output.value}
    for node in reversed(after.nodes):
        if behind & set(node.outs):
            behind.update(node.operands)
    adds: set[Value] = set()
    """What is only a part of a sum: in another order than that of the captured program it is there all the same."""
    for node in reversed(after.nodes):
        on = isinstance(node.op, OwnOp) or is_sum(node)
        for value in node.operands if on else ():
            if is_sum(node) or adds & set(node.outs):
                adds.add(value)
    for node in after.nodes:
        unknown = [v for v in node.outs if v in behind and universe.of[v] not in universe.captured]
        if unknown and not isinstance(node.op, OwnOp) and not (is_sum(node) and unknown[0] in adds):
            what = "the planned graph computes another function of the inputs than the captured one"
            what += f", which has no such {op_name(node.op)}"
            return Fault(what, name, None, unknown[0].name, str(node.where))
    held = universe.terms.names[universe.of[output.value]]
    what = f"the planned graph computes another function of the inputs than the captured one: it returns a {held}"
    return Fault(what, name, None, output.value.name, str(output.value.where))
