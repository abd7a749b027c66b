"""All ranks in this process, in lock-step, deterministic."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch

from shardfx.ir.errors import Error
from shardfx.ir.mesh import Mesh
from shardfx.ir.ops import memory_ops
from shardfx.ir.program.rank_program import RankProgram
from shardfx.ir.program.source import CallOverrides, ProgramSource, write_source
from shardfx.runtime.engine import Probe, RankProbe, on_device, seed_tensor
from shardfx.runtime.memory_pool import MemoryPool
from shardfx.runtime.rendezvous import REDUCTIONS, Groups, Request, run

c10d = torch.ops._c10d_functional
Tensor = torch.Tensor


@contextmanager
def one_thread() -> Iterator[None]:
    """Virtual ranks run one after another, on small tensors: threads within an op would only get in one another's way.

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
        self._sources: WeakKeyDictionary[RankProgram, ProgramSource] = WeakKeyDictionary()
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
        watch: Probe | None = None,
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


def _here(x: Tensor) -> Tensor:
    return x


def as_coroutine(program: RankProgram, pool: MemoryPool, watch: RankProbe | None = None) -> ProgramSource:
    """The program as a generator function on the memory of a pool; ``watch`` is shown every result."""
    instead: dict[Any, Callable[..., Any]] = {
        c10d.wait_tensor.default: _here,
        memory_ops.empty: pool.empty,
        memory_ops.arena: pool.arena,
    }
    return write_source(program, CallOverrides(instead, Request.of), watch)


# ---- collectives, in the order of the group: deterministic


def perform(requests: Sequence[Request], tensors: Sequence[Tensor], into: Sequence[Tensor | None]) -> list[Tensor]:
    """Do a collective on the tensors of a group's members; each result goes where its rank wants it."""
    made = _results(requests, tensors)
    return [new if at is None else at.copy_(new.view(at.shape)) for new, at in zip(made, into, strict=True)]


def _results(requests: Sequence[Request], tensors: Sequence[Tensor]) -> list[Tensor]:
    made = alike(requests[0], tensors)
    return [made] + [made.clone() for _ in tensors[1:]] if made is not None else own(requests, tensors)


def own(requests: Sequence[Request], tensors: Sequence[Tensor]) -> list[Tensor]:
    """What each member gets for itself, of all their tensors."""
    n = len(tensors)
    if requests[0].op == "reduce_scatter_tensor":
        return [shard.clone() for shard in reduce(tensors, requests[0].args[0]).chunk(n)]
    sent = [t.split(list(r.args[1])) for t, r in zip(tensors, requests, strict=True)]
    return [torch.cat([sent[source][k] for source in range(n)]) for k in range(n)]


def alike(request: Request, tensors: Sequence[Tensor]) -> Tensor | None:
    """What all members get alike, of all their tensors; None where each gets something of its own."""
    if request.op == "all_reduce":
        return reduce(tensors, request.args[0])
    if request.op == "all_gather_into_tensor":
        return torch.cat([t if t.dim() else t.reshape(1) for t in tensors])
    return None


def reduce(tensors: Sequence[Tensor], kind: str) -> Tensor:
    """Reduce in the order of the ranks."""
    total = tensors[0].clone()
    for other in tensors[1:]:
        if kind in ("sum", "avg"):
            total += other
        elif kind == "max":
            total = torch.maximum(total, other)
        elif kind == "min":
            total = torch.minimum(total, other)
        elif kind == "product":
            total *= other
        else:
            raise Error(f"unknown reduction {kind!r}", expected=", ".join(REDUCTIONS), got=kind)
    return total / len(tensors) if kind == "avg" else total
