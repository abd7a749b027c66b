"""``Pipeline(stages=None)`` under a budget: the split into stages whose slowest is fastest, of those that fit.

The plan whose stages cost about the same is made first. Where what its blocks keep (:mod:`.block_memory`) says that a
rank holds more than it may, the best split that fits is sought (:mod:`shardfx.passes.stages.best_split`), planned, and
its ranks' programs replayed; by how much they hold more or less than was thought the next one is sought with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from shardfx.compile import default_passes, plan_graph
from shardfx.compiled import Compiled
from shardfx.ir.graph import Graph, OutputKind
from shardfx.ir.text.printer import size_text
from shardfx.passes.loops.make_schedule import AUTO
from shardfx.passes.stages import Found, stages_as_planned
from shardfx.passes.stages.best_split import Room, best_split, roomiest_split

from .block_memory import BlockMemory
from .budget import Foresight, budget_of, first_ranks

TRIES = 4
"""So many splits are planned at most."""
HOPED = 0.2
"""Before a plan is known, ranks are taken to hold less by so much of the budget than was counted, for what is there in
passing is counted as if an iteration held most of it beside all that it keeps."""


@dataclass(frozen=True)
class DimSharding:
    """A plan, where its stages begin, how long the slowest takes, and what each rank along the axis holds."""

    plan: Compiled
    firsts: tuple[int, ...]
    seconds: float
    peaks: tuple[int, ...]

    def fits(self, budget: int) -> bool:
        """Whether no rank holds more."""
        return max(self.peaks) <= budget


def staged(compiled: Compiled, foresight: Foresight) -> Compiled:
    """The plan whose stages fit into what a rank may hold; itself, where nothing is to be chosen, or all fits.

    Where no split fits, the plan is the one whose fullest rank holds least; but where it is also to be chosen what is
    made again, or how many iterations are live, it is left to that.
    """
    pipeline, planned, budget = compiled.hints.pipeline, compiled.after.pipeline, budget_of(compiled.hints)
    trains = any(output.kind is OutputKind.GRADIENT for output in compiled.after.outputs)
    if pipeline is None or planned is None or pipeline.stages is not None or budget is None or not trains:
        return compiled
    search = _Search(compiled, foresight, budget)
    if not search.balanced:
        return compiled
    found = search.found()
    if found is None:
        others = compiled.hints.recompute == "auto" or pipeline.schedule == AUTO
        return compiled if others else search.roomiest()
    if found.plan is not compiled:
        found.plan.after.notes.append(search.note(found))
    return found.plan


class _Search:
    """The splits that were planned, and what was learnt of them."""

    def __init__(self, compiled: Compiled, foresight: Foresight, budget: int) -> None:
        assert compiled.after.pipeline is not None
        self.compiled, self.foresight, self.budget = compiled, foresight, budget
        self.homes = compiled.after.pipeline.homes
        self.blocks = BlockMemory(compiled.after, compiled.after.pipeline)
        self.more = [-HOPED * budget] * (max(self.homes) + 1)
        """By rank: what it holds beyond what was thought."""
        self.known: dict[tuple[int, ...], DimSharding] = {}

    @property
    def room(self) -> Room:
        """What ranks may hold, with what is known by now."""
        return Room(self.homes, [self.budget - more for more in self.more], self.blocks.held)

    @cached_property
    def balanced(self) -> tuple[int, ...]:
        """Where the stages begin of the plan that is given; empty where they are no stretches of blocks."""
        return first_blocks(self.compiled.after, self.blocks.blocks.names)

    def found(self) -> DimSharding | None:
        """The fastest split that fits, of those that were planned."""
        thought = self.room.of(self.balanced, self.blocks.count)
        fits = all(held <= budget for held, budget in zip(thought, self.room.budgets, strict=True))
        if fits and (made := self._planned(self.balanced)).fits(self.budget):
            return made
        for _ in range(TRIES):
            firsts = best_split(self.blocks.costs, len(self.homes), self.blocks.sent, self.room)
            if firsts is None or tuple(firsts) in self.known:
                break
            fitting = self._fitting()
            if fitting is not None and self._seconds(firsts) >= fitting.seconds:
                break
            self._planned(tuple(firsts))
        return self._fitting()

    def _fitting(self) -> DimSharding | None:
        fitting = (split for split in self.known.values() if split.fits(self.budget))
        return min(fitting, key=lambda split: split.seconds, default=None)

    def roomiest(self) -> Compiled:
        """The split whose fullest rank holds least."""
        firsts, _ = roomiest_split(self.blocks.costs, len(self.homes), self.room)
        made = self.known.get(tuple(firsts)) or self._planned(tuple(firsts))
        return min((made, *self.known.values()), key=lambda split: max(split.peaks)).plan

    def _planned(self, firsts: tuple[int, ...]) -> DimSharding:
        """Plan a split, and learn from it what ranks hold."""
        plan = self.compiled if firsts == self.balanced else self._with(firsts)
        held = self.foresight.peaks(plan)
        thought = self.room.of(firsts, self.blocks.count)
        self.more = [a - b for a, b in zip(held, thought, strict=True)]
        self.known[firsts] = DimSharding(plan, firsts, self._seconds(firsts), held)
        return self.known[firsts]

    def _with(self, firsts: Sequence[int]) -> Compiled:
        hints = self.compiled.hints
        assert hints.pipeline is not None
        counts = Found(b - a for a, b in pairwise((*firsts, self.blocks.count)))
        hints = replace(hints, pipeline=replace(hints.pipeline, stages=counts))
        passes = default_passes(hints)
        graph, context = plan_graph(self.compiled.captured, hints, self.compiled.context.rules, passes)
        return Compiled(hints, self.compiled.captured, graph, context, passes)

    def _seconds(self, firsts: Sequence[int]) -> float:
        """What the slowest stage takes."""
        return max(sum(self.blocks.costs[a:b]) for a, b in pairwise((*firsts, self.blocks.count)))

    def note(self, split: DimSharding) -> str:
        """What each stage takes and holds."""
        total, edges = sum(self.blocks.costs), [*pairwise((*split.firsts, self.blocks.count))]
        counts = ", ".join(str(b - a) for a, b in edges)
        shares = ", ".join(f"{sum(self.blocks.costs[a:b]) / total:.0%}" for a, b in edges)
        ranks = ", ".join(map(str, first_ranks(self.compiled.after)))
        held = ", ".join(map(size_text, split.peaks))
        longer = split.seconds / self._seconds(self.balanced)
        return (
            f"stages of {counts} blocks, so that no rank holds more than {size_text(self.budget)}: "
            f"ranks {ranks} hold {held}, where a rank would hold {size_text(self.unbounded)}; "
            f"stages do {shares} of the operations, the slowest {longer:.2f} times those of the slowest then"
        )

    @property
    def unbounded(self) -> int:
        """What the fullest rank would hold if nobody had asked."""
        known = self.known.get(self.balanced)
        return max(known.peaks) if known else round(max(self.room.of(self.balanced, self.blocks.count)))


def first_blocks(graph: Graph, names: Sequence[str]) -> tuple[int, ...]:
    """Where the stages of a plan begin, of blocks of these names; empty where they are no stretches of them."""
    stages = stages_as_planned(graph)
    firsts = tuple(names.index(stage[0]) for stage in stages if stage)
    ends = (*firsts[1:], len(names))
    whole = len(firsts) == len(stages) and firsts[0] == 0
    apart = (stage != tuple(names[a:b]) for stage, a, b in zip(stages, firsts, ends, strict=False))
    return firsts if whole and not any(apart) else ()
