"""Known schedules of pipelines, by name: the row of each rank, for so many ranks, stages and micro-batches.

    gpipe        rank 0:  F0.0 F0.1 F0.2 F0.3 B0.0 B0.1 B0.2 B0.3        all forwards, then all backwards
    1f1b         rank 0:  F0.0 F0.1 B0.0 F0.2 B0.1 F0.3 B0.2 B0.3        (of two ranks) fewest micro-batches in flight

Micro-batches need not be a multiple of ranks.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from shardfx.ir.schedule.actions import Action, Schedule

Place = tuple[int, int]
"""A stage and a micro-batch."""


@dataclass(frozen=True)
class PipelineSize:
    """The size of a pipeline: ranks, stages per rank, and micro-batches; and the stages of each rank."""

    ranks: int
    chunks: int
    microbatches: int

    def loop(self, rank: int) -> tuple[int, ...]:
        """A rank's stages in a looped placement, in which the first rank follows the last."""
        return tuple(rank + self.ranks * chunk for chunk in range(self.chunks))

    def fold(self, rank: int) -> tuple[int, ...]:
        """A rank's two stages in a V placement: down the ranks and back."""
        return (rank, 2 * self.ranks - 1 - rank)

    def schedule(self, row: Row) -> Schedule:
        """The schedule of rows given by a function of the rank."""
        return Schedule(tuple(row(self, rank) for rank in range(self.ranks)))


Row = Callable[[PipelineSize, int], tuple[Action, ...]]


@dataclass(frozen=True)
class ScheduleMaker:
    """The generator of a schedule's rows, and the pipeline sizes that it supports."""

    row: Row
    fewest: int = 1
    """The minimum number of stages per rank, and the default if only stages are given."""
    most: int | None = 1
    """The maximum number of stages per rank; None: any."""
    microbatches: Callable[[int], int] = lambda ranks: 1
    """The minimum number of micro-batches by the number of ranks."""

    def takes(self, chunks: int) -> bool:
        """Whether it supports this number of stages per rank."""
        return self.fewest <= chunks and (self.most is None or chunks <= self.most)


