"""From a model, a mesh and hints to a plan: capture, then the pipeline of passes that the hints ask for."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import nn

from shardfx.ir.capture.trace import capture
from shardfx.ir.graph import Graph
from shardfx.ir.mesh import Mesh
from shardfx.ir.ops.redistribute import Redistribution
from shardfx.ir.rules.book import RuleBook

from .compiled import Compiled
from .hints import Hints
from .passes import BUILT_IN, Context, FuseComm, Pass, Propagate, run_passes
from .plan import PlannedSpecs
from .plugins import as_passes


def pipeline(hints: Hints) -> tuple[Pass, ...]:
    """The passes that hints ask for, in order: a pure function of the hints (and of the plugins that they name)."""
    given = as_passes(hints.passes)
    options: dict[str, Pass] = {"propagate": Propagate(strict=hints.strict), "fuse-comm": FuseComm(mb=hints.fuse_mb)}
    built_in = [options[name] if name in options else kind() for name, kind in BUILT_IN.items()]
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
        hints.specs.plan.check(captured.graph)
    before = captured.graph.copy()
    context = new_context(hints, captured.graph, rules)
    with no_collection():
        run_passes(captured.graph, passes, context, on_pass)
    if isinstance(hints.specs, PlannedSpecs):
        others = hints.specs.plan.differences(captured.graph)
        if others:
            captured.graph.notes.append(f"{len(others)} ops came out otherwise than in the plan given: {others[0]}")
    return Compiled(hints, captured, before, captured.graph, context, passes)


def new_context(hints: Hints, graph: Graph, rules: RuleBook) -> Context:
    """What the passes begin with."""
    return Context(rules, Redistribution(graph.mesh), specs=hints.specs)


def after_each_pass(compiled: Compiled) -> dict[str, Graph]:
    """The graph after each pass, by the pass's name: the passes run again, on a copy of the captured graph."""
    graph = compiled.before.copy()
    context = new_context(compiled.hints, graph, compiled.context.rules)
    found: dict[str, Graph] = {}

    def keep(each: Pass, graph: Graph) -> None:
        again = 1
        while (name := each.name if again == 1 else f"{each.name}-{again}") in found:
            again += 1
        found[name] = graph.copy()

    with warnings.catch_warnings(), no_collection():
        warnings.simplefilter("ignore")  # they were said the first time
        run_passes(graph, compiled.passes, context, keep)
    return found
