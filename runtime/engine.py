"""Engines run rank programs, and nothing else: all ranks in this process, or this process's own.

An engine says only *how* a call is done: which memory stands behind ``memory.empty``, how a backend reduces and
scatters. What is called, in which order and on which memory, is the program's. An engine is made at the first call of
a plan, and keeps no state of the model: that is the store's (:mod:`.store`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import fx

from shardfx.ir.graph import Input
from shardfx.ir.program.rank_program import RankProgram

Tensor = torch.Tensor
RankPrograms = Mapping[int, RankProgram]
RankTensors = Mapping[int, Sequence[Tensor]]
"""What each rank is given, or returns."""


class RankProbe(Protocol):
    """Looks at one rank's program while it runs."""

    def inputs(self, inputs: Sequence[Input], tensors: Sequence[Tensor]) -> None:
        """What goes in."""

    def __call__(self, node: fx.Node, result: Any, operands: tuple[Any, ...]) -> None:
        """What a call made of its operands. A collective's result is there at its wait."""


class Probe(Protocol):
    """Looks at programs while they run: a search for NaNs, a measurement."""

    def watch(self, rank: int) -> RankProbe:
        """One for each rank."""


class Engine(Protocol):
    """Runs programs."""

    device: torch.device

    @property
    def ranks(self) -> Sequence[int]:
        """The ranks that run in this process."""

    def prepare(self) -> None:
        """What the processes of a job do together before their first run; again it does nothing."""

    def seed(self) -> Tensor:
        """A step's seed, the same on all ranks; ``torch.manual_seed`` makes it reproducible."""

    def run(self, programs: RankPrograms, inputs: RankTensors, watch: Probe | None = None) -> RankTensors:
        """Run one program for each of ``ranks``; gives what each returns.

        Raises:
            Error: a program raises, or members of a group ask for different collectives.
        """


def seed_tensor() -> Tensor:
    """A fresh seed from torch's default generator, on the CPU."""
    return torch.randint(2**62, ())


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor where programs run: itself, if it is there. From a CPU to a GPU nothing waits.

    A number goes along with the kernel that writes it. All else is copied into pinned memory of our own before this
    returns, and on from there by the device: the caller may write over a batch at once, also over a pinned one.
    """
    if tensor.device.type != "cpu" or device.type != "cuda":
        return tensor.to(device)
    if not tensor.dim():
        return torch.empty((), dtype=tensor.dtype, device=device).fill_(tensor)
    return torch.empty_like(tensor, pin_memory=True).copy_(tensor).to(device, non_blocking=True)
