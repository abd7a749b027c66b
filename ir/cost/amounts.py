"""Costs: the compute, memory traffic and communication of a call, node or program. They add, and scale by a count.

>>> step = 80 * block + head
>>> step.flops, step.sent["tp",].nbytes, step.seconds(machine, mesh)
(1.2e15, 3.1e10, 4.7)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from shardfx.ir.mesh import Mesh
from shardfx.ir.ops.sends import Sent

from .curve import VIEW
from .machine import Machine

Axes = tuple[str, ...]


class Work(NamedTuple):
    """The work of one call: FLOPs, bytes read and written, the dtype, and its kind (the op's name, or a view)."""

    flops: float
    touched: float
    dtype: torch.dtype = torch.float32
    kind: str = ""

    def seconds(self, machine: Machine) -> float:
        """The time of the call on a machine."""
        return machine.seconds(self.kind, self.flops, self.touched, self.dtype)


@dataclass(frozen=True)
class Cost:
    """The work of calls by count, the communication by axes, and the copies between the device and other memories.

    Work is not summed up, as some calls are bound by compute and others by memory.
    """

    work: Mapping[Work, float] = field(default_factory=dict)
    sent: Mapping[Axes, Sent] = field(default_factory=dict)
    copied: Mapping[str, Sent] = field(default_factory=dict)

    @property
    def flops(self) -> float:
        """The FLOPs of all calls."""
        return sum(work.flops * count for work, count in self.work.items())

    @property
    def touched(self) -> float:
        """The bytes that all calls read and write."""
        return sum(work.touched * count for work, count in self.work.items())

    @property
    def nbytes(self) -> float:
        """The bytes that a rank sends, over all axes."""
        return sum(sent.nbytes for sent in self.sent.values())

    def __add__(self, other: Cost) -> Cost:
        """The sum of two costs."""
        return total((self, other))

    def __mul__(self, count: float) -> Cost:
        """The cost of ``count`` repetitions."""
        return Cost(
            {work: times * count for work, times in self.work.items()},
            {axes: sent.times(count) for axes, sent in self.sent.items()},
            {pool: sent.times(count) for pool, sent in self.copied.items()},
        )

    __rmul__ = __mul__

    def computing(self, machine: Machine) -> float:
        """The time of all calls but communication, in seconds."""
        return sum(work.seconds(machine) * count for work, count in self.work.items())

    def sending(self, machine: Machine, mesh: Mesh) -> float:
        """The time of communication, by the links of the mesh (by the machine's where it states none)."""
        linked = machine.connect(mesh)
        return sum(linked.link(axes).seconds(*sent) for axes, sent in self.sent.items())

    def copying(self, machine: Machine) -> float:
        """The time of copies between the device's memory and other pools."""
        return sum(machine.pool(pool).seconds(*sent) for pool, sent in self.copied.items())

    def issuing(self, machine: Machine) -> float:
        """The time that the host takes to issue all calls, if it runs ahead of the device."""
        calls = sum(
            count * (machine.host_view if work.kind == VIEW else machine.host_call) for work, count in self.work.items()
        )
        moved = sum(sent.messages for sent in (*self.sent.values(), *self.copied.values()))
        return calls + moved * machine.host_call

    def seconds(self, machine: Machine, mesh: Mesh) -> float:
        """The total time without overlap, or the host's, if it is longer: an upper bound, for comparing choices; the
        time of a step is simulated in :mod:`shardfx.ir.timing`."""
        device = self.computing(machine) + self.sending(machine, mesh) + self.copying(machine)
        return max(device, self.issuing(machine))


def total(costs: Iterable[Cost]) -> Cost:
    """The sum of many costs."""
    work: dict[Work, float] = {}
    sent: dict[Axes, Sent] = {}
    copied: dict[str, Sent] = {}
    for cost in costs:
        for shard, count in cost.work.items():
            work[shard] = work.get(shard, 0) + count
        for axes, more in cost.sent.items():
            sent[axes] = sent.get(axes, Sent()) + more
        for pool, more in cost.copied.items():
            copied[pool] = copied.get(pool, Sent()) + more
    return Cost(work, sent, copied)
