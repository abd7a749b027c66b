"""What goes from stage to stage between real ranks: started here, done while the rank goes on.

Between ranks of one machine it goes through memory that they share (:mod:`shardfx.runtime.same_host.parcels`): it
leaves at once. Else gloo sends it: it is held until it has arrived, and a rank's step ends when all it sent has.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
import torch.distributed as dist

from shardfx.ir.ops.time.handover import number, peers
from shardfx.runtime.same_host.neighbourhood import met
from shardfx.runtime.same_host.parcels import Parcel

Tensor = torch.Tensor
AHEAD = 2
"""So many messages of gloo are received before they are asked for."""


class Receipt:
    """A message under way to this rank."""

    def __init__(self, into: Tensor, work: dist.Work) -> None:
        self.into, self.work = into, work

    def wait(self) -> Tensor:
        """What was sent."""
        self.work.wait()
        return self.into


Asked = tuple[Sequence[int], torch.dtype, str, int, int, int, str]
"""What is received: shape, dtype, device, from which place of the group, tag, turn, group."""


def _started(asked: Asked) -> Receipt:
    shape, dtype, device, origin, tag, turn, group = asked
    into = torch.empty(shape, dtype=dtype, device=device)
    work = dist.irecv(into, group=peers(group), group_src=origin, tag=number(tag, turn))
    assert work is not None
    return Receipt(into, work)


class Inbox:
    """What a program receives. Each of its runs receives the same, in the same order: from the second one on, some of
    gloo's messages are under way ahead of the one that is asked for, for they travel only when their receiver is
    ready."""

    def __init__(self) -> None:
        self._every: list[Asked] = []
        self._known = False
        self._at = 0
        self._under_way: deque[Receipt] = deque()

    def begin(self) -> None:
        """A run begins."""
        self._known, self._at = bool(self._every), 0
        self._under_way.clear()
        for asked in self._every[:AHEAD]:
            self._under_way.append(_started(asked))

    def receive(
        self, shape: Sequence[int], dtype: torch.dtype, device: str, origin: int, tag: int, turn: int, group: str
    ) -> Receipt | Parcel:
        """Start to receive (:func:`shardfx.ir.ops.time.handover.receive`), if that is not under way."""
        if (near := met.get(group)) is not None:
            into = torch.empty(shape, dtype=dtype, device=device)
            return near.parcels.receive(into, origin, number(tag, turn))
        self._at += 1
        if not self._known:
            asked = (shape, dtype, device, origin, tag, turn, group)
            self._every.append(asked)
            return _started(asked)
        if self._at + AHEAD <= len(self._every):
            self._under_way.append(_started(self._every[self._at + AHEAD - 1]))
        return self._under_way.popleft()


class Outbox:
    """What this rank has sent on gloo, until it has arrived."""

    def __init__(self) -> None:
        self._sent: deque[tuple[dist.Work, Tensor]] = deque()

    def send(self, x: Tensor, to: int, tag: int, turn: int, group: str) -> None:
        """Start to send (:func:`shardfx.ir.ops.time.handover.send`)."""
        if (near := met.get(group)) is not None:
            near.parcels.send(x, to, number(tag, turn))
            return
        while self._sent and self._sent[0][0].is_completed():
            self._sent.popleft()
        held = x.contiguous()
        work = dist.isend(held, group=peers(group), group_dst=to, tag=number(tag, turn))
        assert work is not None
        self._sent.append((work, held))

    def empty(self) -> None:
        """Return when all has arrived."""
        while self._sent:
            self._sent[0][0].wait()
            self._sent.popleft()

    def forget(self) -> None:
        """Let go of all, for those who were to get it are gone."""
        self._sent.clear()
