"""The course of a step, foreseen: the programs of ranks side by side, each on a clock of its own.

A rank waits where its program does: for what another one sends, and for what it started itself and is not done yet.
What goes over one link goes one behind the other; what computes meanwhile hides it. Sends do not hold up who sends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx

from shardfx.ir.schedule.actions import KINDS, Action
from shardfx.ir.schedule.simulation import Span

from .doings import Doing, Message, Receives, Sends, Starts, Waits, Works


@dataclass(frozen=True)
class Course:
    """What one rank does when, in seconds.

    Args:
        spans: from when to when it does each action, in the order in which it does them.
        pieces: the same, without what it does of other actions meanwhile.
        before: what is done once, in front of all turns.
        exposed: seconds in which it waits for communication that no computing hides: of what others send, no more than
            the transfer takes.
    """

    spans: Mapping[Action, Span]
    before: Span
    exposed: float
    pieces: Mapping[Action, tuple[Span, ...]]


def foreseen(rows: Sequence[Sequence[Doing]]) -> tuple[Course, ...]:
    """The courses of ranks along an axis of stages, from what each does.

    Raises:
        AssertionError: a rank waits for what nobody sends.
    """
    ranks = [_Clock(row) for row in rows]
    mail: dict[Message, deque[tuple[float, float]]] = {}
    while any(rank.left for rank in ranks):
        went_on = [rank.run(mail) for rank in ranks]
        assert any(went_on), "ranks wait for one another"
    return tuple(rank.course() for rank in ranks)


NEVER = Span(0.0, 0.0)


@dataclass
class _Clock:
    """One rank, as far as it has come."""

    row: Sequence[Doing]
    now: float = 0.0
    at: int = 0
    exposed: float = 0.0
    free: dict[object, float] = field(default_factory=dict)
    """From when a link has nothing to do."""
    done: dict[tuple[fx.Node, tuple[int, ...]], float] = field(default_factory=dict)
    """When what was started in a turn is done."""
    expected: dict[fx.Node, Message] = field(default_factory=dict)
    pieces: dict[Action, list[Span]] = field(default_factory=dict)
    last: Action | None = None
    before: Span = NEVER

    @property
    def left(self) -> int:
        """How much is still to be done."""
        return len(self.row) - self.at

    def run(self, mail: dict[Message, deque[tuple[float, float]]]) -> bool:
        """Go on until something has not been sent yet; says whether anything was done."""
        start = self.at
        while self.left and self._do(self.row[self.at], mail):
            self.at += 1
        return self.at > start

    def _do(self, doing: Doing, mail: dict[Message, deque[tuple[float, float]]]) -> bool:
        begin = self.now
        if isinstance(doing, Works):
            self.now += doing.seconds
        elif isinstance(doing, Starts):
            assert doing.call is not None
            self.done[doing.call, doing.at] = self._over(doing.link, doing.seconds)
        elif isinstance(doing, Sends):
            origin, to, tag, _ = doing.message
            come = self._over((origin, to), doing.seconds), doing.seconds
            mail.setdefault((origin, to, tag, doing.turn), deque()).append(come)
        elif isinstance(doing, Receives):
            assert doing.call is not None
            origin, to, tag, _ = doing.message
            self.expected[doing.call] = origin, to, tag, doing.turn
        elif isinstance(doing, Waits):
            assert doing.call is not None
            if (message := self.expected.get(doing.call)) is not None:
                if not mail.get(message):
                    return False
                self._wait(*mail[message].popleft())
                del self.expected[doing.call]
            elif (started := (doing.call, doing.at)) in self.done:
                self._wait(self.done.pop(started), float("inf"))
        self._note(doing, begin)
        return True

    def _over(self, link: object, seconds: float) -> float:
        """When something is done that begins now, or when the link has done what it was given before."""
        self.free[link] = max(self.now, self.free.get(link, 0.0)) + seconds
        return self.free[link]

    def _wait(self, until: float, most: float) -> None:
        waits = max(until - self.now, 0.0)
        self.exposed += min(waits, most)
        self.now += waits

    def _note(self, doing: Doing, begin: float) -> None:
        """What it did is part of an action; a receive is not, nor is what takes no time."""
        kind, stage = doing.purpose
        if self.now == begin:
            return
        if kind not in KINDS:
            self.before = Span(self.before.start, self.now) if not kind else self.before
            return
        action = Action(kind, stage, 0 if kind == "U" else doing.turn)
        known = self.pieces.setdefault(action, [])
        if known and action == self.last:
            begin = known.pop().start
        known.append(Span(begin, self.now))
        self.last = action

    def course(self) -> Course:
        """What it did."""
        spans = {action: Span(pieces[0].start, pieces[-1].end) for action, pieces in self.pieces.items()}
        pieces = {action: tuple(each) for action, each in self.pieces.items()}
        return Course(spans, self.before, self.exposed, pieces)
