"""``Pipeline(stages=None)`` under a budget: the split into stages whose slowest is fastest, of those that fit.

The plan with balanced stages is made first. Where a rank of it exceeds the budget, the best split that fits by an
estimate (:class:`BlockMemory`) is sought (:mod:`shardfx.passes.stages.balance`), planned, and its ranks' programs
replayed; the differences between replay and estimate correct the search for the next split.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, cached_property
from itertools import accumulate, pairwise
from math import inf

from shardfx.compile import Compiled
from shardfx.ir.cost.replay import source_of
from shardfx.ir.graph import Graph, Node, OutputKind, Phase, Value
from shardfx.ir.ops import comm
from shardfx.ir.schedule.actions import Pipelined
from shardfx.ir.schedule.simulation import live_microbatches
from shardfx.ir.text.printer import size_text
from shardfx.memory.candidates import Candidate, PlanSearch
from shardfx.memory.rank_memory import stored_bytes
from shardfx.memory.recompute_search import sources
from shardfx.passes.stages import SearchedCounts, stages_as_planned
from shardfx.passes.stages.assignment import OF_WEIGHTS, Assignment
from shardfx.passes.stages.balance import MemoryBudget, balanced_split, smallest_split
from shardfx.passes.stages.make_schedule import AUTO
from shardfx.passes.stages.stage_blocks import ModelBlocks
from shardfx.schedules.timeline import first_ranks

TRIES = 4
"""The most splits that are planned."""


def fitting_stages(search: PlanSearch) -> Compiled:
    """The plan whose stages fit into what a rank may hold; itself, where nothing is to be chosen, or all fits.

    Where no split fits, the plan is the one whose fullest rank holds least; but where it is also to be chosen what is
    recomputed, or how many iterations are live, it is left to that.
    """
    compiled, pipeline = search.compiled, search.hints.pipeline
    in_stages = compiled.has_gradients and compiled.after.pipeline is not None
    if not in_stages or pipeline is None or pipeline.stages is not None or not search.budget:
        return compiled
    splits = StageSplits(search)
    if not splits.balanced:
        return compiled
    found = search.fastest(splits.candidates(), splits.seconds)
    if found is None:
        others = search.hints.recompute == "auto" or pipeline.schedule == AUTO
        return compiled if others else splits.smallest().plan
    if found.plan is not compiled:
        found.plan.after.notes.append(splits.note(found))
    return found.plan


class StageSplits:
    """Candidates by their splits into stages, and what their memory tells of the next one."""

    def __init__(self, search: PlanSearch) -> None:
        graph = search.compiled.after
        assert graph.pipeline is not None
        self.search, self.homes = search, graph.pipeline.homes
        self.blocks = BlockMemory(graph, graph.pipeline)
        self.more = [0.0] * (max(self.homes) + 1)
        """The error of the estimate for each rank: bytes beyond the prediction."""
        self.balanced = first_blocks(graph, self.blocks.blocks.names)
        """The first blocks of the initial plan's stages; empty where they are no contiguous ranges of blocks."""
        self.known: dict[tuple[int, ...], Candidate] = {}
        """The plans so far, by the first blocks of their stages."""

    @property
    def room(self) -> MemoryBudget:
        """The memory budget of ranks, corrected by the plans so far."""
        return MemoryBudget(self.homes, [self.search.budget - more for more in self.more], self.blocks.memory_of)

    def candidates(self) -> Iterator[Candidate]:
        """The balanced split; where it does not fit the fastest that may fit, until none is faster than one that
        does."""
        yield (made := self._planned(self.balanced))
        if self.search.fits(made):
            return
        for _ in range(TRIES):
            firsts = balanced_split(self.blocks.costs, len(self.homes), budget=self.room)
            fitting = [self._seconds(split) for split, made in self.known.items() if self.search.fits(made)]
            if firsts is None or tuple(firsts) in self.known or self._seconds(firsts) >= min(fitting, default=inf):
                return
            yield self._planned(tuple(firsts))

    def smallest(self) -> Candidate:
        """The split with the lowest peak over ranks."""
        firsts, _ = smallest_split(self.blocks.costs, len(self.homes), self.room)
        made = self.known.get(tuple(firsts)) or self._planned(tuple(firsts))
        return min((made, *self.known.values()), key=lambda made: made.peak)

    def _planned(self, firsts: tuple[int, ...]) -> Candidate:
        """Plan a split, and correct the estimates by its ranks' memory."""
        pipeline, counts = self.search.hints.pipeline, SearchedCounts(b - a for a, b in self._edges(firsts))
        assert pipeline is not None
        planned = firsts != self.balanced
        made = self.search.plan(pipeline=replace(pipeline, stages=counts)) if planned else self.search.initial
        predicted = self.room.of(firsts, self.blocks.count)
        self.more = [a - b for a, b in zip(made.peaks, predicted, strict=True)]
        self.known[firsts] = made
        return made

    def _edges(self, firsts: Sequence[int]) -> list[tuple[int, int]]:
        return [*pairwise((*firsts, self.blocks.count))]

    def _seconds(self, firsts: Sequence[int]) -> float:
        return max(sum(self.blocks.costs[a:b]) for a, b in self._edges(firsts))

    def firsts_of(self, made: Candidate) -> tuple[int, ...]:
        """The first blocks of the stages of a candidate."""
        return next(firsts for firsts, each in self.known.items() if each is made)

    def seconds(self, made: Candidate) -> float:
        """The time of a candidate's slowest stage."""
        return self._seconds(self.firsts_of(made))

    def note(self, made: Candidate) -> str:
        """A note with the time and bytes of each stage."""
        counts = ", ".join(str(b - a) for a, b in self._edges(self.firsts_of(made)))
        ranks, peaks = ", ".join(map(str, first_ranks(made.plan.after))), ", ".join(map(size_text, made.peaks))
        longer = self.seconds(made) / self._seconds(self.balanced)
        return (
            f"stages of {counts} blocks, so that no rank holds more than {size_text(self.search.budget)}: ranks "
            f"{ranks} hold {peaks}; the slowest stage takes {longer:.2f} times as long as that of the balanced split"
        )


