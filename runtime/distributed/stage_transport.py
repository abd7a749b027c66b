"""Messages between the stages of a pipeline on real ranks.

Through shared memory a message leaves at once. On gloo it is stored until it has arrived, and a step of a rank ends
when all it sent has. On NCCL messages from one rank to another follow one another on a stream, in the order of the
programs, and only the stream on which a rank computes waits for them; so that of two ranks that send to one another
neither waits behind its own send, messages to higher and to lower stages have a process group each (:data:`FORTH`,
:data:`BACK`).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from queue import Queue
from typing import NamedTuple

import torch
import torch.distributed as dist

from shardfx.ir.errors import Error
from shardfx.ir.graph import Graph
from shardfx.ir.ops.loop.stage_transfer import number, peers

from .groups import shares_memory

Tensor = torch.Tensor
AHEAD = 2
"""So many messages are received before they are asked for: where they travel only when their receiver is ready."""
FORTH, BACK = "/forth", "/back"
"""Behind the name of a group: those of the same ranks in which messages go to higher places, and to lower ones."""


Sent = tuple[dist.Work, Tensor]


class Receipt(NamedTuple):
    """A message under way to this rank."""

    into: Tensor
    work: dist.Work

    def wait(self) -> Tensor:
        """What was sent."""
        self.work.wait()
        return self.into


Asked = tuple[Sequence[int], torch.dtype, str, int, int, int, str]
"""What is received: shape, dtype, device, from which place of the group, tag, iteration, group."""


def _started(asked: Asked, by_stream: bool) -> Receipt:
    shape, dtype, device, origin, tag, iteration, group = asked
    into = torch.empty(shape, dtype=dtype, device=device)
    if by_stream:  # NCCL has no tags
        work = dist.irecv(into, group=one_way(group, origin, peers(group).rank()), group_src=origin)
    else:
        work = dist.irecv(into, group=peers(group), group_src=origin, tag=number(tag, iteration))
    assert work is not None
    return Receipt(into, work)


def one_way(group: str, origin: int, to: int) -> dist.ProcessGroup:
    """The process group in which a rank sends to another by a stream."""
    found: dist.ProcessGroup = peers(group + (FORTH if origin < to else BACK))
    return found


def check_messages(graph: Graph, device: torch.device) -> None:
    """A process group that is bound to a device has one stream for all that its ranks send to one another: two of them
    may wait for one another.

    Raises:
        Error: stages are to send in such a group.
    """
    world = dist.group.WORLD
    if device.type == "cpu" or graph.pipeline is None or world is None or world.bound_device_id is None:
        return
    raise Error(
        "the stages of a pipeline cannot send to one another in a process group that is bound to a device",
        where="parallelize(...)",
        expected="a process group that makes the communicators of two ranks when they first send",
        got=f"torch.distributed.init_process_group(device_id={world.bound_device_id})",
        remedy="leave device_id out of init_process_group, and call torch.cuda.set_device(...) before it",
    )


class Inbox:
    """What a program receives. Each of its runs receives the same, in the same order: from the second one on, some
    messages are under way ahead of the one that is asked for.

    Args:
        by_stream: received on streams, as on NCCL.
    """

    def __init__(self, by_stream: bool = False) -> None:
        self._by_stream = by_stream
        self._every: list[Asked] = []
        self._known, self._at = False, 0
        self._under_way: deque[Receipt] = deque()

    def begin(self) -> None:
        """A run begins."""
        self._known, self._at = bool(self._every), 0
        self._under_way.clear()
        for asked in self._every[:AHEAD]:
            self._under_way.append(_started(asked, self._by_stream))

    def receive(
        self, shape: Sequence[int], dtype: torch.dtype, device: str, origin: int, tag: int, iteration: int, group: str
    ) -> Receipt:
        """Start to receive (:func:`shardfx.ir.ops.loop.stage_transfer.receive`), if that is not under way."""
        asked = (shape, dtype, device, origin, tag, iteration, group)
        if shares_memory(group) and not self._by_stream:
            return _started(asked, False)
        self._at += 1
        if not self._known:
            self._every.append(asked)
            return _started(asked, self._by_stream)
        if self._at + AHEAD <= len(self._every):
            self._under_way.append(_started(self._every[self._at + AHEAD - 1], self._by_stream))
        return self._under_way.popleft()


class Outbox:
    """What this rank has sent, until it has arrived. On streams what is computed behind the step waits for that. Gloo
    says it only to one who waits: a thread does, and releases what has arrived."""

    def __init__(self, by_stream: bool = False) -> None:
        self._by_stream = by_stream
        self._sent: list[Sent] = []
        self._thread: Queue[Sent] | None = None
        self._failed: list[RuntimeError] = []

    def send(self, x: Tensor, to: int, tag: int, iteration: int, group: str) -> None:
        """Start to send (:func:`shardfx.ir.ops.loop.stage_transfer.send`)."""
        sent = x.contiguous()
        if self._by_stream:
            work = dist.isend(sent, group=one_way(group, peers(group).rank(), to), group_dst=to)
        else:
            work = dist.isend(sent, group=peers(group), group_dst=to, tag=number(tag, iteration))
        assert work is not None
        if self._by_stream:
            self._sent.append((work, sent))
        elif not shares_memory(group):  # where a copy is on its way
            if self._thread is None:
                self._thread, self._failed = Queue(), []
                threading.Thread(target=_arrive, args=(self._thread, self._failed), daemon=True).start()
            self._thread.put((work, sent))

    def __deepcopy__(self, memo: dict[int, object]) -> Outbox:
        """An empty one: what is under way is this one's."""
        return Outbox(self._by_stream)

    def empty(self) -> None:
        """Return when all has arrived, or a stream waits for that."""
        for work, _ in self._sent:
            work.wait()
        self._sent.clear()
        if self._thread is not None:
            self._thread.join()
        if self._failed:
            raise self._failed[0]

    def forget(self) -> None:
        """Forget all, for those who were to get it are gone."""
        self._sent, self._thread, self._failed = [], None, []


def _arrive(sent: Queue[Sent], failed: list[RuntimeError]) -> None:
    """Wait for one message after the other."""
    while True:
        work, stored = sent.get()
        try:
            work.wait()
        except RuntimeError as error:  # raised where the rank waits for all of them
            failed.append(error)
        del work, stored
        sent.task_done()
