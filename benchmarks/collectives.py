"""Cost of collectives between two processes of this host: by gloo, into fresh or reused memory, and by shared memory.

    python -m benchmarks.collectives [--mb 14]

Each runs in one thread, alternating; medians are printed. Into *fresh* memory every page is faulted in; *kept* memory
was used before (:mod:`shardfx.runtime.memory_pool`). *Shm* are those of :mod:`shardfx.runtime.distributed.shm`, in a
bucket in shared memory; *cpu* is the processor time of a rank, with that of its threads. A *message* goes from stage to
stage, and comes back.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

import shardfx as sx
from shardfx.runtime.distributed import groups
from shardfx.runtime.distributed.shm import shared_bytes

from .contenders import with_ranks

c10d = torch.ops._c10d_functional
ROUNDS = 15


def rank_main(rank: int, mb: float) -> None:
    groups.make_groups(sx.Mesh(dp=2), [("dp",)])
    near, half = sx.Mesh(dp=2).group_name(rank, ("dp",)), int(mb * 1e6 / 8)
    group = dist.group.WORLD.group_name
    whole, part, kept = torch.randn(2 * half), torch.randn(half), torch.empty(2 * half)
    shared, wait = shared_bytes(whole.nbytes).view(torch.float32), c10d.wait_tensor

    def exchange() -> None:
        wait(c10d.all_to_all_single(whole, [half, half], [half, half], group)).view(2, half).sum(0)

    def to_and_fro(name: str) -> None:
        sent, ranks = None, groups.find_group(name)
        for origin in (0, 1):
            if origin == rank:
                sent = dist.isend(part, group=ranks, group_dst=1 - rank)
            else:
                dist.recv(kept[:half], group=ranks, group_src=1 - rank)
        assert sent is not None
        sent.wait()

    ways: dict[str, Callable[[], object]] = {
        "all-reduce, fresh": lambda: wait(c10d.all_reduce(whole, "avg", group)),
        "all-reduce, in place": lambda: wait(c10d.all_reduce_(whole, "avg", group)),
        "all-gather, fresh": lambda: wait(c10d.all_gather_into_tensor(part, 2, group)),
        "all-gather, kept": lambda: wait(c10d.all_gather_into_tensor_out(part, 2, group, out=kept)),
        "reduce-scatter": lambda: wait(c10d.reduce_scatter_tensor(whole, "sum", 2, group)),
        "exchange and sum": exchange,
        "shm all-reduce": lambda: wait(c10d.all_reduce_(shared, "avg", near)),
        "shm all-gather": lambda: wait(c10d.all_gather_into_tensor_out(part, 2, near, out=kept)),
        "shm reduce-scatter": lambda: wait(c10d.reduce_scatter_tensor(shared, "sum", 2, near)),
        "half of it as a message": lambda: to_and_fro(group),
        "shm message": lambda: to_and_fro(near),
    }
    spent: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, way in ways.items():
            dist.barrier()
            started, worked = time.perf_counter(), time.process_time()
            way()
            spent[name].append(((time.perf_counter() - started) * 1e3, (time.process_time() - worked) * 1e3))
    if rank == 0:
        for name, times in spent.items():
            wall, cpu = (statistics.median(column) for column in zip(*times, strict=True))
            print(f"{name:<24} {wall:7.1f} ms, {cpu:7.1f} ms cpu, for {mb:g} MB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=float, default=14)
    with_ranks(rank_main, parser.parse_args().mb)


if __name__ == "__main__":
    main()
