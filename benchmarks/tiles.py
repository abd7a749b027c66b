"""A training step on one large image: two gloo ranks, each with half of it, compared with one process; and the
CPU time of virtual ranks.

    python -m benchmarks.tiles [--size 1024 --wide 8 --rounds 5 --virtual]

All variants share the same two processes, one thread each, and alternate, so that a neighbour slows all alike; while
one process computes the full image, the other is idle. Printed are medians over the rounds: of the time on the clock,
which needs two free cores, and of the CPU time of the busier rank, which predicts it. With
``--virtual``, in one process: the CPU time of 2 x 2 virtual ranks relative to the full image, of this size, of half of
it and of a fourth: the smaller the image, the larger the share of overhead.
"""

from __future__ import annotations

import argparse
import statistics
import time
from copy import deepcopy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import shardfx as sx

from .contenders import RANKS, Step, with_ranks

CLASSES = 4
AIM, WORK_AIM = 1.6, 1.25
SPECS = {"args.0": "-, -, h, w", "targets.0": "-, h, w"}


class UNet(nn.Module):
    """Three levels, with norms; ``wide`` channels on the first."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.one, self.two, self.three = _conv(3, wide), _conv(wide, 2 * wide), _conv(2 * wide, 4 * wide)
        self.back, self.last = _conv(6 * wide, 2 * wide), _conv(3 * wide, wide)
        self.head = nn.Conv2d(wide, CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = self.one(x)
        b = self.two(F.max_pool2d(a, 2))
        c = self.back(torch.cat([b, F.interpolate(self.three(F.max_pool2d(b, 2)), scale_factor=2.0)], 1))
        return self.head(self.last(torch.cat([a, F.interpolate(c, scale_factor=2.0)], 1)))


def _conv(a: int, b: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(a, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU())


def make(size: int, wide: int) -> tuple[nn.Module, Tensor, Tensor]:
    """The model, an image and its mask."""
    torch.manual_seed(0)
    return UNet(wide), torch.randn(1, 3, size, size), torch.randint(CLASSES, (1, size, size))


def ours(model: nn.Module, mesh: sx.Mesh, x: Tensor, y: Tensor, virtual: bool) -> Step:
    """A step on tiles, each rank reading its own."""
    specs = {name: ", ".join(a if a in mesh.names else "-" for a in spec.split(", ")) for name, spec in SPECS.items()}
    hints = sx.Hints(args=(x,), targets=(y,), loss=F.cross_entropy, specs=specs)
    pm = sx.parallelize(model, mesh, hints, virtual=virtual)
    if not virtual:
        x, y = x[pm.tile("args.0")].clone(), y[pm.tile("targets.0")].clone()

    def step() -> Tensor:
        pm.zero_grad(set_to_none=True)
        loss: Tensor = pm(x, y)
        loss.backward()
        return loss.detach()

    return step


def alone(model: nn.Module, x: Tensor, y: Tensor) -> Step:
    """A step of the model itself on the full image."""

    def step() -> Tensor:
        model.zero_grad(set_to_none=True)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss.detach()

    return step


def timed(step: Step) -> tuple[float, float, float]:
    """Seconds on the clock, seconds of the processor, and the loss."""
    started, worked = time.perf_counter(), time.process_time()
    loss = step()
    return time.perf_counter() - started, time.process_time() - worked, loss.item()


def rank_main(rank: int, size: int, wide: int, rounds: int) -> None:
    model, x, y = make(size, wide)
    whole, tiles = alone(deepcopy(model), x, y), ours(model, sx.Mesh(h=RANKS), x, y, False)
    rows: list[tuple[float, ...]] = []
    for number in range(rounds + 1):
        dist.barrier()
        one = timed(whole) if rank == 0 else (0.0, 0.0, 0.0)
        dist.barrier()
        both = torch.tensor(timed(tiles), dtype=torch.float64)
        dist.all_reduce(both, dist.ReduceOp.MAX)
        if number:
            rows.append((*one, *both.tolist()))
        elif rank == 0:
            print(f"loss of the whole {one[2]:.6f}, on tiles {both[2]:.6f}")
    if rank == 0:
        report(rows)


def report(rows: list[tuple[float, ...]]) -> None:
    """Medians, and those of the ratios of each round."""
    for name, at in (("one process", 0), ("two ranks, the slower one", 3)):
        clock, work = (statistics.median(row[at + i] for row in rows) for i in (0, 1))
        print(f"{name:26} {clock:7.2f} s on the clock, {work:7.2f} s of a processor")
    for said, at in (("on the clock", 0), ("by processor time", 1)):
        ratio = statistics.median(row[at] / row[at + 3] for row in rows)
        print(f"two ranks are {ratio:.2f} x as fast as one process {said} (aim {AIM}, with two free cores)")


def virtual_work(size: int, wide: int, rounds: int) -> None:
    """The CPU time of four virtual ranks relative to the model itself."""
    torch.set_num_threads(1)
    model, x, y = make(size, wide)
    whole, tiles = alone(deepcopy(model), x, y), ours(model, sx.Mesh(h=2, w=2), x, y, True)
    rows = [(timed(whole), timed(tiles)) for _ in range(rounds + 1)][1:]
    ratio = statistics.median(b[1] / a[1] for a, b in rows)
    print(f"{size:5} x {size}: 2 x 2 virtual ranks do {ratio:.2f} x the work of one device (aim {WORK_AIM})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--size", type=int, default=1024, help="rows and columns of the image")
    parser.add_argument("--wide", type=int, default=8, help="channels of the first level")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--virtual", action="store_true", help="the work of 2 x 2 virtual ranks, too")
    given = parser.parse_args()
    if given.virtual:
        for less in (4, 2, 1):
            virtual_work(given.size // less, given.wide, given.rounds)
    with_ranks(rank_main, given.size, given.wide, given.rounds, minutes=30)


if __name__ == "__main__":
    main()
