"""Time and memory of a step of a large decoder: eager PyTorch, torch.compile, and shardfx on one real rank.

Each contender has a process of its own, so that they are compiled beside one another. Those of a group alternate in
interleaved rounds, with the same clocks and temperature for all, while nothing else runs. The groups share a contender,
by which their times are compared; more than a group has no room in the memory of a GPU.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

import shardfx as sx

from .context import Context, one_line
from .device import Device
from .models import FULL, TINY, Size, batch_of, decoder, next_token
from .processes import Worker
from .real_rank import real_rank
from .results import Results

ROUNDS, TIMED, WARM = 5, 3, 2
"""Rounds; steps of a contender in a round, behind one that is not timed; steps before all rounds."""
COMMON, EAGER = "torch.compile", "eager"
"""The contender of both groups, and the other one of torch's own: with fused AdamW, as is
``pm(x, y)`` with ``backward()``."""
STEP, STEP_COMPILED, STEP_GRAPHS = "pm.step", "pm.compile, pm.step", "CUDA graphs, pm.step"
CALLED = "pm(x, y)"
DTYPE = torch.bfloat16


def fused_adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-4, fused=True)


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-4)


@dataclass
class Contender:
    """A step that can be repeated, the parallel module behind it, if there is one, and whether its program is the whole
    step: an optimizer outside is neither in its footprint nor in its predicted time."""

    step: Callable[[], Tensor]
    pm: sx.ParallelModule | None = None
    stepped: bool = False


def eager(size: Size, device: Device, compiled: bool) -> Contender:
    """The model with torch's own fused AdamW; compiled together with its loss."""
    model = decoder(size, device.torch_device, DTYPE)
    x, y = batch_of(size, device.torch_device)
    optimizer = fused_adamw(model.parameters())

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        return next_token(model(x), y)

    call = torch.compile(loss_of, **device.compile_options()) if compiled else loss_of

    def step() -> Tensor:
        loss = call(x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return Contender(step)


def plan(size: Size, device: Device, **hints: Any) -> tuple[sx.ParallelModule, Tensor, Tensor]:
    """The plan of the decoder for one real rank (of ``mesh``, by default of data parallelism), and its batch."""
    x, y = batch_of(size, device.torch_device)
    mesh = hints.pop("mesh", sx.Mesh(dp=1))
    given = sx.Hints(args=(x,), loss=next_token, targets=(y,), device=device.torch_device, **hints)
    pm = sx.parallelize(decoder(size, device.torch_device, DTYPE), mesh, given, virtual=False)
    gc.collect()  # the model itself is not needed any more
    return pm, x, y


def called(size: Size, device: Device) -> Contender:
    """``pm(x, y)``, ``backward()`` and the user's own fused AdamW."""
    pm, x, y = plan(size, device)
    optimizer = fused_adamw(pm.parameters())

    def step() -> Tensor:
        loss: Tensor = pm(x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return Contender(step, pm)


def stepped(size: Size, device: Device, compiled: dict[str, Any] | None = None, **hints: Any) -> Contender:
    """``pm.step(x, y)``: the update is a part of the program."""
    pm, x, y = plan(size, device, optimizer=adamw, **hints)
    if compiled is not None:
        pm.compile(**device.compile_options(**compiled))
    return Contender(lambda: pm.step(x, y), pm, stepped=True)


Build = Callable[[Size, Device], Contender]
CONTENDERS: dict[str, Build] = {
    COMMON: lambda size, device: eager(size, device, compiled=True),
    STEP_COMPILED: lambda size, device: stepped(size, device, {}),
    STEP_GRAPHS: lambda size, device: stepped(size, device, {"cuda_graphs": True}),
    EAGER: lambda size, device: eager(size, device, compiled=False),
    STEP: lambda size, device: stepped(size, device),
    CALLED: called,
}
GROUPS = ((COMMON, STEP_COMPILED, STEP_GRAPHS), (COMMON, EAGER, STEP), (COMMON, CALLED))
"""What runs interleaved. The first group is built while other parts run: it is compiled, which takes long."""


def names(rehearse: bool) -> list[str]:
    return list(CONTENDERS)


def run(context: Context) -> None:
    """Build the contender of this process, and do with it what the parent says, one line after the other."""
    (name,), size = context.cells, TINY if context.rehearse else FULL
    built: dict[str, Contender] = {}
    with real_rank(context.device):
        first = name in GROUPS[0]
        if not first:
            context.wait()  # until there is room for it
        context.attempt(name, lambda: build(context, name, size, built), context.build_left if first else None)
        while told := context.wait():
            for contender in built.values():
                if told.get("machine"):
                    predict(context, name, contender, told["machine"])
                else:
                    contender.step()
                    context.emit(name, ms=context.device.milliseconds(contender.step, TIMED))


def drive(workers: Mapping[str, Worker], results: Results, machine: str, rehearse: bool, until: float) -> None:
    """Have the contenders of each group run in interleaved rounds, as the parent of their processes."""

    def ask(names: Iterable[str], **what: Any) -> None:
        there = [workers[name] for name in names if name in workers]
        for worker in there:
            worker.ask(**what)
        for worker in there:
            worker.ready.wait(max(0.0, until - time.monotonic()))

    started = {*GROUPS[0]}
    for group in GROUPS:
        ask([name for name in group if name not in started], build=True)
        times: dict[str, list[float]] = {name: [] for name in group if results.status("speed", name) == "ok"}
        for _ in range(2 if rehearse else ROUNDS):
            for name in times if time.monotonic() < until else ():
                ask([name], steps=TIMED)
                times[name].append(results.of("speed")[name].get("ms", math.nan))
        for name, each in times.items():
            ratios = [a / b for a, b in zip(each, times.get(COMMON, ()), strict=False)]
            row = {"ms": statistics.median(each), "rounds": each} if each else {}
            results.add("speed", name, row | ({"ratio": statistics.median(ratios)} if ratios else {}))
        if machine:
            ask([name for name in group if name in times], machine=machine)
        for name in group:
            if name != COMMON and name in workers:
                workers[name].tell()
                workers[name].join()
    workers[COMMON].tell()


def build(context: Context, name: str, size: Size, built: dict[str, Contender]) -> dict[str, Any]:
    """Build a contender, and measure the memory of its steps."""
    device = context.device
    before = device.release()
    contender = CONTENDERS[name](size, device)
    for _ in range(WARM):
        contender.step()
    losses: list[Tensor] = []  # of two steps: the third one records a CUDA graph, whose replays allocate nothing
    peak = device.peak_of(lambda: losses.extend(contender.step().clone() for _ in range(2)), before)
    context.emit(name, loss=float(losses[-1]), **asdict(peak))
    built[name] = contender
    return predicted_memory(contender.pm) if contender.pm is not None and contender.stepped else {}


def predicted_memory(pm: sx.ParallelModule) -> dict[str, Any]:
    memory = pm.memory()
    return {"peak_predicted": memory.peak, "reserved_predicted": memory.reserved, "host": memory.host}


def predict(context: Context, name: str, contender: Contender, machine: str) -> None:
    """The predicted time of the step on the machine as it was measured, if its program is the whole step."""
    if contender.pm is None or not contender.stepped:
        return
    try:
        seconds = contender.pm.timeline(machine).step
        context.emit(name, ms_predicted=seconds * 1e3)
    except Exception as error:
        context.emit(name, prediction_error=one_line(error))
