"""The engine of virtual ranks: all in this process, in lock-step, deterministic."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch

from shardfx.ir.mesh import Mesh
from shardfx.ir.ops import memory_ops
from shardfx.ir.program.rank_program import RankProgram
from shardfx.ir.program.source import CallOverrides, ProgramSource, write_source
from shardfx.runtime.compiled_programs import Write
from shardfx.runtime.engine import Probe, RankPrograms, RankTensors, new_seed
from shardfx.runtime.memory_pool import MemoryPool
from shardfx.runtime.rendezvous import Request, run

c10d = torch.ops._c10d_functional
Tensor = torch.Tensor


class VirtualEngine:
    """Runs every rank's program as a coroutine, up to its next collective (:mod:`shardfx.runtime.rendezvous`)."""

    def __init__(self, mesh: Mesh, device: torch.device | None = None, write: Write = write_source) -> None:
        self.mesh, self.device, self._write = mesh, device or torch.device("cpu"), write
        self._sources: WeakKeyDictionary[RankProgram, ProgramSource] = WeakKeyDictionary()
        self._pools: WeakKeyDictionary[RankProgram, MemoryPool] = WeakKeyDictionary()

    def seed(self) -> Tensor:
        """A step's seed."""
        return new_seed(self.device)

    def run(self, programs: RankPrograms, inputs: RankTensors, watch: Probe | None = None) -> RankTensors:
        """Run all programs to their ends; returns the results of each."""
        sources, watchers = {}, {}
        for rank, program in programs.items():
            pool = self._pools.setdefault(program, MemoryPool())
            pool.next_step()
            if watch is not None:
                watchers[rank] = watch.watch(rank)
                sources[rank] = write_source(program, _overrides(pool), watchers[rank])
                continue
            if program not in self._sources:
                self._sources[program] = self._write(program, _overrides(pool))
            sources[rank] = self._sources[program]
        for rank, watcher in watchers.items():
            watcher.inputs(programs[rank].inputs, inputs[rank])
        with torch.no_grad():
            return run(sources, inputs, self.mesh)


def _overrides(pool: MemoryPool) -> CallOverrides:
    """The overrides of collectives, which generators yield to the scheduler, and of memory, which comes from a pool."""
    instead: dict[Any, Callable[..., Any]] = {memory_ops.empty: pool.empty, memory_ops.arena: pool.arena}
    return CallOverrides(instead | {c10d.wait_tensor.default: lambda x: x}, Request.of)
