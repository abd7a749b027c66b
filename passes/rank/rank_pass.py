"""Rank passes: transformations of one rank's program, before it runs.

A rank pass is a frozen dataclass whose fields are its options. It sees one rank's program alone; so that ranks stay in
step it keeps the order of collectives, and nothing that it does depends on the rank's number. What passes leave is
validated, and the pass that left it wrong is named.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from shardfx.ir.errors import Error
from shardfx.ir.graph import Graph, OutputKind, Phase
from shardfx.ir.ops.local_ops import row_of
from shardfx.ir.program.lower import SharedLowering
from shardfx.ir.program.rank_program import RankProgram, planned_node
from shardfx.ir.program.validate_program import collective_order, validate_program
from shardfx.passes.base import NamedPass, PassError, check_requires


@dataclass
class RankContext:
    """The context of rank passes: the planned graph, the kind of device, their notes, and the established
    invariants."""

    graph: Graph
    device: str = "cpu"
    notes: list[str] = field(default_factory=list)
    established: frozenset[str] = frozenset()
    _common: dict[frozenset[OutputKind], SharedLowering] = field(default_factory=dict)

    def common(self, kinds: Iterable[OutputKind]) -> SharedLowering:
        """The lowering that the programs of all ranks share, for outputs of some kinds."""
        which = frozenset(kinds)
        return self._common.setdefault(which, SharedLowering(self.graph, which))


@dataclass(frozen=True)
class RankPass(NamedPass):
    """A transformation of a rank's program.

    Subclass it as a frozen dataclass, give it a ``name``, and write :meth:`run`::

        @dataclass(frozen=True)
        class CountCalls(sx.RankPass):
            name: ClassVar[str] = "count-calls"

            def run(self, program, context):
                context.notes.append(f"{len(program.graph.nodes)} calls on rank {program.rank}")
                return False
    """

    def run(self, program: RankProgram, context: RankContext) -> bool:
        """Transform ``program.graph``, a ``torch.fx.Graph``; returns whether it changed."""
        raise NotImplementedError


def is_update(call: fx.Node) -> bool:
    """Whether a call belongs to an optimizer's step."""
    planned = planned_node(call)
    return planned is not None and planned.phase is Phase.UPDATE


def waits(call: fx.Node) -> bool:
    """Whether a call waits for a started transfer."""
    row = row_of(call.target)
    return row is not None and row.waits


def origin(call: fx.Node) -> dict[str, Any]:
    """Metadata for another call of the same planned node."""
    return {key: value for key, value in call.meta.items() if key == "shardfx"}


def call_before(anchor: fx.Node, target: Any, *args: Any, like: fx.Node | None = None, **kwargs: Any) -> fx.Node:
    """Insert a call before ``anchor``, of the planned node of ``like`` (or of ``anchor``)."""
    with anchor.graph.inserting_before(anchor):
        made = anchor.graph.call_function(target, args, kwargs)
    made.meta = origin(like or anchor)
    return made


def call_after(anchor: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """Insert a call after ``anchor``, of its planned node."""
    with anchor.graph.inserting_after(anchor):
        made = anchor.graph.call_function(target, args, kwargs)
    made.meta = origin(anchor)
    return made


def run_rank_passes(
    program: RankProgram, passes: Sequence[RankPass], context: RankContext, each_validated: bool = True
) -> RankProgram:
    """Run ``passes`` over ``program`` in place; returns the program, validated after each pass, or after the last one.

    Raises:
        Error: a pass stands too early, fails, or leaves a program that is wrong: naming the pass and the node.
    """
    established, ran = set(context.established), list[str]()
    order = collective_order(program)
    for number, each in enumerate(passes):
        check_requires(each, established, ran, "rank pass")
        try:
            changed = each.run(program, context)
        except Error:
            raise
        except Exception as error:
            raise PassError(
                f"rank pass {each.name!r} failed: {type(error).__name__}: {error}",
                where=f"rank {program.rank}, after {', '.join(ran) or 'lowering'}",
                remedy="if it is your own pass, see the traceback above; else please report it",
            ) from error
        established |= each.establishes
        last = number == len(passes) - 1
        if last or (changed and each_validated):
            validate_program(program, after=each.name, ends=last and "OWN_OUTPUTS" in established)
            _check_order(order, collective_order(program), each, program)
        ran.append(each.name)
    if not passes:
        validate_program(program, ends=False)
    return program


def _check_order(before: Sequence[str], after: Sequence[str], each: RankPass, program: RankProgram) -> None:
    """Raise if the collectives of a group are reordered: ranks would deadlock."""
    if before == after:
        return
    at = next((i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), min(len(before), len(after)))
    expected, got = (names[at] if at < len(names) else "no further collective" for names in (before, after))
    raise Error(
        f"rank pass {each.name!r} changes the order of collectives",
        where=f"rank {program.rank}, collective {at}",
        expected=expected,
        got=got,
        remedy="keep the order of collectives: it must be the same on all ranks (passes on the graph may change it)",
    )