def interleaved(of: PipelineSize, rank: int) -> tuple[Action, ...]:
    """1F1B of several stages a rank, in groups of micro-batches (Narayanan et al. 2021, Megatron-LM).

    Groups are of as many micro-batches as there are ranks or, where these are no divisor, a few more. The bubble is
    that of 1F1B by the number of stages on a rank; more micro-batches are in flight.
    """
    count = max(of.microbatches // of.ranks, 1)
    size, more = divmod(of.microbatches, count)
    starts = [size * i + min(i, more) for i in range(count + 1)]
    stages, groups = of.loop(rank), [range(start, end) for start, end in pairwise(starts)]
    forwards = [(stage, microbatch) for group in groups for stage in stages for microbatch in group]
    backwards = [(stage, microbatch) for group in groups for stage in reversed(stages) for microbatch in group]
    return _ahead(forwards, backwards, 2 * (of.ranks - rank - 1) + (of.chunks - 1) * len(groups[0]) + 1)


def breadth_first(of: PipelineSize, rank: int) -> tuple[Action, ...]:
    """All micro-batches of a stage, then of the rank's next (Lamy-Poirier 2022, Breadth-First Pipeline Parallelism).

    A stage's parameters are gathered once for all of them, forward and backward, which suits ZeRO-3. Every micro-batch
    is in flight.
    """
    stages, microbatches = of.loop(rank), range(of.microbatches)
    forwards = [(stage, microbatch) for stage in stages for microbatch in microbatches]
    backwards = [(stage, microbatch) for stage in reversed(stages) for microbatch in microbatches]
    return _ahead(forwards, backwards, len(forwards))


def zb_v(of: PipelineSize, rank: int) -> tuple[Action, ...]:
    """Two stages a rank as a V: no bubble, and the memory of 1F1B (Qi et al. 2024, Controllable Memory, V-ZB).

    No rank has more micro-batches in flight than it has stages times ranks. A rank is idle before its first action
    alone, where all three parts cost the same and there are 2 x ranks - 1 micro-batches or more.
    """
    behind, ahead = rank, of.ranks - rank
    phases = (
        (2 * ahead - 1, "F0"),
        (behind, "F1 F0"),
        (ahead, "F1 I1 W"),
        (of.microbatches - of.ranks, "F0 I0 W F1 I1 W"),
        (behind, "I0 I1"),
        (ahead, "I0 W"),
        (of.microbatches, "I0 I1"),
        (2 * of.microbatches, "W"),
    )
    return _phased(phases, of.fold(rank), of.microbatches)


def dualpipe_v(of: PipelineSize, rank: int) -> tuple[Action, ...]:
    """Two stages a rank as a V, a forward beside each backward (DeepSeek 2025, DualPipeV: half of DualPipe).

    In the long middle a forward stands beside a backward of the rank's other stage, so that one can compute while the
    other sends. Only the backwards at both ends are in halves. 2 x ranks + 1 micro-batches are in flight on each rank.
    """
    behind, ahead = rank + 1, of.ranks - rank - 1
    halves = behind // 2
    phases = (
        (2 * ahead, "F0"),
        (behind, "F0 F1"),
        (ahead, "I1 W F1"),
        (of.microbatches - 2 * of.ranks + behind, "F0 B1 F1 B0"),
        (ahead, "B1 F1 B0"),
        (halves, "B1 B0"),
        (behind % 2, "B1 I0"),
        (halves, "I1 I0"),
        (ahead, "W I0"),
        (behind, "W"),
    )
    return _phased(phases, of.fold(rank), of.microbatches)


SCHEDULES: Mapping[str, ScheduleMaker] = {
    # all forwards, then all backwards: every micro-batch is in flight (Huang et al. 2018, GPipe)
    "gpipe": ScheduleMaker(lambda of, rank: _single(of, rank, of.microbatches)),
    # forwards until the first backward can come, then one of each (Narayanan et al. 2020, PipeDream-flush): as many
    # micro-batches are in flight as there are ranks from this one on; the bubble is that of GPipe
    "1f1b": ScheduleMaker(lambda of, rank: _single(of, rank, of.ranks - rank)),
    "interleaved": ScheduleMaker(interleaved, fewest=2, most=None),
    "breadth-first": ScheduleMaker(breadth_first, most=None),
    # 1F1B, with gradients of weights later the later the rank (Qi et al. 2023, Zero Bubble, handcrafted schedule 1): a
    # third of 1F1B's bubble where all three parts cost the same, and no more micro-batches in flight than ranks
    "zb-h1": ScheduleMaker(lambda of, rank: _single(of, rank, of.ranks - rank, behind=rank)),
    # so many forwards ahead that no bubble is left (Qi et al. 2023, handcrafted schedule 2), but before a rank's first
    # action; up to 2 x ranks - 1 micro-batches are in flight
    "zb-h2": ScheduleMaker(lambda of, rank: _single(of, rank, 2 * (of.ranks - rank) - 1, behind=2 * rank)),
    "zb-v": ScheduleMaker(zb_v, fewest=2, most=2),
    "dualpipev": ScheduleMaker(dualpipe_v, fewest=2, most=2, microbatches=lambda ranks: 2 * ranks),
}


def _single(of: PipelineSize, rank: int, ahead: int, behind: int | None = None) -> tuple[Action, ...]:
    """The row of a rank with one stage (see :func:`_ahead`)."""
    line = [(rank, microbatch) for microbatch in range(of.microbatches)]
    return _ahead(line, line, ahead, behind)


def _ahead(
    forwards: Sequence[Place], backwards: Sequence[Place], ahead: int, behind: int | None = None
) -> tuple[Action, ...]:
    """First ``ahead`` forwards, then a backward and a forward alternately, then the other backwards.

    Args:
        forwards, backwards: the stage and micro-batch of each, in order.
        ahead: how many forwards are done before the first backward.
        behind: where backwards are in halves, how many halves for the weights are deferred; None: they are not.
    """
    row = [Action("F", *place) for place in forwards[:ahead]]
    rest, deferred = iter(forwards[ahead:]), deque[Place]()
    for place in backwards:
        row.append(Action("B" if behind is None else "I", *place))
        if behind is not None:
            deferred.append(place)
            row += [Action("W", *deferred.popleft()) for _ in range(len(deferred) - behind)]
        row += [Action("F", *next_forward) for next_forward in [next(rest, None)] if next_forward is not None]
    return (*row, *(Action("W", *place) for place in deferred))


def _phased(phases: Iterable[tuple[int, str]], stages: Sequence[int], microbatches: int) -> tuple[Action, ...]:
    """The phases one after the other, each so many times.

    ``(3, "F1 I1 W")`` is three times a forward of the rank's second stage, half a backward of it, and the other half
    of the backward that was deferred longest. Micro-batches are counted for each stage, forward and backward; what is
    done already is left out.
    """
    row: list[Action] = []
    begun = Counter[tuple[bool, int]]()
    deferred = deque[Place]()
    for word in (word for times, words in phases for word in words.split() * max(times, 0)):
        if word == "W":
            row += [Action("W", *deferred.popleft()) for _ in range(min(len(deferred), 1))]
            continue
        kind, stage = word[0], stages[int(word[1:])]
        microbatch = begun[kind == "F", stage]
        if microbatch < microbatches:
            begun[kind == "F", stage] += 1
            row.append(Action(kind, stage, microbatch))
            deferred += [(stage, microbatch)] * (kind == "I")
    return tuple(row)
