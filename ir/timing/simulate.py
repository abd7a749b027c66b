"""Simulation of a step: the programs of ranks side by side, each on a clock of its own.

A rank has a stream on which it computes, and one for each of its links (each set of axes, each rank that it sends to,
each direction between memories). Transfers over one link are sequential. A rank waits where its program does: for
messages of other ranks, and for what it started itself and is not done yet: that much is exposed, and the rest is
hidden behind compute. Sends do not block the sender. On a machine that does not send by itself (``Machine.hides``)
nothing is hidden: ranks copy what they send and receive.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import fx

from shardfx.ir.schedule.actions import KINDS, Action
from shardfx.ir.schedule.simulation import Span

from .rank_tasks import Doing, Message, Receives, Sends, Starts, Waits, Works
from .stream_order import name_of


class Transfer(NamedTuple):
    """What goes over a link: what it is, and from when to when, in seconds."""

    link: str
    what: str
    span: Span


class Stall(NamedTuple):
    """A wait of the stream on which a rank computes: for what, from when to when, and how much of it is exposed
    communication; the rest is for others to come so far."""

    what: str
    span: Span
    exposed: float


@dataclass(frozen=True)
class Course:
    """What one rank does when, in seconds.

    Args:
        spans: from when to when it does each action, in the order in which it does them.
        pieces: the same, without what it does of other actions meanwhile.
        transfers: what goes over its links, by when that is given to them.
        stalls: its waits, one behind the other.
        end: when it is done.
        before: what is done once, in front of all micro-batches.
        exposed: seconds in which it waits for communication that no computing hides: of what others send, no more than
            the transfer takes.
    """

    spans: Mapping[Action, Span]
    before: Span
    exposed: float
    pieces: Mapping[Action, tuple[Span, ...]]
    transfers: tuple[Transfer, ...]
    stalls: tuple[Stall, ...]
    end: float

    @property
    def links(self) -> Mapping[str, tuple[Transfer, ...]]:
        """What goes over its links, by link."""
        found: dict[str, tuple[Transfer, ...]] = {}
        for transfer in self.transfers:
            found[transfer.link] = (*found.get(transfer.link, ()), transfer)
        return dict(sorted(found.items()))

    @property
    def communication(self) -> float:
        """Seconds of all that goes over its links."""
        return sum(transfer.span.length for transfer in self.transfers)


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
    what: str = ""
    link: str = ""


Mail = dict[Message, deque[_Sent]]
NEVER = Span(0.0, 0.0)


@dataclass
class _Clock:
    """One rank, as far as it has come."""

    row: Sequence[Doing]
    now: float = 0.0
    at: int = 0
    exposed: float = 0.0
    free: dict[str, float] = field(default_factory=dict)
    """From when a link has nothing to do."""
    done: dict[tuple[fx.Node, tuple[int, ...]], float] = field(default_factory=dict)
    """When what was started in a micro-batch is done."""
    expected: dict[fx.Node, Message] = field(default_factory=dict)
    pieces: dict[Action, list[Span]] = field(default_factory=dict)
    transfers: list[Transfer] = field(default_factory=list)
    stalls: list[Stall] = field(default_factory=list)
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
            what = name_of(doing.call)
            if doing.hidden:
                self.done[doing.call, doing.at] = self._over(doing.link, what, doing.seconds)
            else:
                self._carry(doing.link, what, doing.seconds)
        elif isinstance(doing, Sends):
            origin, to, tag, _ = doing.message
            mail.setdefault((origin, to, tag, doing.microbatch), deque()).append(self._sent(doing))
        elif isinstance(doing, Receives):
            assert doing.call is not None
            origin, to, tag, _ = doing.message
            self.expected[doing.call] = origin, to, tag, doing.microbatch
        elif isinstance(doing, Waits):
            assert doing.call is not None
            if (message := self.expected.get(doing.call)) is not None:
                if not mail.get(message):
                    return False
                sent = mail[message].popleft()
                if sent.under_way:
                    self.transfers.append(Transfer(sent.link, sent.what, Span(sent.there - sent.under_way, sent.there)))
                self._wait(sent.there, sent.what, sent.under_way)
                self._carry(sent.link, sent.what, sent.taking)
                del self.expected[doing.call]
            elif (started := (doing.call, doing.at)) in self.done:
                self._wait(self.done.pop(started), name_of(doing.call))
        self._note(doing, begin)
        return True

    def _over(self, link: str, what: str, seconds: float) -> float:
        """When something is done that begins now, or when the link has done what it was given before."""
        start = max(self.now, self.free.get(link, 0.0))
        self.free[link] = start + seconds
        self.transfers.append(Transfer(link, what, Span(start, start + seconds)))
        return start + seconds

    def _carry(self, link: str, what: str, seconds: float) -> None:
        """The rank itself does what goes over a link."""
        if seconds:
            self.transfers.append(Transfer(link, what, Span(self.now, self.now + seconds)))
            self._wait(self.now + seconds, what)

    def _sent(self, doing: Sends) -> _Sent:
        origin, to = doing.message[:2]
        what = "send" if doing.call is None else name_of(doing.call)
        link, taken = f"to place {to}", f"from place {origin}"
        if doing.hidden:
            return _Sent(self._over(link, what, doing.seconds), doing.seconds, 0.0, what, taken)
        self._carry(link, what, doing.seconds / 2)
        return _Sent(self.now, 0.0, doing.seconds / 2, what, taken)

    def _wait(self, until: float, what: str, most: float = float("inf")) -> None:
        waits = max(until - self.now, 0.0)
        if waits:
            self.stalls.append(Stall(what, Span(self.now, until), min(waits, most)))
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
        action = Action(kind, stage, 0 if kind == "U" else doing.microbatch)
        known = self.pieces.setdefault(action, [])
        if known and action == self.last:
            begin = known.pop().start
        known.append(Span(begin, self.now))
        self.last = action

    def course(self) -> Course:
        """What it did."""
        spans = {action: Span(pieces[0].start, pieces[-1].end) for action, pieces in self.pieces.items()}
        pieces = {action: tuple(each) for action, each in self.pieces.items()}
        transfers, stalls = tuple(self.transfers), tuple(self.stalls)
        return Course(spans, self.before, self.exposed, pieces, transfers, stalls, self.now)
