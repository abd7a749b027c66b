"""The pass pipeline: its order is checked before anything runs, the graph after each pass.

The order is data: :data:`ORDER`. A pass of somebody else stands in a slot (``before``, ``after``), or takes the place
of a built-in one that has its name; who names ``propagate`` among his own says what the whole pipeline is.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence

from shardfx.ir.errors import Error, did_you_mean
from shardfx.ir.graph import Graph
from shardfx.ir.validate import Validator

from .base import Pass, PassContext, PassError, check_requires
from .communication import BucketComm, CastPlacement, DuplicateViews, Order, Partition
from .context_parallel import ContextParallel, RematerializeKeys
from .embedding_tables import EmbeddingTables
from .expert_parallel import ExpertParallel
from .memory import Offload, Recompute, RematerializeCasts, RematerializeGathers, TableRows, Zero
from .sharding import BindHints, Propagate, Reassociate, SumPlacement
from .space import Spatial
from .stages import Loops, Pipeline
from .unfold_repeats import UnfoldRepeats

ORDER: tuple[type[Pass], ...] = (
    *(BindHints, Propagate, ContextParallel, EmbeddingTables, ExpertParallel, Zero, CastPlacement, Reassociate),
    *(SumPlacement, Spatial),
    *(DuplicateViews, Partition, UnfoldRepeats, Pipeline, Recompute, RematerializeGathers, RematerializeCasts),
    *(RematerializeKeys, TableRows, BucketComm, Loops, Order, Offload),
)
"""The built-in passes, in the order in which they run."""
BUILT_IN: dict[str, type[Pass]] = {each.name: each for each in ORDER}
ON_REQUEST = frozenset(
    each.name
    for each in (
        *(ContextParallel, Zero, Pipeline, Recompute, RematerializeGathers, RematerializeCasts, TableRows),
        *(RematerializeKeys, Offload),
    )
)
"""Those of them that are left out where nobody asks for them."""
WITH_ROOM = (EmbeddingTables, ExpertParallel)
"""Passes that plan with room for so many rows, as the field ``room`` of each says."""
WHERE = "Hints(passes=...)"


def may_leave_out(passes: Sequence[Pass]) -> bool:
    """Whether passes may run on a graph that leaves out equal blocks: one puts them back, and before it are only those
    built-in ones that do the same to all of them."""
    kinds, unfold = [type(each) for each in passes], ORDER.index(UnfoldRepeats)
    return UnfoldRepeats in kinds and set(kinds[: kinds.index(UnfoldRepeats)]) <= set(ORDER[:unfold])


def is_full_pipeline(passes: Iterable[Pass]) -> bool:
    """Whether a user's passes are a full pipeline: ``propagate`` is among them."""
    return any(isinstance(each, Propagate) for each in passes)


def arrange(built_in: Sequence[Pass], custom: Sequence[Pass]) -> tuple[Pass, ...]:
    """The pipeline: the built-in passes, and the user's own, each in its slot.

    Raises:
        Error: a slot is next to a pass that is not there, a built-in pass is given twice.
    """
    if is_full_pipeline(custom):
        return tuple(custom)
    own = [each for each in custom if each.name in BUILT_IN]
    names = [each.name for each in own if not each.repeats]
    for name in names:
        if names.count(name) > 1:
            raise Error(f"pass {name!r} is given twice", where=WHERE, expected="each built-in pass once", got=names)
    line = [each for each in built_in if each.name not in {new.name for new in own}]
    for each in own:
        later = ORDER[ORDER.index(BUILT_IN[each.name]) + 1 :]
        line.insert(next((at for at, other in enumerate(line) if isinstance(other, later)), len(line)), each)
    for each in custom:
        if each.name not in BUILT_IN:
            line.insert(_slot(each, line), each)
    return tuple(line)


