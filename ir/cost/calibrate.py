"""Calibration: measured rates of this machine; the best of a few runs on a CPU, the median of timed events on CUDA."""

from __future__ import annotations

import math
import os
import platform
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from shardfx.ir.mesh import Link
from shardfx.ir.ops.memory_ops import all_gather_into

T = TypeVar("T")
wait_tensor = torch.ops._c10d_functional.wait_tensor.default

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
LONG, RUNS = 0.02, 5
"""The target duration of a run in seconds, and the number of runs."""
TIMED = 0.03
"""The timed seconds of a sustained run."""
LARGEST = 8192
"""The size of the largest matrix to measure."""
BUSY, QUEUED = 1 << 29, 256
"""The bytes copied to keep a device busy, and the number of small calls queued meanwhile."""
CARRIED = 1 << 26
"""The bytes copied to measure the link between device and host."""
GATHERED = 1 << 24
"""The bytes of each rank that are gathered to measure a link."""
GATHERS = 15
"""The number of gathers to take the fastest of, as ranks may delay one another."""


def memory_bandwidth(device: torch.device) -> float:
    """Memory bandwidth in bytes per second: a copy of more than any cache holds, reads and writes."""
    nbytes = 1 << (28 if device.type == "cpu" else 30)
    source = torch.randn(nbytes // 4, device=device)
    target = torch.zeros_like(source)
    return 2.0 * nbytes / _typical(target.copy_, (source,), device)


def host_link(device: torch.device, bandwidth: float, overhead: float) -> Link:
    """The link between the device's and the host's memory: copies of pinned memory, in the slower direction. On a CPU
    it is a copy within memory, which reads and writes at ``bandwidth``."""
    if device.type == "cpu":
        return Link(bandwidth / 2, overhead)
    pinned = torch.zeros(CARRIED, dtype=torch.uint8, pin_memory=True)
    target = torch.empty_like(pinned, device=device)
    much = [_typical(a.copy_, (b, True), device) for a, b in ((target, pinned), (pinned, target))]
    little = [_typical(a[:1].copy_, (b[:1], True), device) for a, b in ((target, pinned), (pinned, target))]
    return Link(CARRIED / (max(much) - max(little)), max(little))


def host_seconds(device: torch.device) -> tuple[float, float]:
    """The time that the host takes to issue a call, and a view, while the device runs earlier ones; 0 on a CPU."""
    if device.type != "cuda":
        return 0.0, 0.0
    x, both = torch.zeros(8, 8, device=device), list[float]()
    for call, args in ((torch.ops.aten.add.Tensor._op, (x, x)), (torch.ops.aten.t.default._op, (x,))):
        times = []
        for _ in range(RUNS + 1):
            _wait(device)
            started = time.perf_counter()
            for _ in range(QUEUED):
                call(*args)
            times.append((time.perf_counter() - started) / QUEUED)
        both.append(statistics.median(times[1:]))
    return both[0], both[1]


def on_device(
    call: Callable[..., object], arguments: Sequence[tuple[Any, ...]], device: torch.device, runs: int
) -> float:
    """The time of a call on a CUDA device, averaged over some arguments, in the median run: queued behind copies, so
    that host time is hidden, and with results kept, so that allocations are not timed."""
    (source, target), times = torch.empty(2, BUSY, dtype=torch.uint8, device=device), list[float]()
    for _ in range(runs + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(8):
            target.copy_(source)
        begin.record()
        kept = [call(*each) for each in arguments]
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / len(arguments))
        del kept  # the next run takes the same memory
    return statistics.median(times[1:])


def sustained(
    call: Callable[..., object], arguments: Sequence[tuple[Any, ...]], device: torch.device, seconds: float, warm: float
) -> float:
    """The time of a call on CUDA after ``warm`` seconds of such calls: at the clock that the device sustains under its
    power limit. ``seconds`` is the approximate time of a call."""
    before, timed = (max(math.ceil(each / (seconds * len(arguments))), 1) for each in (warm, TIMED))
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    kept = deque[object](maxlen=len(arguments))
    for number in range(before + timed):
        if number == before:
            begin.record()
        for each in arguments:
            kept.append(call(*each))
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / (timed * len(arguments))


def _typical(call: Callable[..., object], args: tuple[Any, ...], device: torch.device) -> float:
    """The time of a call: the median on CUDA, the fastest on a CPU."""
    if device.type == "cuda":
        return on_device(call, [args], device, RUNS)
    return _fastest(lambda: call(*args), device)


def link(device: torch.device) -> Link | None:
    """The link between the ranks of the default process group, from a small and a large all-gather on the slowest rank;
    None without other ranks."""
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return None
    assert dist.group.WORLD is not None
    ranks, group = dist.get_world_size(), dist.group.WORLD.group_name
    both = [_gather_seconds(nbytes, ranks, group, device) for nbytes in (1, GATHERED)]
    seconds = torch.tensor(both, device=device)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    little, much = seconds.tolist()
    moving = max(much - little, much / 10)  # a small one may have been kept waiting by others
    return Link((ranks - 1) * GATHERED / moving, little / math.log2(ranks))


def of_first(found: T) -> T:
    """The first rank's value, broadcast to all ranks, which call this together."""
    said = [found]
    dist.broadcast_object_list(said)
    return said[0]


def _gather_seconds(nbytes: int, ranks: int, group: str, device: torch.device) -> float:
    """The time of the fastest of a few gathers; the same number on all ranks."""
    mine, times = torch.zeros(nbytes, dtype=torch.uint8, device=device), []
    full = mine.new_empty(nbytes * ranks)
    for _ in range(GATHERS + 1):
        dist.barrier()
        _wait(device)
        started = time.perf_counter()
        wait_tensor(all_gather_into(mine, ranks, group, out=full))
        _wait(device)
        times.append(time.perf_counter() - started)
    return min(times[1:])


def memory_bytes(device: torch.device) -> int:
    """The memory of the device, in bytes."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def device_name(device: torch.device) -> str:
    """The name of the device."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"


def clock(device: torch.device) -> Callable[[], float]:
    """A clock that waits for the device: wall-clock time, or CPU time of a single-threaded CPU."""
    alone = device.type == "cpu" and torch.get_num_threads() == 1

    def now() -> float:
        _wait(device)
        return time.thread_time() if alone else time.perf_counter()

    return now


def _fastest(run: Callable[[], object], device: torch.device) -> float:
    """The time of the fastest of a few runs, without the first one, which warms up."""
    times, now = list[float](), clock(device)
    for _ in range(RUNS + 1):
        started = now()
        run()
        times.append(now() - started)
        if sum(times) > RUNS * LONG and len(times) > 2:
            break
    return min(times[1:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
