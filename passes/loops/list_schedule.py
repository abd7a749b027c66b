"""A schedule from costs alone: each rank does what it can do first, as long as no more micro-batches are live than may
be."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from shardfx.ir.schedule.actions import Action, Schedule
from shardfx.ir.schedule.dependencies import needs
from shardfx.ir.schedule.simulation import Costs, cost_table


class Choice(NamedTuple):
    """What a rank may do next: when it can start, how it ranks among what can start then, and what it is."""

    start: float
    priority: tuple[int, int]
    action: Action


def list_schedule(
    stages_of: Sequence[Sequence[int]], microbatches: int, costs: Costs, live: Sequence[int], kinds: str = "IFW"
) -> Schedule:
    """Let each rank, whenever it is free, begin what can begin first; of several, what comes first in ``kinds``.

    A forward begins only if the rank keeps a place free for each of its later stages: so the last ones can always go
    on, and ranks never wait for one another.

    Args:
        stages_of: the stages of each rank, in order.
        micro-batches: how many micro-batches there are.
        costs: how long an action takes, by kind: a number for all stages, or one for each.
        live: for each rank how many micro-batches may be live, a micro-batch counted for each stage: at least as many
            as its stages.
        kinds: which kinds there are, what is to be done first standing first: backwards whole (``BF``), or in halves.
    """
    table = cost_table(costs, kinds, sum(map(len, stages_of)))
    state = _State(stages_of, microbatches, live, kinds)
    choices = {rank: state.choice(rank) for rank in range(len(stages_of))}
    while any(choices.values()):
        rank, chosen = min(((r, each) for r, each in choices.items() if each), key=lambda item: item[1].start)
        state.do(rank, chosen.action, chosen.start + table[chosen.action.kind][chosen.action.stage])
        stage = chosen.action.stage
        near = {rank, *(r for r, mine in enumerate(stages_of) if stage - 1 in mine or stage + 1 in mine)}
        choices.update((each, state.choice(each)) for each in near)
    return Schedule(tuple(map(tuple, state.rows)))


@dataclass
class _State:
    """What was done so far, and when each rank is free again."""

    stages_of: Sequence[Sequence[int]]
    microbatches: int
    most: Sequence[int]
    kinds: str
    ends: dict[Action, float] = field(default_factory=dict)
    begun: Counter[tuple[str, int]] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.rows: list[list[Action]] = [[] for _ in self.stages_of]
        self.free = [0.0 for _ in self.stages_of]
        self.live = [0 for _ in self.stages_of]
        self.last = sum(map(len, self.stages_of)) - 1
        self.back = "I" if "I" in self.kinds else "B"

    def choice(self, rank: int) -> Choice | None:
        """What the rank does next, if it can do anything."""
        return min(self._choices(rank), default=None)

    def _choices(self, rank: int) -> Iterator[Choice]:
        for place, stage in enumerate(self.stages_of[rank]):
            later = len(self.stages_of[rank]) - place - 1
            for order, kind in enumerate(self.kinds):
                action = Action(kind, stage, self.begun[kind, stage])
                full = kind == "F" and self.live[rank] + later >= self.most[rank]
                if action.microbatch == self.microbatches or full:
                    continue
                wanted = needs(action, self.last, lambda at, microbatch: Action(self.back, at, microbatch))
                if all(each in self.ends for each in wanted):
                    start = max(self.free[rank], *(self.ends[each] for each in wanted), 0.0)
                    yield Choice(start, (order, -stage), action)

    def do(self, rank: int, action: Action, end: float) -> None:
        """The rank does it until then."""
        self.rows[rank].append(action)
        self.ends[action] = self.free[rank] = end
        self.begun[action.kind, action.stage] += 1
        self.live[rank] += {"F": 1, "B": -1, "W": -1}.get(action.kind, 0)
