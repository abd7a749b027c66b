"""The row of a rank, in one of two ways: forwards so far ahead of backwards, or one phase after the other."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence

from shardfx.ir.schedule.actions import Action

Place = tuple[int, int]
"""A stage and a micro-batch."""


def ahead_row(
    forwards: Sequence[Place], backwards: Sequence[Place], ahead: int, behind: int | None = None
) -> tuple[Action, ...]:
    """First ``ahead`` forwards, then a backward and a forward in micro-batches, then the other backwards.

    Args:
        forwards, backwards: the stage and micro-batch of each, in order.
        ahead: how many forwards are done before the first backward.
        behind: where backwards are in halves, how many halves for the weights wait while others are done; None: they
            are whole.
    """
    row = [Action("F", *place) for place in forwards[:ahead]]
    rest, waiting = iter(forwards[ahead:]), deque[Place]()
    for place in backwards:
        row.append(Action("B" if behind is None else "I", *place))
        if behind is not None:
            waiting.append(place)
            row += [Action("W", *waiting.popleft()) for _ in range(len(waiting) - behind)]
        row += [Action("F", *next_forward) for next_forward in [next(rest, None)] if next_forward is not None]
    return (*row, *(Action("W", *place) for place in waiting))


def phased_row(phases: Iterable[tuple[int, str]], stages: Sequence[int], microbatches: int) -> tuple[Action, ...]:
    """The phases one after the other, each so many times.

    ``(3, "F1 I1 W")`` is three times a forward of the rank's second stage, half a backward of it, and the other half
    of the backward that has waited longest. Micro-batches are counted for each stage, forward and backward; what is
    done already is left out.

    Args:
        phases: how many times, and what: kinds with the place of the stage among the rank's own.
        stages: the rank's own stages.
        micro-batches: how many there are.
    """
    row: list[Action] = []
    begun = Counter[tuple[bool, int]]()
    waiting = deque[Place]()
    for word in (word for times, words in phases for word in words.split() * max(times, 0)):
        if word == "W":
            row += [Action("W", *waiting.popleft()) for _ in range(min(len(waiting), 1))]
            continue
        kind, stage = word[0], stages[int(word[1:])]
        microbatch = begun[kind == "F", stage]
        if microbatch < microbatches:
            begun[kind == "F", stage] += 1
            row.append(Action(kind, stage, microbatch))
            waiting += [(stage, microbatch)] * (kind == "I")
    return tuple(row)
