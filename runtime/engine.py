"""Engines run rank programs, and nothing else: all ranks in this process, or this process's own.

An engine only implements calls: the allocator behind ``memory.empty``, a backend's reductions and scatters. The
program decides what is called, in which order and on which memory. An engine is made at the first call of a plan, and
keeps no state of the model: that is the store's (:mod:`.store`).
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
"""The inputs, or the results, of each rank."""


class RankProbe(Protocol):
    """A probe of one rank's program."""

    def inputs(self, inputs: Sequence[Input], tensors: Sequence[Tensor]) -> None:
        """Called with the program's inputs before its first call."""

    def __call__(self, node: fx.Node, result: Any, operands: tuple[Any, ...]) -> None:
        """Called after each call with its result and operands. A collective's result is there at its wait."""


class Probe(Protocol):
    """A probe of running programs: a search for NaNs, a measurement."""

    def watch(self, rank: int) -> RankProbe:
        """The probe of one rank."""


class Engine(Protocol):
    """The interface of an engine, which runs rank programs."""

    device: torch.device

    def seed(self) -> Tensor:
        """A step's seed, the same on all ranks; ``torch.manual_seed`` makes it reproducible."""

    def run(self, programs: RankPrograms, inputs: RankTensors, watch: Probe | None = None) -> RankTensors:
        """Run one program for each rank of this process; returns the results of each.

        Raises:
            Error: a program raises, or members of a group ask for different collectives.
        """


def new_seed(device: torch.device) -> Tensor:
    """A fresh seed from torch's default generator of the CPU."""
    return on_device(torch.randint(2**62, ()), device)


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor on the device of programs: itself, if it is there. Copies from CPU to GPU do not synchronize.

    A number goes along with the kernel that writes it. All else is copied into pinned memory of our own before this
    returns, and on from there by the device: the caller may write over a batch at once, also over a pinned one.
    """
    if tensor.device.type != "cpu" or device.type != "cuda":
        return tensor.to(device)
    if not tensor.dim():
        return torch.empty((), dtype=tensor.dtype, device=device).fill_(tensor)
    return torch.empty_like(tensor, pin_memory=True).copy_(tensor).to(device, non_blocking=True)
