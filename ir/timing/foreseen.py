"""The course of a step, foreseen: the programs of ranks side by side, each on a clock of its own.

A rank waits where its program does: for what another one sends, and for what it started itself and is not done yet.
What goes over one link goes one behind the other; what computes meanwhile hides it. Sends do not hold up who sends. On
a machine that does not send by itself (``Machine.hides``) nothing is hidden: ranks lay out and take in what goes.
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
    mail: Mail = {}
    while any(rank.left for rank in ranks):
        went_on = [rank.run(mail) for rank in ranks]
        assert any(went_on), "ranks wait for one another"
    return tuple(rank.course() for rank in ranks)


@dataclass(frozen=True)
class _Sent:
    """When a message is there, how long it was under way, and how long it takes to take it in."""

    there: float
    under_way: float
    taking: float = 0.0


Mail = dict[Message, deque[_Sent]]
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

    def run(self, mail: Mail) -> bool:
        """Go on until something has not been sent yet; says whether anything was done."""
        start = self.at
        while self.left and self._do(self.row[self.at], mail):
            self.at += 1
        return self.at > start

    def _do(self, doing: Doing, mail: Mail) -> bool:
        begin = self.now
        if isinstance(doing, Works):
            self.now += doing.seconds
        elif isinstance(doing, Starts):
            assert doing.call is not None
            if doing.hidden:
                self.done[doing.call, doing.at] = self._over(doing.link, doing.seconds)
            else:
                self._wait(self.now + doing.seconds)
        elif isinstance(doing, Sends):
            origin, to, tag, _ = doing.message
            mail.setdefault((origin, to, tag, doing.turn), deque()).append(self._sent(doing))
        elif isinstance(doing, Receives):
            assert doing.call is not None
            origin, to, tag, _ = doing.message
            self.expected[doing.call] = origin, to, tag, doing.turn
        elif isinstance(doing, Waits):
            assert doing.call is not None
            if (message := self.expected.get(doing.call)) is not None:
                if not mail.get(message):
                    return False
                sent = mail[message].popleft()
                self._wait(sent.there, sent.under_way)
                self._wait(self.now + sent.taking)
                del self.expected[doing.call]
            elif (started := (doing.call, doing.at)) in self.done:
                self._wait(self.done.pop(started))
        self._note(doing, begin)
        return True

    def _over(self, link: object, seconds: float) -> float:
        """When something is done that begins now, or when the link has done what it was given before."""
        self.free[link] = max(self.now, self.free.get(link, 0.0)) + seconds
        return self.free[link]

    def _sent(self, doing: Sends) -> _Sent:
        if doing.hidden:
            return _Sent(self._over(doing.message[:2], doing.seconds), doing.seconds)
        self._wait(self.now + doing.seconds / 2)
        return _Sent(self.now, 0.0, doing.seconds / 2)

    def _wait(self, until: float, most: float = float("inf")) -> None:
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
