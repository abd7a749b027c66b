"""All ranks in this process, in lock-step, deterministic."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from weakref import WeakKeyDictionary

import torch

from shardfx.ir.mesh import Mesh
from shardfx.ir.program.rank_program import RankProgram
from shardfx.ir.program.source import Source
from shardfx.runtime.engine import Watch, on_device, seed_tensor
from shardfx.runtime.memory_pool import MemoryPool
from shardfx.runtime.rendezvous import Groups, Request, run

from .collectives import perform
from .coroutine import as_coroutine

Tensor = torch.Tensor


@contextmanager
def one_thread() -> Iterator[None]:
    """Virtual ranks take turns, on small tensors: threads within an op would only get in one another's way.

    The number of threads is the process's: one run at a time sets it, and puts it back.
    """
    with _running:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(threads)


_running = threading.RLock()


class MeetingGroups(Groups):
    """Groups whose members meet in a way of their own."""

    def perform(
        self, requests: Sequence[Request], tensors: Sequence[Tensor], into: Sequence[Tensor | None]
    ) -> list[Tensor]:
        """Do a collective on the tensors of the ranks that meet: what each of them gets."""
        return perform(requests, tensors, into)


class VirtualEngine:
    """Runs every rank's program as a coroutine, up to its next collective (:mod:`shardfx.runtime.rendezvous`).

    ``groups`` may say that some ranks are run for all, and how those meet.
    """

    def __init__(self, mesh: Mesh, device: torch.device | None = None, groups: MeetingGroups | None = None) -> None:
        self.mesh, self.device = mesh, device or torch.device("cpu")
        self._groups = groups
        self._sources: WeakKeyDictionary[RankProgram, Source] = WeakKeyDictionary()
        self._pools: WeakKeyDictionary[RankProgram, MemoryPool] = WeakKeyDictionary()

    @property
    def ranks(self) -> Sequence[int]:
        """All of them."""
        return range(self.mesh.size)

    def prepare(self) -> None:
        """Nothing: all is here."""

    def seed(self) -> Tensor:
        """A step's seed."""
        return on_device(seed_tensor(), self.device)

    def run(
        self,
        programs: Mapping[int, RankProgram],
        inputs: Mapping[int, Sequence[Tensor]],
        watch: Watch | None = None,
    ) -> Mapping[int, Sequence[Tensor]]:
        """Run all programs to their ends; gives what each returns."""
        sources, watchers = {}, {}
        for rank, program in programs.items():
            pool = self._pools.setdefault(program, MemoryPool())
            pool.next_step()
            if watch is not None:
                watchers[rank] = watch.watch(rank)
                sources[rank] = as_coroutine(program, pool, watchers[rank])
                continue
            if program not in self._sources:
                self._sources[program] = as_coroutine(program, pool)
            sources[rank] = self._sources[program]
        for rank, watcher in watchers.items():
            watcher.inputs(programs[rank].inputs, inputs[rank])
        with torch.no_grad(), one_thread():
            meet = perform if self._groups is None else self._groups.perform
            return run(sources, inputs, self.mesh, meet, self._groups)
