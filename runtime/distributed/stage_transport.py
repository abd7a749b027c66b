"""Point-to-point messages between the stages of a pipeline on real ranks.

Through shared memory a send completes at once. On gloo its buffer is live until it has arrived, and a step of a rank
ends when all its sends have. On NCCL, messages from one rank to another are ordered on a stream, as in the programs,
and only the compute stream of a rank waits for them. Messages to higher and to lower stages have a process group each
(:data:`FORTH`, :data:`BACK`), so that two ranks that send to one another do not deadlock, each behind its own send.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from queue import Queue
from typing import Any

import torch
import torch.distributed as dist

from shardfx.ir.errors import Error
from shardfx.ir.graph import Graph
from shardfx.ir.ops.loop.stage_transfer import number, peers

from .shm import ShmGroup, Started

Tensor = torch.Tensor
AHEAD = 2
"""The number of receives posted ahead of their use: where messages travel only when their receiver is ready."""
FORTH, BACK = "/forth", "/back"
"""Suffixes of group names: the groups of the same ranks for messages to higher places, and to lower ones."""
Sent = tuple[dist.Work, Tensor]
Asked = tuple[Sequence[int], torch.dtype, str, int, int, int, str]
"""A receive request: shape, dtype, device, source place in the group, tag, iteration, group."""


def _started(asked: Asked, by_stream: bool) -> Started:
    shape, dtype, device, origin, tag, iteration, group = asked
    into = torch.empty(shape, dtype=dtype, device=device)
    channel = _channel(by_stream, group, origin, peers(group).rank(), tag, iteration)
    return Started(dist.irecv(into, group_src=origin, **channel), into)


def _channel(by_stream: bool, group: str, origin: int, to: int, tag: int, iteration: int) -> dict[str, Any]:
    """The process group and the tag of a message. NCCL has no tags, but a group for each direction."""
    if by_stream:
        return {"group": peers(group + (FORTH if origin < to else BACK))}
    return {"group": peers(group), "tag": number(tag, iteration)}


def check_messages(graph: Graph, device: torch.device) -> None:
    """Refuse stages on a process group bound to a device: it has one stream for all point-to-point messages of its
    ranks, two of which may wait for one another.

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
    """The receives of a program. Each run receives the same, in the same order: from the second run on, some receives
    are posted ahead of the one requested.

    Args:
        by_stream: received on streams, as on NCCL.
    """

    def __init__(self, by_stream: bool = False) -> None:
        self._by_stream = by_stream
        self._every: list[Asked] = []
        self._at, self._under_way = 0, deque[Started]()

    def begin(self) -> None:
        """Begin a run: post its first receives."""
        self._at, self._under_way = 0, deque(_started(asked, self._by_stream) for asked in self._every[:AHEAD])

    def receive(
        self, shape: Sequence[int], dtype: torch.dtype, device: str, origin: int, tag: int, iteration: int, group: str
    ) -> Started:
        """Post a receive (:func:`shardfx.ir.ops.loop.stage_transfer.receive`), if that is not done yet."""
        asked = (shape, dtype, device, origin, tag, iteration, group)
        if isinstance(peers(group), ShmGroup) and not self._by_stream:
            return _started(asked, False)
        at, self._at = self._at, self._at + 1
        if at == len(self._every):  # the first run
            self._every.append(asked)
            return _started(asked, self._by_stream)
        if at + AHEAD < len(self._every):
            self._under_way.append(_started(self._every[at + AHEAD], self._by_stream))
        return self._under_way.popleft()


class Outbox:
    """Sends of this rank that are in flight. On streams, work after the step waits for them. Gloo reports completion
    only to one who waits: a thread does, and releases what has arrived."""

    def __init__(self, by_stream: bool = False) -> None:
        self._by_stream = by_stream
        self._sent: list[Sent] = []
        self._thread: Queue[Sent] | None = None
        self._failed: list[RuntimeError] = []

    def send(self, x: Tensor, to: int, tag: int, iteration: int, group: str) -> None:
        """Start a send (:func:`shardfx.ir.ops.loop.stage_transfer.send`)."""
        sent = x.contiguous()
        channel = _channel(self._by_stream, group, peers(group).rank(), to, tag, iteration)
        work = dist.isend(sent, group_dst=to, **channel)
        assert work is not None
        if self._by_stream:
            self._sent.append((work, sent))
        elif not isinstance(peers(group), ShmGroup):  # where a copy is on its way
            if self._thread is None:
                self._thread, self._failed = Queue(), []
                threading.Thread(target=_arrive, args=(self._thread, self._failed), daemon=True).start()
            self._thread.put((work, sent))

    def empty(self) -> None:
        """Wait until all sends have completed, or make a stream wait for that."""
        for work, _ in self._sent:
            work.wait()
        self._sent.clear()
        if self._thread is not None:
            self._thread.join()
        if self._failed:
            raise self._failed[0]

    def forget(self) -> None:
        """Drop all sends in flight, as their receivers are gone."""
        self._sent, self._thread, self._failed = [], None, []


def _arrive(sent: Queue[Sent], failed: list[RuntimeError]) -> None:
    """The thread that waits for sends, one after the other."""
    while True:
        work, stored = sent.get()
        try:
            work.wait()
        except RuntimeError as error:  # raised where the rank waits for all of them
            failed.append(error)
        del work, stored
        sent.task_done()
