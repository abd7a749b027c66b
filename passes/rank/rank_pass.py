"""Rank passes: from one rank's program to a better one, before it runs.

A rank pass is a frozen dataclass whose fields are its options, as a pass on the planned graph is. It sees one rank's
program alone; so that all ranks stay in step it must leave the order of collectives as it is, and nothing that it does
may hang on the rank's number. What they leave is validated, and the pass that left it wrong is named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from shardfx.ir.cost.machine import Machine
from shardfx.ir.errors import Error
from shardfx.ir.graph import Graph, OutputKind
from shardfx.ir.program.lower import SharedLowering
from shardfx.ir.program.rank_program import RankProgram
from shardfx.ir.program.validate_program import collective_order, validate_program
from shardfx.passes.base import PassError, check_requires
from shardfx.passes.options import options_of


@dataclass
class RankContext:
    """What rank passes know beside the program: the planned graph, the kind of device, what they noted, the machine
    that is planned for, and what was established of the program before."""

    graph: Graph
    device: str = "cpu"
    notes: list[str] = field(default_factory=list)
    machine: Machine = field(default_factory=lambda: Machine.of(None))
    established: frozenset[str] = frozenset()
    _common: dict[frozenset[OutputKind], SharedLowering] = field(default_factory=dict)

    def common(self, kinds: Iterable[OutputKind]) -> SharedLowering:
        """What the programs of the ranks have in common that give outputs of some kinds."""
        which = frozenset(kinds)
        return self._common.setdefault(which, SharedLowering(self.graph, which))


@dataclass(frozen=True)
class RankPass:
    """One thing that may be done to a rank's program.

    Subclass it as a frozen dataclass, give it a ``name``, and write :meth:`run`::

        @dataclass(frozen=True)
        class CountCalls(sx.RankPass):
            name: ClassVar[str] = "count-calls"

            def run(self, program, context):
                context.notes.append(f"{len(program.graph.nodes)} calls on rank {program.rank}")
                return False
    """

    name: ClassVar[str] = ""
    requires: ClassVar[frozenset[str]] = frozenset()
    establishes: ClassVar[frozenset[str]] = frozenset()

    def run(self, program: RankProgram, context: RankContext) -> bool:
        """Change ``program.graph``, a ``torch.fx.Graph``; says whether it did."""
        raise NotImplementedError

    def __str__(self) -> str:
        return f"{self.name}{options_of(self)}"


def run_rank_passes(
    program: RankProgram,
    passes: Sequence[RankPass],
    context: RankContext,
    again: Callable[[], RankProgram] | None = None,
) -> RankProgram:
    """Run ``passes`` over ``program`` in place, validating what they leave; gives the program.

    ``again`` makes the program anew: then it is validated once, at its end, and only if it is wrong there once more,
    after each pass. Without it after each pass at once.

    Raises:
        Error: a pass stands too early, fails, or leaves a program that is wrong: naming the pass, the node and what is
            wrong with it.
    """
    if again is None:
        return _run(program, passes, context, each_validated=True)
    try:
        return _run(program, passes, context, each_validated=False)
    except Exception:  # by one of the passes: the first that does harm is to be named
        return _run(again(), passes, context, each_validated=True)


def _run(
    program: RankProgram, passes: Sequence[RankPass], context: RankContext, *, each_validated: bool
) -> RankProgram:
    established = set(context.established)
    ran: list[str] = []
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
            _same_order(order, collective_order(program), each, program)
        ran.append(each.name)
    if not passes:
        validate_program(program, ends=False)
    return program


def _same_order(before: Sequence[str], after: Sequence[str], each: RankPass, program: RankProgram) -> None:
    """The collectives of each group keep their order: else ranks would wait for one another."""
    if before == after:
        return
    at = next((i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), min(len(before), len(after)))
    raise Error(
        f"rank pass {each.name!r} changes the order of collectives",
        where=f"rank {program.rank}, collective {at}",
        expected=before[at] if at < len(before) else "no further collective",
        got=after[at] if at < len(after) else "no further collective",
        remedy="keep the order of collectives: it must be the same on all ranks (passes on the graph may change it)",
    )