def _slot(each: Pass, line: Sequence[Pass]) -> int:
    """The index at which a pass is inserted: behind those that have the same slot already."""
    names = [other.name for other in line]
    near = each.after or each.before
    if near not in names:
        remedy = did_you_mean(near, names)
        what = f"pass {each.name!r} stands {'after' if each.after else 'before'} a pass that is not there"
        raise Error(what, where=WHERE, expected=f"one of {', '.join(names)}", got=near, remedy=remedy)
    at = names.index(near)
    if each.after:
        at += 1
        while at < len(line) and line[at].after == near:
            at += 1
    return at


def check_order(passes: Iterable[Pass], established: Iterable[str] = (), wanted: Iterable[str] = ()) -> None:
    """Check that each pass's requirements are established by an earlier one, or before; and so is what is ``wanted``.

    Raises:
        Error: naming the pass, what it lacks, and which passes stand before it.
    """
    known, before = set(established), list[str]()
    for each in passes:
        check_requires(each, known, before)
        known |= each.establishes
        before.append(each.name)
    lacking = set(wanted) - known
    if lacking:
        expected, got = f"passes that establish {', '.join(sorted(lacking))}", ", ".join(before) or "no passes"
        remedy = "start from shardfx.passes.default_passes(hints)"
        raise Error("the pipeline is incomplete", where=WHERE, expected=expected, got=got, remedy=remedy)


def run_passes(
    graph: Graph,
    passes: Iterable[Pass],
    context: PassContext,
    on_pass: Callable[[Pass, Graph], None] | None = None,
    each_validated: bool = True,
) -> None:
    """Run ``passes`` over ``graph``, verifying it after each; ``on_pass`` sees the graph after each pass."""
    for each in steps(graph, passes, context, each_validated):
        if on_pass is not None:
            on_pass(each, graph)


def steps(graph: Graph, passes: Iterable[Pass], context: PassContext, each_validated: bool = True) -> Iterator[Pass]:
    """Run ``passes`` over ``graph`` one by one; yields each when it has run and the graph was validated.

    Where not ``each_validated``, it is validated behind the last one, and behind somebody's own: enough to know that
    something is wrong, and not which pass did it.

    Raises:
        Error: the order is wrong; a pass failed, or left a graph that is none.
    """
    passes = tuple(passes)
    check_order(passes, graph.established)
    ran, validator = list[str](), Validator(context.rules)
    for number, each in enumerate(passes):
        known, started = set(graph.nodes), time.perf_counter()
        try:
            each.run(graph, context)
        except Exception as error:
            if isinstance(error, Error) and isinstance(each, ORDER):
                raise  # a user's mistake, found where it belongs
            raise _blamed(each, error, ran) from error
        for node in graph.nodes:
            if node not in known and not node.made_by and not each.copies:
                node.made_by = each.name
        graph.established |= each.establishes
        if each_validated or number == len(passes) - 1 or not isinstance(each, ORDER):
            validator.check(graph, after=each.name)
        context.seconds[each.name] = context.seconds.get(each.name, 0.0) + time.perf_counter() - started
        ran.append(each.name)
        yield each


def _blamed(each: Pass, error: Exception, ran: Sequence[str]) -> PassError:
    """An error that a pass raised, with the pass's name and the line of its file."""
    own = getattr(sys.modules.get(type(each).__module__), "__file__", None)
    frames = traceback.extract_tb(error.__traceback__)
    line = next((frame for frame in reversed(frames) if frame.filename == own), frames[-1])
    place = f"{line.filename}:{line.lineno} in {line.name}; after {', '.join(ran) or 'capture'}"
    if isinstance(error, Error):
        where = f"{error.where}; {place}" if error.where else place
        what = f"pass {each.name!r}: {error.what}"
        return PassError(what, where=where, expected=error.expected, got=error.got, remedy=error.remedy)
    what = f"pass {each.name!r} failed: {type(error).__name__}: {error}"
    remedy = "if it is your own pass, see the traceback above; else please report it"
    return PassError(what, where=place, remedy=remedy)