def first_blocks(graph: Graph, names: Sequence[str]) -> tuple[int, ...]:
    """The first blocks of a plan's stages, by the blocks' names; empty where they are no contiguous ranges of them."""
    stages = stages_as_planned(graph)
    contiguous = all(stages) and [name for stage in stages for name in stage] == list(names)
    return tuple(accumulate(map(len, stages[:-1]), initial=0)) if contiguous else ()


class BlockMemory:
    """The memory model of a planned graph's blocks: cost and bytes of ranges of them on the rank with most memory."""

    def __init__(self, graph: Graph, pipeline: Pipelined) -> None:
        self.graph, self.pipeline = graph, pipeline
        self.blocks = ModelBlocks(graph)
        self.count, self.costs = len(self.blocks.names), self.blocks.costs()
        self.live = in_flight_microbatches(pipeline)
        self._assigned = Assignment(graph, self.blocks.of, self.count - 1, told=False)
        kept = {v for v in self._kept if pipeline.microbatches in (v.spec.axes if v.spec is not None else ())}
        self._once = range_bytes([*self._stored(), *self._uses(self._kept - kept)])
        self._in_iterations = range_bytes(self._uses(kept))

    def memory_of(self, stage: int, first: int, end: int) -> float:
        """The bytes of a stage with the blocks from ``first`` to before ``end``, without transient ones."""
        return self._once(first, end) + self.live[stage] * self._in_iterations(first, end)

    # ---- what there is --------------------------------------------------------------------------------------------

    @cached_property
    def _users(self) -> Mapping[Value, Sequence[Node]]:
        """The users of each value; of a sent value, those of the received one."""
        found: dict[Value, list[Node]] = {}
        for node in self.graph.nodes:
            for value in sent_from(sources(node.operands)) if node.op is not comm.send else ():
                found.setdefault(value, []).append(node)
        return found

    @cached_property
    def _kept(self) -> set[Value]:
        """The activations: forward values that the backward uses."""
        return {
            value
            for value, users in self._users.items()
            if value.node is not None
            and value.node.phase is Phase.FORWARD
            and any(user.phase is Phase.BACKWARD for user in users)
        }

    def _uses(self, values: Iterable[Value]) -> Iterator[tuple[int, Sequence[int]]]:
        for value in values:
            users = [node for node in self._users[value] if node.phase is Phase.BACKWARD]
            yield value.local_bytes(self.graph.mesh), [block for node in users for block in self._assigned.at[node]]

    def _stored(self) -> Iterator[tuple[int, Sequence[int]]]:
        """The bytes of inputs and gradients, with the blocks that use them."""
        values = {each.name: each for each in self.graph.inputs}
        for each in self.graph.inputs:
            if not each.pool and each.value.spec is not None:
                yield stored_bytes(each.value, self.graph.mesh, 0), self._assigned.inputs[each.value]
        for output in self.graph.outputs:
            mine = values.get(output.name)
            if output.kind is OutputKind.GRADIENT and mine is not None and mine.kind in OF_WEIGHTS:
                added_up = source_of(output.value)  # before it is sharded
                yield added_up.local_bytes(self.graph.mesh), self._assigned.inputs[mine.value]


def range_bytes(uses: Iterable[tuple[int, Sequence[int]]]) -> Callable[[int, int], int]:
    """The bytes in a range of blocks (from one to before another): of all that one of its blocks uses."""
    together = Counter[frozenset[int]]()
    for nbytes, blocks in uses:
        together[frozenset(blocks)] += nbytes
    return cache(
        lambda first, end: sum(n for blocks, n in together.items() if any(first <= block < end for block in blocks))
    )


def sent_from(values: Iterable[Value]) -> set[Value]:
    """Values at their producers, before they were sent."""
    found = set()
    for value in values:
        while value.node is not None and value.node.op is comm.send:
            (value,) = sources(value.node.operands)
        found.add(value)
    return found


def in_flight_microbatches(pipeline: Pipelined) -> list[int]:
    """The most micro-batches that are in flight at each stage."""
    rows = pipeline.schedule.rows
    of_stage = ([each for each in rows[home] if each.stage == stage] for stage, home in enumerate(pipeline.homes))
    return [max(live_microbatches(row)) for row in of_stage]
