"""Point-to-point transfers between pipeline stages.

    %5 = comm.send(%4, axes=[pp], origin=0, places=[1], tag=3)
        on a rank at pp=0     send = stage.send(mm, 1, 3, 0, 'pp2/pp@0')
        on a rank at pp=1     receive = stage.receive([4, 8], torch.float32, 'cpu', 0, 3, 0, 'pp2/pp@0')
                              wait = c10d.wait_tensor(receive)

A send does not wait: its buffer is kept until it has arrived, by the engine or (in a saved program) here. Between two
ranks messages keep their order; ``tag`` and ``iteration`` identify them. Needs torch alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import fx
from torch._C._distributed_c10d import _resolve_process_group
from torch._subclasses.fake_tensor import FakeTensor

c10d = torch.ops._c10d_functional
Tensor = torch.Tensor


def send(x: Tensor, to: int, tag: int, iteration: int, group: str) -> None:
    """Send to the rank at an index of a group, without waiting for the receiver."""
    if not isinstance(x, FakeTensor):
        x = x.contiguous()
        SENT.append((dist.isend(x, group=peers(group), group_dst=to, tag=number(tag, iteration)), x))
        if len(SENT) > 256:
            SENT.popleft()[0].wait()


def receive(
    shape: Sequence[int], dtype: torch.dtype, device: str, origin: int, tag: int, iteration: int, group: str
) -> Tensor:
    """What the rank at a place of a group sends; it is there once it was waited for."""
    made = torch.empty(list(shape), dtype=dtype, device=device)
    if not isinstance(made, FakeTensor):
        dist.recv(made, group=peers(group), group_src=origin, tag=number(tag, iteration))
    return made


fx.node.has_side_effect(send)


def peers(group: str) -> Any:
    """The process group of a name."""
    return _resolve_process_group(group)  # type: ignore[arg-type]


def number(tag: int, iteration: int) -> int:
    """The message tag of a value in an iteration."""
    return iteration * MOST + tag


SENT: deque[tuple[Any, Tensor]] = deque()
"""Sends in flight, each with its buffer."""

MOST = 1 << 14
"""An upper bound of the number of values sent between stages."""


class Message(NamedTuple):
    """A point-to-point message: sender and receiver in their group, its tag, and the iteration."""

    group: str
    origin: int
    to: int
    tag: int
    iteration: int

    def __str__(self) -> str:
        route = f"from place {self.origin} to place {self.to} of {self.group}"
        return f"message {self.tag} of iteration {self.iteration} {route}"
