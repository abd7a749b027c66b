"""Time and memory of a step of a large decoder: eager PyTorch, torch.compile, and shardfx on one real rank.

Contenders of one group live together and run in interleaved rounds, so that clocks and temperature are the same for
all. The groups share a contender, by which their times are compared.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

import shardfx as sx

from .context import Context, one_line
from .device import Device
from .models import FULL, TINY, Size, batch_of, decoder, next_token
from .real_rank import real_rank

ROUNDS, TIMED, WARM = 5, 3, 2
"""Rounds; steps of a contender in a round, behind one that is not timed; steps before all rounds."""
COMMON, EAGER = "torch.compile", "eager"
"""The contender of both groups, and the other one of torch's own: with fused AdamW, as is
``pm(x, y)`` with ``backward()``."""
STEP, STEP_COMPILED, STEP_GRAPHS = "pm.step", "pm.compile, pm.step", "CUDA graphs, pm.step"
DTYPE = torch.bfloat16


def fused_adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-4, fused=True)


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-4)


@dataclass
class Contender:
    """A step that can be repeated, the parallel module behind it, if there is one, and whether its program is the whole
    step: the states of an optimizer outside are not in its footprint."""

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


def called(size: Size, device: Device, compiled: dict[str, Any] | None = None) -> Contender:
    """``pm(x, y)``, ``backward()`` and the user's own fused AdamW."""
    pm, x, y = plan(size, device)
    if compiled is not None:
        pm.compile(**device.compile_options(**compiled))
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
    "pm.compile, pm(x, y)": lambda size, device: called(size, device, {}),
    EAGER: lambda size, device: eager(size, device, compiled=False),
    STEP: lambda size, device: stepped(size, device),
    "pm(x, y)": lambda size, device: called(size, device),
}
GROUPS = (tuple(CONTENDERS)[:4], (COMMON, *tuple(CONTENDERS)[4:]))
"""What runs interleaved. The first group is built while other parts run: it is compiled, which takes long."""


def names(rehearse: bool) -> list[str]:
    return list(CONTENDERS)


def run(context: Context) -> None:
    """Build the first group, wait until the machine is idle, and measure one group after the other."""
    size = TINY if context.rehearse else FULL
    rounds = 2 if context.rehearse else ROUNDS
    built: dict[str, Contender] = {}
    with real_rank(context.device):
        for number, group in enumerate(GROUPS):
            group = tuple(name for name in group if name in context.cells)
            for name in built.keys() - set(group):
                del built[name]
            for name in group:
                if name not in built:
                    limit = context.build_left if number == 0 else None
                    context.attempt(name, lambda name=name: build(context, name, size, built), limit)  # type: ignore[misc]
            if number == 0:
                machine = context.wait().get("machine")
            measure(context, group, built, rounds)
            for name, contender in built.items():
                if contender.pm is not None and machine:
                    predict(context, name, contender.pm, machine)


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


def measure(context: Context, group: tuple[str, ...], built: dict[str, Contender], rounds: int) -> None:
    """Interleaved rounds of a group; each round's medians are reported."""
    there = {name: built[name] for name in group if name in built}
    times: dict[str, list[float]] = {name: [] for name in there}
    for _ in range(rounds):
        for name, contender in list(there.items()):
            if context.left < 5:
                return
            try:
                contender.step()
                times[name].append(context.device.milliseconds(contender.step, TIMED))
            except Exception as error:
                context.emit(name, status="error", why=f"in the rounds: {one_line(error)}")
                del there[name]
        for name in [name for name in there if times[name]]:
            of_common = [a / b for a, b in zip(times[name], times.get(COMMON, ()), strict=False)]
            ratio = {"ratio": statistics.median(of_common)} if of_common else {}
            context.emit(name, ms=statistics.median(times[name]), rounds=times[name], **ratio)


def predict(context: Context, name: str, pm: sx.ParallelModule, machine: str) -> None:
    """The predicted time of the step on the machine as it was measured."""
    try:
        seconds = pm.timeline(machine).step
        context.emit(name, ms_predicted=seconds * 1e3)
    except Exception as error:
        context.emit(name, prediction_error=one_line(error))
