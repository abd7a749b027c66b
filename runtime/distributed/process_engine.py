"""The engine under ``torchrun``: this process is one rank of the mesh, and runs that rank's program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from shardfx.ir.graph import Graph
from shardfx.ir.ops import memory_ops
from shardfx.ir.ops.experts.dispatch import Overflow
from shardfx.ir.ops.loop import stage_transfer
from shardfx.ir.program.rank_program import RankProgram
from shardfx.ir.program.source import CallOverrides, ProgramSource, write_source
from shardfx.runtime.compiled_programs import Write
from shardfx.runtime.engine import Probe, RankPrograms, RankTensors, new_seed
from shardfx.runtime.memory_pool import MemoryPool

from . import shm
from . import stage_transport as messages
from .groups import axes_of, by_stream, is_dry_run, make_groups, share_memory
from .peer_failure import ended, ending_together, exchange

c10d = torch.ops._c10d_functional
Tensor = torch.Tensor


def wait(started: Any) -> Tensor:
    """Wait for a collective, or a message to this rank; returns its result."""
    done: Tensor = c10d.wait_tensor(started) if isinstance(started, Tensor) else started.wait()
    return done


class ProcessEngine:
    """The engine of a real rank: runs its program as a plain Python function. All ranks make theirs together."""

    def __init__(self, graph: Graph, device: torch.device, write: Write = write_source) -> None:
        self.device, self.rank = device, dist.get_rank()
        self._by_stream = by_stream(device)
        self._write = write
        self._outbox = messages.Outbox(self._by_stream)
        self._sources: WeakKeyDictionary[RankProgram, ProgramSource] = WeakKeyDictionary()
        self._inboxes: WeakKeyDictionary[RankProgram, messages.Inbox] = WeakKeyDictionary()
        self._pools: WeakKeyDictionary[RankProgram, MemoryPool] = WeakKeyDictionary()
        with ending_together("making the groups of ranks"):
            make_groups(graph.mesh, axes_of(graph))
            if self._by_stream and graph.pipeline is not None:
                for way in (messages.FORTH, messages.BACK):
                    make_groups(graph.mesh, [(graph.pipeline.axis,)], way)

    def seed(self) -> Tensor:
        """A step's seed, drawn by rank 0. All ranks draw, so that generators that start alike stay alike."""
        seed = new_seed(self.device)
        with ending_together("the broadcast of the step's seed"):
            dist.broadcast(seed, 0)
        return seed

    def run(self, programs: RankPrograms, inputs: RankTensors, watch: Probe | None = None) -> RankTensors:
        """Run this rank's program.

        Raises:
            Error: it raised here, or on another rank while this one waited for it (see :mod:`.peer_failure`).
        """
        program, given = programs[self.rank], inputs[self.rank]
        if watch is not None:
            watcher = watch.watch(self.rank)
            source = write_source(program, self._forms(program), watcher)
        else:
            source = self.source(program)
        self._pools[program].next_step()
        self._inboxes[program].begin()
        eager = self._write is write_source
        with torch.no_grad(), torch._C._AutoDispatchBelowAutograd() if eager else nullcontext():  # dispatch is faster
            try:
                if watch is not None:
                    watcher.inputs(program.inputs, given)
                results: Sequence[Tensor] = source(*given)
            except Exception as error:
                self._outbox.forget()
                if isinstance(error, Overflow):  # on all ranks
                    raise
                raise ended(source.node_of(error), error) from error
            with ending_together("waiting for what it sent to other stages to arrive"):
                self._outbox.empty()
            if watch is not None and not is_dry_run():  # a rank may need nothing more from one that failed
                exchange([0], "the end of the step")
        return {self.rank: results}

    def source(self, program: RankProgram) -> ProgramSource:
        """The executable source of a program, generated once."""
        if program not in self._sources:
            self._sources[program] = self._write(program, self._forms(program))
        return self._sources[program]

    def _forms(self, program: RankProgram) -> CallOverrides:
        """The overrides of a program's calls for this backend."""
        share = not self._by_stream and any(share_memory())
        pool = self._pools.setdefault(program, MemoryPool(shm.shared_bytes if share else None))
        instead: dict[Any, Callable[..., Any]] = {memory_ops.empty: pool.empty, memory_ops.arena: pool.arena}
        instead |= {stage_transfer.send: self._outbox.send, c10d.wait_tensor.default: wait}
        inbox = self._inboxes.setdefault(program, messages.Inbox(self._by_stream))
        instead[stage_transfer.receive] = inbox.receive
        return CallOverrides(instead | (shm.DIRECT if share else {}))
