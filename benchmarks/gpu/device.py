"""The device interface of the benchmark: time, memory, options. The CPU has stand-ins, for rehearsals."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Memory:
    """Bytes of PyTorch's caching allocator: zero on the CPU, which has none."""

    allocated: int = 0
    active: int = 0
    reserved: int = 0


@dataclass(frozen=True)
class Device:
    """``cuda``, or ``cpu`` where a benchmark is rehearsed."""

    kind: str

    @property
    def torch_device(self) -> torch.device:
        """The device, with its index where it has one."""
        return torch.device("cuda", torch.cuda.current_device()) if self.cuda else torch.device(self.kind)

    @property
    def cuda(self) -> bool:
        return self.kind == "cuda"

    @property
    def name(self) -> str:
        return torch.cuda.get_device_name() if self.cuda else "CPU (rehearsal)"

    @property
    def backend(self) -> str:
        """The backend of process groups."""
        return "nccl" if self.cuda else "gloo"

    def compile_options(self, **options: Any) -> dict[str, Any]:
        """Options of ``torch.compile`` and ``pm.compile``. On the CPU code is not generated, and no graphs recorded."""
        return options if self.cuda else {"backend": "aot_eager"}

    def synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def milliseconds(self, run: Callable[[], Any], count: int) -> float:
        """Milliseconds of one of ``count`` runs: by events on a GPU."""
        if not self.cuda:
            start = time.perf_counter()
            for _ in range(count):
                run()
            return (time.perf_counter() - start) / count * 1e3
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        for _ in range(count):
            run()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / count

    def release(self) -> Memory:
        """Free what nothing refers to, reset the peaks, and return the bytes that are allocated now."""
        gc.collect()
        if not self.cuda:
            return Memory()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        return self._memory("current")

    def peak(self, before: Memory) -> Memory:
        """The peaks since :meth:`release`, less the bytes ``before``."""
        if not self.cuda:
            return Memory()
        peak = self._memory("peak")
        return Memory(peak.allocated - before.allocated, peak.active - before.active, peak.reserved - before.reserved)

    def peak_of(self, run: Callable[[], Any], before: Memory) -> Memory:
        """The peaks of a run, less the bytes ``before``: the allocator begins without cached blocks."""
        self.release()
        run()
        self.synchronize()
        return self.peak(before)

    def _memory(self, when: str) -> Memory:
        stats = torch.cuda.memory_stats()
        return Memory(*(stats[f"{what}_bytes.all.{when}"] for what in ("allocated", "active", "reserved")))

    def host_buffer(self, nbytes: int) -> torch.Tensor:
        """Memory of the host that the device copies from and to at full speed."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=self.cuda)
