"""Running passes in order: the order is checked before anything runs, the graph after each pass."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from shardfx.ir.errors import Error
from shardfx.ir.graph import Graph
from shardfx.ir.validate import Validator

from .base import Context, Pass, PassError
from .communication import DuplicateViews, FuseComm, Partition
from .sharding import BindHints, Propagate, Reassociate, SumPlacement

ORDER: tuple[type[Pass], ...] = (
    BindHints,
    Propagate,
    Reassociate,
    SumPlacement,
    DuplicateViews,
    Partition,
    FuseComm,
)
"""The built-in passes, in the order in which they run."""
BUILT_IN: dict[str, type[Pass]] = {each.name: each for each in ORDER}


def check_order(passes: Iterable[Pass]) -> None:
    """Every pass's requirements are established by an earlier one.

    Raises:
        Error: naming the pass, what it lacks, and which passes establish that.
    """
    established: set[str] = set()
    before: list[str] = []
    for each in passes:
        if not isinstance(each, Pass):
            raise Error(
                "this is not a pass",
                where="Hints(passes=...)",
                expected="an instance of a subclass of shardfx.Pass, such as MyPass()",
                got=repr(each),
            )
        missing = each.requires - established
        if missing:
            raise Error(
                f"pass {each.name!r} stands too early",
                expected=f"{', '.join(sorted(missing))} established before it",
                got=f"{', '.join(before) or 'nothing'} before it",
                remedy="move it behind the pass that establishes that",
            )
        established |= each.establishes
        before.append(each.name)


def run_passes(
    graph: Graph,
    passes: Iterable[Pass],
    context: Context,
    on_pass: Callable[[Pass, Graph], None] | None = None,
) -> None:
    """Run ``passes`` over ``graph``, verifying it after each; ``on_pass`` sees the graph after each pass."""
    passes = tuple(passes)
    check_order(passes)
    ran: list[str] = []
    validator = Validator(context.rules)
    for each in passes:
        known = set(graph.nodes)
        started = time.perf_counter()
        try:
            each.run(graph, context)
        except Error:
            raise
        except Exception as error:
            raise PassError(
                f"pass {each.name!r} failed: {type(error).__name__}: {error}",
                where=f"after {', '.join(ran) or 'capture'}",
                remedy="if it is your own pass, see the traceback above; else please report it",
            ) from error
        graph.established |= each.establishes
        for node in graph.nodes:
            if node not in known and not node.made_by:
                node.made_by = each.name
        validator.check(graph, after=each.name)
        context.seconds[each.name] = context.seconds.get(each.name, 0.0) + time.perf_counter() - started
        ran.append(each.name)
        if on_pass is not None:
            on_pass(each, graph)
