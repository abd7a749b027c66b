"""Counting collectives while programs run, on virtual ranks and under ``torchrun`` alike.

    with count_collectives() as counts:
        pm(x, y)
    counts["all_reduce", "dp2.tp2/dp@0"]        # CollectiveCount(calls=1, nbytes=36864)

Under ``torchrun`` a rank sees the groups that it is in; virtual ranks see all groups. Bytes are those that one rank
of the group sends, for the local tensors that the collective really has (padding included), by the formulas of
:mod:`shardfx.ir.ops.sends`; of an exchange, in which each rank sends as much as it says, those of the rank that sends
most (of a process, its own).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from shardfx.ir.ops.comm import row_of_collective
from shardfx.ir.ops.sends import sent as sent_of
from shardfx.runtime.rendezvous import Request, listeners

Key = tuple[str, str]


@dataclass
class CollectiveCount:
    """How often a collective ran on a group, and the bytes that one of its ranks sent."""

    calls: int = 0
    nbytes: float = 0.0


class CollectiveCounts(dict[Key, CollectiveCount]):
    """By (collective, group). Several groups along the same axes (``tp@0``, ``tp@1``) count each for themselves."""

    def add(self, op: str, group: str, nbytes: float) -> None:
        """Count one call that sent ``nbytes`` from this rank."""
        count = self.setdefault((op, group), CollectiveCount())
        count.calls += 1
        count.nbytes += nbytes

    @property
    def calls(self) -> int:
        """How many ran, of all kinds and groups."""
        return sum(count.calls for count in self.values())

    @property
    def nbytes(self) -> float:
        """The bytes that this process's ranks sent, in all of them."""
        return sum(count.nbytes for count in self.values())


@contextmanager
def count_collectives() -> Iterator[CollectiveCounts]:
    """Count what runs in this process while the context is open."""
    counts = CollectiveCounts()

    def listen(asked: Sequence[tuple[Request, torch.Tensor]]) -> None:
        (request, local), n = asked[0], len(asked)
        if request.op == EXCHANGE:
            most = max(exchanged(each.args[1], i, tensor) for i, (each, tensor) in enumerate(asked))
        else:
            most = sent(request.op, local, n)
        counts.add(request.op, request.group, most)

    listeners.append(listen)
    try:
        with _CollectiveCounter(counts):
            yield counts
    finally:
        listeners.remove(listen)


def sent(op: str, local: torch.Tensor, n: int) -> float:
    """The bytes that one of ``n`` ranks sends; ``local`` is what it puts in."""
    row = row_of_collective(op)
    found = sent_of(1.0, n, local.nbytes) if row is None else row.sent(row.whole_of(local.nbytes, n), n)
    return found.nbytes


def exchanged(lengths: Sequence[int] | None, place: int, local: torch.Tensor) -> float:
    """The bytes that a rank, at a place among its group, sends to others of what it puts into an exchange."""
    assert lengths is not None, "programs say how much goes to whom"
    return (sum(lengths) - lengths[place]) * local.itemsize


EXCHANGE = "all_to_all_single"
COUNTED = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single", "broadcast")


class _CollectiveCounter(TorchDispatchMode):
    """Sees the functional collectives of real ranks. A coalesced one counts as one call."""

    def __init__(self, counts: CollectiveCounts) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._counts = counts

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        namespace, _, name = func._schema.name.partition("::")
        op = name.removesuffix("_out").removesuffix("_").removesuffix("_coalesced")
        if namespace == "_c10d_functional" and op in COUNTED:
            tensors = args[0] if isinstance(args[0], (list, tuple)) else [args[0]]
            group = str(args[-1])
            ranks = _resolve(group)
            if op == EXCHANGE:
                self._counts.add(op, group, exchanged(args[2], ranks.rank(), tensors[0]))
            else:
                self._counts.add(op, group, sum(sent(op, tensor, ranks.size()) for tensor in tensors))
        return func(*args, **(kwargs or {}))


def _resolve(group: str) -> dist.ProcessGroup:
    from torch._C._distributed_c10d import _resolve_process_group

    return _resolve_process_group(group)  # type: ignore[arg-type]
