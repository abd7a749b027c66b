"""Counting collectives while programs run on virtual ranks.

    with count_collectives() as counts:
        pm(x, y)
    counts["all_reduce", "dp2.tp2/dp@0"]        # CollectiveCount(calls=1, nbytes=36864)

Bytes are those that one rank of the group sends, for the local tensors that the collective really has (padding
included), by the formulas of :mod:`shardfx.ir.ops.sends`; of an exchange, in which each rank sends as much as it says,
those of the rank that sends most.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from shardfx.ir.ops.comm import row_of_collective
from shardfx.ir.ops.sends import sent
from shardfx.runtime import rendezvous
from shardfx.runtime.rendezvous import Request

Key = tuple[str, str]


@dataclass
class CollectiveCount:
    """How often a collective ran on a group, and the bytes that one of its ranks sent."""

    calls: int = 0
    nbytes: float = 0.0


class CollectiveCounts(dict[Key, CollectiveCount]):
    """By (collective, group). Several groups along the same axes (``tp@0``, ``tp@1``) count each for themselves."""

    @property
    def calls(self) -> int:
        """How many ran, of all kinds and groups."""
        return sum(count.calls for count in self.values())

    @property
    def nbytes(self) -> float:
        """The bytes that ranks sent, in all of them."""
        return sum(count.nbytes for count in self.values())


@contextmanager
def count_collectives() -> Iterator[CollectiveCounts]:
    """Count what runs in this process while the context is open."""
    counts, perform = CollectiveCounts(), rendezvous.perform

    def counted(requests: Sequence[Request], tensors: Sequence[torch.Tensor], into: Any) -> list[torch.Tensor]:
        count = counts.setdefault((requests[0].op, requests[0].group), CollectiveCount())
        count.calls += 1
        asked = zip(requests, tensors, strict=True)
        count.nbytes += max(_nbytes(each, i, tensor, len(tensors)) for i, (each, tensor) in enumerate(asked))
        return perform(requests, tensors, into)

    with mock.patch.object(rendezvous, "perform", counted):
        yield counts


def _nbytes(request: Request, place: int, local: torch.Tensor, n: int) -> float:
    """The bytes that the rank at a place among ``n`` sends; ``local`` is what it puts in."""
    if request.op == "all_to_all_single":
        lengths = request.args[1]
        return float((sum(lengths) - lengths[place]) * local.itemsize)
    row = row_of_collective(request.op)
    return (sent(1.0, n, local.nbytes) if row is None else row.sent(row.full_bytes_of(local.nbytes, n), n)).nbytes
