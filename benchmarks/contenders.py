"""Comparison of training steps: contenders share the same processes and alternate.

    with_ranks(rank_main, size, rounds)          # rank_main(rank, size, rounds), in two gloo processes
        found = take_turns({"DDP": (module, step), "ours": (pm, step)}, rounds, steps)
        ratio(found["DDP"], found["ours"])

Each process has one thread. Contenders run round after round, so that a busy neighbour slows all of them alike; a
round's time is the slowest rank's, by the clock and by the time that a rank's processors worked, which depends less on
neighbours. The memory of a step is observed op by op, whoever owns it.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardfx.runtime.distributed import groups
from shardfx.runtime.distributed.shm import open_groups

from .models import Size

RANKS, WARM = 2, 2
Step = Callable[[], Tensor]
"""Returns the loss; its ``backward()`` is still to come, unless the step is a full one."""
Contender = tuple[nn.Module, Step]


def with_ranks(main: Callable[..., None], *told: Any, minutes: float = 5) -> None:
    """Run ``main(rank, *told)`` in gloo processes of one thread each."""
    os.environ |= {"OMP_NUM_THREADS": "1"}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(_rank, (port, minutes, main, told), nprocs=RANKS)


def _rank(rank: int, port: int, minutes: float, main: Callable[..., None], told: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    address, timeout = f"tcp://127.0.0.1:{port}", timedelta(minutes=minutes)
    groups.asks_for_shm = lambda: True  # those of shardfx alone
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=RANKS, timeout=timeout)
    main(rank, *told)
    dist.destroy_process_group()


def sized(parser: argparse.ArgumentParser, **defaults: int) -> None:
    """Add options for the GPT's size."""
    for name, value in {**vars(Size()), **defaults}.items():
        parser.add_argument(f"--{name}", type=int, default=value)


def size_of(given: dict[str, Any]) -> Size:
    """The size by the options, which are removed from the arguments."""
    return Size(**{name: given.pop(name) for name in vars(Size())})


# ---- times ----------------------------------------------------------------------------------------------------------


@dataclass
class Times:
    """Milliseconds of a step, round by round: of the slowest rank, by the clock and of its processors."""

    clock: list[float] = field(default_factory=list)
    processors: list[float] = field(default_factory=list)

    def __str__(self) -> str:
        median, least, most = statistics.median(self.clock), min(self.clock), max(self.clock)
        worked = statistics.median(self.processors)
        return f"{median:7.1f} ms   least {least:7.1f}   most {most:7.1f}   of processors {worked:7.1f}"


@dataclass(frozen=True)
class Ratio:
    """The speed of one relative to another: medians over the rounds."""

    clock: float
    processors: float


def ratio(other: Times, mine: Times) -> Ratio:
    """The speed of ``mine`` relative to ``other``, in the same rounds."""
    pairs = ((other.clock, mine.clock), (other.processors, mine.processors))
    return Ratio(*(statistics.median(b / a for b, a in zip(*pair, strict=True)) for pair in pairs))


def take_iterations(contenders: Mapping[str, Contender], rounds: int, steps: int) -> dict[str, Times]:
    """Some rounds of all, after a few to warm up; all ranks call it together, and get the same."""
    times = {name: Times() for name in contenders}
    for number in range(rounds + WARM):
        for name, (module, step) in contenders.items():
            clock, processors, loss = _measure(module, step, steps)
            if number >= WARM:
                times[name].clock.append(clock)
                times[name].processors.append(processors)
            elif dist.get_rank() == 0:
                print(f"warming up: {name}, loss {loss:.4f}", flush=True)
    return times


def _measure(module: nn.Module, step: Step, steps: int) -> tuple[float, ...]:
    """Milliseconds of a step, of the slowest rank, by the clock and of processors; and the loss (0 where a rank does
    not know it)."""
    dist.barrier()
    started, worked = time.perf_counter(), time.process_time()
    for _ in range(steps):
        module.zero_grad(set_to_none=True)
        loss = step()
        if loss.requires_grad:
            loss.backward()
    clock, processors = time.perf_counter() - started, time.process_time() - worked
    spent = torch.tensor([clock / steps * 1e3, processors / steps * 1e3, loss.detach()], dtype=torch.float64)
    dist.all_reduce(spent, dist.ReduceOp.MAX)
    return tuple(spent.tolist())


# ---- memory ---------------------------------------------------------------------------------------------------------


def peak(module: nn.Module, step: Step, stored: Iterable[Tensor]) -> int:
    """The most bytes in a step, those that are ``stored`` among them; in the third step, when all that is kept between
    steps is there. It counts all along: also before the step uses it first."""
    with _Live() as live:
        live.see(list(stored))
        for _ in range(3):
            module.zero_grad(set_to_none=True)
            live.peak = 0
            _full_step(step)
    return live.peak


def nbytes(tensors: Iterable[Tensor]) -> int:
    """The bytes of the memory of tensors, of shared memory once."""
    return sum({each._cdata: each.nbytes() for each in map(_storage, tensors)}.values())


def _full_step(step: Step) -> None:
    loss = step()
    if loss.requires_grad:
        loss.backward()


class _Live(TorchDispatchMode):
    """The bytes of all storages that ops give, as long as they are there; and the most of them at once. Without what
    serves collectives between neighbours, as gloo's buffers are not seen either."""

    def __init__(self) -> None:
        super().__init__()
        self._found: dict[int, StorageWeakRef] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.see(out)
        return out

    def see(self, nest: Any) -> None:
        """Count the tensors of a nest, too."""
        for tensor in tree_leaves(nest):
            if isinstance(tensor, Tensor):
                storage = _storage(tensor)
                self._found.setdefault(storage._cdata, StorageWeakRef(storage))
        self.peak = max(self.peak, self._there())

    def _there(self) -> int:
        total = 0
        exchanged = {each.untyped_storage()._cdata for group in open_groups for each in group.memory}
        for key, ref in list(self._found.items()):
            if key in exchanged:
                continue
            storage = torch.UntypedStorage._new_with_weak_ptr(ref.cdata)
            if storage is None:
                del self._found[key]
            else:
                total += storage.nbytes()  # now: FSDP2 lets go of storages by making them empty
        return total


def _storage(tensor: Tensor) -> torch.UntypedStorage:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage()
