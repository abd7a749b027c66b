"""From a model, a mesh and hints to a plan: capture, then the pipeline of passes that the hints ask for."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import nn

from shardfx.ir.capture.trace import Captured, capture
from shardfx.ir.graph import Graph
from shardfx.ir.mesh import Mesh
from shardfx.ir.ops.redistribute import Redistribution
from shardfx.ir.rules.book import RuleBook
from shardfx.ir.unfold import Irregular
from shardfx.passes.unfold_repeats import PLANNED_WHOLE, of_those_there, why_whole

from .compiled import Compiled, whole
from .hints import Hints
from .passes import Context, FuseComm, Partition, Pass, Propagate, UnfoldRepeats, run_passes
from .plan import PlannedSpecs
from .plugins import as_passes


def pipeline(hints: Hints) -> tuple[Pass, ...]:
    """The passes that hints ask for, in order: a pure function of the hints (and of the plugins that they name)."""
    given = as_passes(hints.passes)
    built_in: list[Pass] = [Propagate(), Partition(), UnfoldRepeats()]
    if hints.fuse_mb > 0 and not any(isinstance(p, FuseComm) for p in given):
        built_in.append(FuseComm(mb=hints.fuse_mb))
    return (*built_in, *given)


@contextmanager
def no_collection() -> Iterator[None]:
    """Passes make many small objects and no garbage cycles: walking them again and again takes a third of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def compile_model(
    model: nn.Module,
    mesh: Mesh,
    hints: Hints,
    rules: RuleBook,
    on_pass: Callable[[Pass, Graph], None] | None = None,
) -> Compiled:
    """Capture ``model`` and run the passes."""
    passes = pipeline(hints)
    with no_collection():
        captured = capture(model, mesh, args=hints.args, kwargs=hints.kwargs, loss=hints.loss, targets=hints.targets)
    if isinstance(hints.specs, PlannedSpecs):
        hints.specs.plan.check(whole(captured.graph))
    with no_collection():
        graph, context = plan_graph(captured, hints, rules, passes, on_pass)
    if isinstance(hints.specs, PlannedSpecs):
        others = hints.specs.plan.differences(graph)
        if others:
            context.notes.append(f"{len(others)} ops came out otherwise than in the plan given: {others[0]}")
    return Compiled(hints, captured, graph, context, passes)


def plan_graph(
    captured: Captured,
    hints: Hints,
    rules: RuleBook,
    passes: tuple[Pass, ...],
    on_pass: Callable[[Pass, Graph], None] | None = None,
) -> tuple[Graph, Context]:
    """A copy of the captured graph after the passes, and what they noted.

    Equal blocks are planned once. If a hint tells them apart, or they turn out to be planned apart, all of them are,
    and the passes run again from the first; the notes say so.
    """
    graph, context = captured.graph.copy(), new_context(hints, captured, captured.graph.mesh, rules)
    why = why_whole(graph, hints.specs, captured.aliases)
    if not why:
        context.specs = of_those_there(graph, hints.specs)
        try:
            run_passes(graph, passes, context, on_pass)
            return graph, context
        except Irregular as error:
            why = error.what
    graph, context = whole(captured.graph), new_context(hints, captured, captured.graph.mesh, rules)
    context.notes.append(f"{PLANNED_WHOLE} ({why})")
    run_passes(graph, passes, context, on_pass)
    return graph, context


def new_context(hints: Hints, captured: Captured, mesh: Mesh, rules: RuleBook) -> Context:
    """What the passes begin with."""
    notes = list(captured.notes)
    return Context(
        rules, Redistribution(mesh), notes=notes, specs=hints.specs, aliases=captured.aliases, strict=hints.strict
    )


def after_each_pass(compiled: Compiled) -> dict[str, Graph]:
    """The graph after each pass, by the pass's name: the passes run again, on a copy of the captured graph."""
    found: dict[str, Graph] = {}

    def keep(each: Pass, graph: Graph) -> None:
        again = 1
        while (name := each.name if again == 1 else f"{each.name}-{again}") in found:
            again += 1
        found[name] = whole(graph)

    with warnings.catch_warnings(), no_collection():
        warnings.simplefilter("ignore")  # they were said the first time
        plan_graph(compiled.captured, compiled.hints, compiled.context.rules, compiled.passes, keep)
    return found
