"""How gloo reduces and scatters: as an exchange and a sum.

Its own reduce-scatter takes two to three times as long (``python -m benchmarks.collectives``). Counted at run time, a
large reduce-scatter is therefore an all-to-all.
"""

from __future__ import annotations

from typing import Any

import torch

c10d = torch.ops._c10d_functional
Tensor = torch.Tensor
LARGE = 1 << 20
"""A reduce-scatter of at least so many bytes is done as an exchange and a sum."""


class Exchange:
    """A reduce-scatter under way as an exchange."""

    def __init__(self, sent: Tensor, op: str, ranks: int) -> None:
        self.sent, self.op, self.ranks = sent, op, ranks

    def wait(self) -> Tensor:
        """This rank's piece of the sum."""
        received: Tensor = c10d.wait_tensor(self.sent)
        pieces = received.view(self.ranks, received.shape[0] // self.ranks, *received.shape[1:])
        return pieces.sum(0) if self.op == "sum" else pieces.mean(0)


def reduce_scatter(x: Tensor, op: str, ranks: int, group: str) -> Any:
    """Start a reduce-scatter; :func:`wait` ends it."""
    if x.nbytes < LARGE or op not in ("sum", "avg"):
        return c10d.reduce_scatter_tensor(x, op, ranks, group)
    each = [x.shape[0] // ranks] * ranks
    return Exchange(c10d.all_to_all_single(x, each, each, group), op, ranks)


def wait(started: Any) -> Tensor:
    """The result of what was started: a collective, an exchange in its place, a message to this rank."""
    done: Tensor = c10d.wait_tensor(started) if isinstance(started, Tensor) else started.wait()
    return done
