"""Ranks that fail on purpose: ``main(["exits", "raises"])`` prints how each rank ended, as JSON.

Four ranks on a mesh of 2 x 2 take a step in which rank 1 does something else; a rank's end is
``[seconds, what it raised]``, or None where the process is gone.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import shardfx as sx
from shardfx.module.programs import TRAIN

from .fork import remember_plans

TIMEOUT = 3
"""Of the process group, in seconds."""

End = list[Any] | None


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2((self.fc1(x) ** 2).sqrt())


def exits(program: dict[str, Any]) -> None:
    program["_addmm"] = lambda *_: os._exit(3)


def raises(program: dict[str, Any]) -> None:
    def boom(*_: Any) -> Tensor:
        raise RuntimeError("no memory left")

    program["_addmm"] = boom


def sticks(program: dict[str, Any]) -> None:
    addmm = program["_addmm"]

    def slow(*args: Any) -> Any:
        time.sleep(2.5 * TIMEOUT)
        return addmm(*args)

    program["_addmm"] = slow


def makes_nan(_: dict[str, Any]) -> None:
    """Rank 1 holds the second half of ``fc1``: unit 6 is zero there, and the root has no derivative at zero."""


MODES: dict[str, Callable[[dict[str, Any]], None]] = {f.__name__: f for f in (exits, raises, sticks, makes_nan)}
MODES["stage_raises"] = raises
"""On a rank of the first of two stages, whose other ranks wait for what it does not send."""


def raises_between() -> None:
    raise ValueError("no more rows")


def returns() -> None:
    """Its loader has fewer batches than the others'."""


BETWEEN: dict[str, Callable[[], None]] = {f.__name__: f for f in (raises_between, returns)}


def step(pm: sx.ParallelModule, mode: str) -> None:
    x, y = torch.linspace(-1, 1, 48).view(8, 6), torch.arange(8) % 4
    if mode == "makes_nan":
        with pm.debug_nan():
            pm(x, y)
    elif mode == "compiled_raises":
        pm.compile(backend=broken if dist.get_rank() == 1 else "eager")
        pm(x, y)
    else:
        if mode in MODES and dist.get_rank() == 1:
            source = pm._programs.step.engine.source(pm._programs.step.programs(TRAIN)[1])
            MODES[mode](source.start.__globals__)
        pm(x, y)


def broken(*_: Any) -> Callable[..., Any]:
    """A backend of torch.compile whose programs raise."""

    def run(*_: Any) -> None:
        raise RuntimeError("no memory left")

    return run


def planned(mode: str) -> sx.ParallelModule:
    torch.manual_seed(0)
    model = Net()
    if mode == "makes_nan":
        with torch.no_grad():
            model.fc1.weight[6], model.fc1.bias[6] = 0, 0
    hints = sx.Hints(
        (torch.zeros(8, 6),),
        loss=F.cross_entropy,
        targets=(torch.zeros(8, dtype=torch.int64),),
        specs={"args.0": "dp, -", "targets.0": "dp", "fc1.weight": "tp, -"},
    )
    if mode == "stage_raises":
        rows = {"args.0": "mb dp, -", "targets.0": "mb dp"}
        return sx.parallelize(
            model, sx.Mesh(pp=2, dp=2, mb=sx.Loop(2)), replace(hints, specs=rows, pipeline=sx.Pipeline())
        )
    return sx.parallelize(model, sx.Mesh(dp=2, tp=2), hints)


def rank_main(rank: int, port: int, mode: str, end: Connection, others: Connection) -> None:
    """A rank; in the modes between two calls rank 1 takes no step, and ends as processes do."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT))
    pm = planned(mode)
    assert pm._programs.step.engine.device.type == "cpu"  # all ranks make groups
    for _ in range(2 if mode in BETWEEN else 0):  # programs that have run begin before it is known that others call
        step(pm, mode)
    dist.barrier()
    end.send(None)
    started = time.monotonic()
    if rank == 1 and mode in BETWEEN:
        return BETWEEN[mode]()
    try:
        step(pm, mode)
        end.send([time.monotonic() - started, ""])
    except sx.Error as error:
        end.send([time.monotonic() - started, str(error)])
    if rank == 0 and others.poll(4 * TIMEOUT):  # the store is here: the others ask it
        others.recv()
    os._exit(0)


class Ranks:
    """Four ranks that are started, for one mode."""

    def __init__(self, mode: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        context = multiprocessing.get_context("fork")
        pipes = [context.Pipe(duplex=False) for _ in range(4)]
        self._read = [read for read, _ in pipes]
        others, self._others_ended = context.Pipe(duplex=False)
        mine = [(rank, port, mode, write, others) for rank, (_, write) in enumerate(pipes)]
        self._ranks = [context.Process(target=rank_main, args=given) for given in mine]
        for each in self._ranks:
            each.start()
        for _, write in pipes:
            write.close()

    def wait(self) -> Ranks:
        """Until all have met: what others start meanwhile would keep them, and their time-out is short."""
        for read in self._read:
            if read.poll(60):
                try:
                    read.recv()
                except EOFError:
                    continue
        return self

    def ends(self) -> list[End]:
        """How the ranks end, in order; a process that is still there after a while is stopped."""
        found: list[End] = []
        for read in self._read:
            try:
                found.append(read.recv() if read.poll(60) else [60.0, "still there"])
            except EOFError:
                found.append(None)
        for each in self._ranks[1:]:
            each.join(20)
        with suppress(BrokenPipeError):  # it has waited for long
            self._others_ended.send(None)
        for each in self._ranks:
            each.join(20)
            each.kill()
        return found


def main(modes: list[str]) -> int:
    """All modes at once, for their ranks mostly wait."""
    remember_plans()
    for mode in {"exits", "stage_raises"} & {"exits", *modes}:
        planned(mode)  # which ranks inherit
    started = {mode: Ranks(mode).wait() for mode in sorted(modes, key=lambda mode: mode != "sticks")}
    print("ENDS", json.dumps({mode: ranks.ends() for mode, ranks in started.items()}))
    return 0
