"""Simulation of a step: the rank programs run in parallel, each on its own clock.

A rank has a compute stream, and one for each of its links (each set of axes, each rank that it sends to, each direction
between memories). Transfers over one link are sequential. A rank waits where its program does: for messages of
other ranks, and for transfers that it started: this time is exposed, the rest is hidden behind
compute. Sends do not block the sender. On a machine without asynchronous transfers (``Machine.hides``)
nothing is hidden: ranks copy what they send and receive.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, NamedTuple

from shardfx.ir.schedule.actions import KINDS, Action
from shardfx.ir.schedule.simulation import Span

from .rank_tasks import RankTask, call_label


class LinkTransfer(NamedTuple):
    """A transfer over a link, in seconds."""

    link: str
    what: str
    span: Span


class Stall(NamedTuple):
    """A stall of the compute stream, and the exposed communication in it; the rest is waiting for slower ranks."""

    what: str
    span: Span
    exposed: float


@dataclass(frozen=True)
class RankTimeline:
    """The simulated step of one rank, in seconds.

    Args:
        spans: start and end of each action, in order.
        before: the span of calls that run once, in front of the loop.
        exposed: time waiting for communication that is not hidden; for a message, at most its transfer time.
        segments: ``spans`` without the other actions that interrupt them.
        transfers: the transfers over its links, in order of issue.
        stalls: its waits, in order.
        end: the end of its last task.
    """

    spans: Mapping[Action, Span]
    before: Span
    exposed: float
    segments: Mapping[Action, tuple[Span, ...]]
    transfers: tuple[LinkTransfer, ...]
    stalls: tuple[Stall, ...]
    end: float

    @property
    def links(self) -> Mapping[str, tuple[LinkTransfer, ...]]:
        """Transfers by link."""
        names = sorted({transfer.link for transfer in self.transfers})
        return {name: tuple(each for each in self.transfers if each.link == name) for name in names}

    @property
    def communication(self) -> float:
        """The total time of all transfers, in seconds."""
        return sum(transfer.span.length for transfer in self.transfers)


def simulate_ranks(rows: Sequence[Sequence[RankTask]]) -> tuple[RankTimeline, ...]:
    """Simulate ranks along a pipeline axis, each by its tasks."""
    ranks = [_RankClock(row) for row in rows]
    mail: Mail = {}
    while any(rank.left for rank in ranks):
        went_on = [rank.run(mail) for rank in ranks]
        assert any(went_on), "ranks wait for one another"
    return tuple(rank.course() for rank in ranks)


class _Arrival(NamedTuple):
    """The end of a transfer. Of a message also the link to its receiver, the time for which that may wait exposed, and
    the time that it spends on it."""

    there: float
    what: str
    link: str = ""
    under_way: float = inf
    taking: float = 0.0


Mail = dict[tuple[Any, ...], deque[_Arrival]]
NEVER = Span(0.0, 0.0)


@dataclass
class _RankClock:
    """The clock of one rank, and its progress."""

    row: Sequence[RankTask]
    now: float = 0.0
    at: int = 0
    exposed: float = 0.0
    free: dict[str, float] = field(default_factory=dict)
    """The time from which each link is free."""
    segments: dict[Action, list[Span]] = field(default_factory=dict)
    transfers: list[LinkTransfer] = field(default_factory=list)
    stalls: list[Stall] = field(default_factory=list)
    last: Action | None = None
    before: Span = NEVER

    @property
    def left(self) -> int:
        """The number of remaining tasks."""
        return len(self.row) - self.at

    def run(self, mail: Mail) -> bool:
        """Run up to the first message that was not sent yet; returns whether anything ran."""
        start = self.at
        while self.left and self._do(self.row[self.at], mail):
            self.at += 1
        return self.at > start

    def _do(self, doing: RankTask, mail: Mail) -> bool:
        begin = self.now
        if doing.kind == "compute":
            self.now += doing.seconds
        elif doing.kind == "start":
            self._start(doing, mail.setdefault(doing.transfer, deque()))
        elif arrivals := mail.get(doing.transfer):
            self._receive(arrivals.popleft())
        elif doing.message is not None:
            return False
        self._note(doing, begin)
        return True

    def _start(self, doing: RankTask, arrivals: deque[_Arrival]) -> None:
        """Start a transfer: now, or when its link is free; or do it on the compute stream."""
        what = "send" if doing.call is None else call_label(doing.call)
        link, message, seconds = doing.link, doing.message, doing.seconds
        taken = "" if message is None else f"from place {message[0]}"
        if doing.hidden:
            start = max(self.now, self.free.get(link, 0.0))
            self.free[link] = there = start + seconds
            self.transfers.append(LinkTransfer(link, what, Span(start, there)))
            arrivals.append(_Arrival(there, what, taken, inf if message is None else seconds))
        elif message is None:
            self._carry(link, what, seconds)
        else:
            self._carry(link, what, seconds / 2)
            arrivals.append(_Arrival(self.now, what, taken, 0.0, seconds / 2))

    def _receive(self, arrived: _Arrival) -> None:
        there, what, link, under_way, taking = arrived
        if link and under_way:
            self.transfers.append(LinkTransfer(link, what, Span(there - under_way, there)))
        self._wait(there, what, under_way)
        self._carry(link, what, taking)

    def _carry(self, link: str, what: str, seconds: float) -> None:
        """Copy what goes over a link on the compute stream, which stalls."""
        if seconds:
            self.transfers.append(LinkTransfer(link, what, Span(self.now, self.now + seconds)))
            self._wait(self.now + seconds, what, inf)

    def _wait(self, until: float, what: str, most: float) -> None:
        waits = max(until - self.now, 0.0)
        if waits:
            self.stalls.append(Stall(what, Span(self.now, until), min(waits, most)))
        self.exposed += min(waits, most)
        self.now += waits

    def _note(self, doing: RankTask, begin: float) -> None:
        """Record a task as part of its action, unless it receives, or takes no time."""
        kind, stage = doing.purpose
        if self.now == begin:
            return
        if kind not in KINDS:
            self.before = Span(self.before.start, self.now) if not kind else self.before
            return
        action = Action(kind, stage, 0 if kind == "U" else doing.microbatch)
        known = self.segments.setdefault(action, [])
        if known and action == self.last:
            begin = known.pop().start
        known.append(Span(begin, self.now))
        self.last = action

    def course(self) -> RankTimeline:
        """The timeline of all tasks so far."""
        spans = {action: Span(segments[0].start, segments[-1].end) for action, segments in self.segments.items()}
        segments = {action: tuple(each) for action, each in self.segments.items()}
        return RankTimeline(
            spans, self.before, self.exposed, segments, tuple(self.transfers), tuple(self.stalls), self.now
        )
