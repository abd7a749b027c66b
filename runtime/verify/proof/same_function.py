"""Are two graphs the same function of their inputs? Sums reordered, and decompositions, aside (see :mod:`.terms`)."""

from __future__ import annotations

from collections.abc import Iterable

from shardfx.ir.graph import Graph, Output
from shardfx.ir.rules.book import RuleBook
from shardfx.runtime.verify.fault import Fault

from .terms import Universe, Unjustified, build, differing


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
    guards, kept = ({o.name: o.guard for o in graph.outputs if o.guard is not None} for graph in (before, after))
    lost = next((name for name in guards if guards[name] != kept.get(name)), None)
    if lost is not None:
        changed = "expects something else" if lost in kept else "is gone"
        return Fault(f"a guard of the captured graph {changed} in the planned one", f"guard {lost}")
    wanted, there = ({(o.kind, o.name) for o in graph.outputs} for graph in (before, after))
    if outputs is None and wanted != there:
        kind, name = min(wanted ^ there)
        lacks = "lacks an output" if (kind, name) in wanted else "has an output that the captured one lacks"
        return Fault(f"the planned graph {lacks}", f"{kind.value} {name}")
    try:
        universe = universe or build(before, after, book)
    except Unjustified as error:
        return Fault(str(error))
    other = differing(universe, after.outputs if outputs is None else outputs)
    if other is not None:
        what = "the planned graph computes another function of the inputs than the captured one"
        return Fault(what, f"{other.kind.value} {other.name}", None, other.value.name, str(other.value.where))
    return universe
