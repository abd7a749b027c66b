"""A few numbers from every rank: at the start of a call, and where ranks compare something.

They go among CPU ranks, over sockets where all ranks are on one machine, else on gloo, and never wait for a device. A
handshake may be left open while this rank computes: :func:`settle` ends it, before it first needs others.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from shardfx.runtime.same_host.links import SAID
from shardfx.runtime.same_host.neighbourhood import Saying

from .agreement.differences import named
from .groups import all_near, the_cpu_group
from .peer_failure import ending_together, not_waiting, say_waiting

log = logging.getLogger("shardfx")
SOON, SLOW = 1.0, 10.0
"""A rank that has waited so many seconds for others tells them; and says on its terminal for whom."""
_numbers = itertools.count()
_open: list[Callable[[], object]] = []
"""What ends a handshake that was left open; one at most."""


class Handshake:
    """One that has begun: this rank's numbers are on their way. All ranks begin theirs in one order.

    Args:
        mine: as many numbers on all ranks, of 64 bits.
        what: it is for, in words.
        failed: why this rank cannot do what the others do, if it is about that.
    """

    def __init__(self, mine: Sequence[int], what: str, failed: str = "") -> None:
        group, self._what, self._failed = the_cpu_group(), what, failed
        settle()
        self._number, near = next(_numbers), all_near()
        with ending_together(what):
            told = near is not None and len(mine) == SAID
            self._started = (
                Near(near.say([n % 2**64 for n in mine])) if near is not None and told else OnGloo(mine, group)
            )

    def rows(self) -> Sequence[Sequence[int]]:
        """The numbers of every rank, by rank, once they are there."""
        with ending_together(self._what):
            if not self._started.comes(SOON):
                say_waiting(self._number)
                if not self._started.comes(SLOW - SOON):
                    log.warning("%s", slow(not_waiting(self._number), self._what, self._failed))
            return self._started.wait()


class Near:
    """Numbers on their way among ranks of one machine, which says them without a sign."""

    def __init__(self, saying: Saying) -> None:
        self.comes, self._saying = saying.comes, saying

    def wait(self) -> list[list[int]]:
        """Those of every rank, by rank."""
        return [[n - 2**64 if n >> 63 else n for n in row] for row in self._saying.wait()]


class OnGloo:
    """Numbers on their way among ranks of several machines, or too many of them to be said."""

    def __init__(self, mine: Sequence[int], group: dist.ProcessGroup) -> None:
        self._count, sent = len(mine), torch.tensor(mine)
        self._every = torch.empty(dist.get_world_size() * self._count, dtype=torch.int64)
        self._work = group._allgather_base(self._every, sent)

    def comes(self, seconds: float) -> bool:
        """Whether all are there within so many seconds; raises what broke it."""
        try:
            self._work.wait(timedelta(seconds=seconds))
        except RuntimeError:
            if self._work.is_completed():
                raise
            return False
        return True

    def wait(self) -> list[list[int]]:
        """Those of every rank, by rank."""
        self._work.wait()
        return self._every.view(-1, self._count).tolist()


def leave_open(end: Callable[[], object]) -> None:
    """Let a handshake be ended, and looked at, by ``end`` when this rank first needs others."""
    _open.append(end)


def is_open() -> bool:
    """Whether there is such a handshake."""
    return bool(_open)


def settle() -> None:
    """End the handshake that was left open, if there is one.

    Raises:
        Error: what ``end`` raises; a rank is missing.
    """
    while _open:
        _open.pop()()


def forget() -> None:
    """Let go of a handshake that was left open: this rank has left the others."""
    _open.clear()


def slow(missing: Sequence[int], what: str, failed: str) -> str:
    """What is said when a rank has waited for long."""
    text = (
        f"rank {dist.get_rank()} has waited {SLOW:g} s in {what} for {named(missing) if missing else 'the others'}; "
        "what needs all ranks (evaluating, saving, clip_grad_norm_, full_tensor(), ...) is to be called on all of them"
    )
    return f"{text}; here it failed: {failed}" if failed else text
