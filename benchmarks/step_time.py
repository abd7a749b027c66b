"""Step time (forward, backward, synchronised gradients) compared with torch's own wrappers, on 2 gloo ranks of this
machine; with the update of AdamW, too.

    python -m benchmarks.step_time [--dim 256 --layers 4 --rounds 15 --only dp --compile]
    python -m benchmarks.step_time --only dp-update zero-1-update zero-update      (python -m benchmarks.step_memory)
    python -m benchmarks.step_time --only arena             (zero=3 with Hints(arena=True), and without)
    python -m benchmarks.step_time --only accumulate        (four micro-batches; DDP's by no_sync)
    python -m benchmarks.step_time --only interleave        (tensor parallelism, two micro-batches interleaved, and not)

DDP, FSDP2 and DTensor's tensor parallelism train the same GPT as our plans do, alternating (:mod:`.contenders`).
Printed are medians, and the median over the rounds of each ratio: by the clock, and by the time that a rank's
processors worked. All of them run through ``torch.compile`` with ``--compile``.
"""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from copy import deepcopy

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import shardfx as sx

from .contenders import RANKS, Contender, Times, ratio, size_of, sized, take_iterations, with_ranks
from .models import GPT, Size, next_token

MICROBATCHES = 4
PAIRS = {
    "dp": ("ours, dp", "DDP"),
    "zero": ("ours, zero 3", "FSDP2"),
    "tp": ("ours, tp", "DTensor TP"),
    "grad_accumulation": ("ours, 4 micro", "DDP, 4 micro"),
    "interleave": ("tp, interleaved", "tp, 2 micro"),
    "dp-update": ("ours, dp, step", "DDP, AdamW"),
    "zero-1-update": ("ours, zero 1, step", "DDP, AdamW"),
    "zero-update": ("ours, zero 3, step", "FSDP2, AdamW"),
    "arena": ("zero 3, arena", "zero 3, no arena"),
}
AIMS = {
    "dp": 1.05,
    "grad_accumulation": 1.1,
    "interleave": 1.0,
    "zero": 1.3,
    "tp": 1.5,
    "dp-update": 1.05,
    "zero-1-update": 1.05,
    "zero-update": 1.2,
    "arena": 1.0,
}
MEGATRON = {
    **dict.fromkeys((f"layers.*.{n}.weight" for n in ("q", "k", "v", "fc1")), "tp, -"),
    **dict.fromkeys((f"layers.*.{n}.bias" for n in ("q", "k", "v", "fc1")), "tp"),
    **dict.fromkeys((f"layers.*.{n}.weight" for n in ("proj", "fc2")), "-, tp"),
}
BATCH = {"args.0": "dp, -", "targets.0": "dp, -"}


def ours(
    model: nn.Module, axis: str, specs: dict[str, str], x: Tensor, y: Tensor, grad_accumulation: int = 1
) -> Contender:
    """Our plan of the model, and its step on the global batch."""
    hints = sx.Hints(args=(x,), loss=next_token, targets=(y,), specs=specs, grad_accumulation=grad_accumulation)
    pm = sx.parallelize(model, sx.Mesh(**{axis: RANKS}), hints)
    return pm, lambda: pm(x, y)


def interleaved(model: nn.Module, x: Tensor, y: Tensor, interleave: bool) -> Contender:
    """Our plan of tensor parallelism in two micro-batches, in sequence or interleaved."""
    specs = MEGATRON | {"args.0": "mb, -", "targets.0": "mb, -"}
    hints = sx.Hints(args=(x,), loss=next_token, targets=(y,), specs=specs)
    pm = sx.parallelize(model, sx.Mesh(mb=sx.Loop(2, interleave=interleave), tp=RANKS), hints)
    return pm, lambda: pm(x, y)


def with_optimizer(model: nn.Module, x: Tensor, y: Tensor, zero: int, arena: bool = False) -> Contender:
    """Our plan with the optimizer in the program."""
    hints = sx.Hints(
        args=(x,),
        loss=next_token,
        targets=(y,),
        specs=BATCH,
        zero=zero,
        zero_min_numel=0,
        optimizer=torch.optim.AdamW,
        arena=arena,
    )
    pm = sx.parallelize(model, sx.Mesh(dp=RANKS), hints)
    return pm, lambda: pm.step(x, y)


def updated(module: nn.Module, x: Tensor, y: Tensor, optimizer: torch.optim.Optimizer | None = None) -> Contender:
    """Their wrapper, and an optimizer of its parameters: AdamW."""
    optimizer = optimizer or torch.optim.AdamW(module.parameters())

    def step() -> Tensor:
        loss = next_token(module(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return module, step


def theirs(module: nn.Module, x: Tensor, y: Tensor) -> Contender:
    return module, lambda: next_token(module(x), y)


def accumulated(module: DistributedDataParallel, x: Tensor, y: Tensor) -> Contender:
    """Their gradient accumulation: a mean of means, reduced in the last micro-batch."""

    def step() -> Tensor:
        losses = []
        for i, (a, b) in enumerate(zip(x.chunk(MICROBATCHES), y.chunk(MICROBATCHES), strict=True)):
            with module.no_sync() if i < MICROBATCHES - 1 else nullcontext():
                loss = next_token(module(a), b) / MICROBATCHES
                loss.backward()
                losses.append(loss.detach())
        return torch.stack(losses).sum()

    return module, step


def sharded(model: GPT) -> nn.Module:
    for layer in model.layers:
        fully_shard(layer)
    return fully_shard(model)


def tensor_parallel(model: GPT) -> nn.Module:
    mesh = dist.init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",))
    split = dict.fromkeys(("q", "k", "v", "fc1"), ColwiseParallel()) | dict.fromkeys(("proj", "fc2"), RowwiseParallel())
    for layer in model.layers:
        parallelize_module(layer, mesh, split)
    return model


def variants(model: GPT, x: Tensor, y: Tensor, only: list[str]) -> dict[str, Contender]:
    """Module and step by name."""
    half = x.shape[0] // RANKS
    mine = slice(dist.get_rank() * half, (dist.get_rank() + 1) * half)
    stored = {n: ", ".join(["dp"] + ["-"] * (p.dim() - 1)) for n, p in model.named_parameters()}
    made: dict[str, Contender] = {}
    if "dp" in only:
        made["DDP"] = theirs(DistributedDataParallel(deepcopy(model), gradient_as_bucket_view=True), x[mine], y[mine])
        made["ours, dp"] = ours(model, "dp", BATCH, x, y)
    if "accumulate" in only:
        module = DistributedDataParallel(deepcopy(model), gradient_as_bucket_view=True)
        made["DDP, 4 micro"] = accumulated(module, x[mine], y[mine])
        made["ours, 4 micro"] = ours(model, "dp", BATCH, x, y, grad_accumulation=MICROBATCHES)
    if "interleave" in only:
        made["tp, 2 micro"] = interleaved(model, x, y, interleave=False)
        made["tp, interleaved"] = interleaved(deepcopy(model), x, y, interleave=True)
    if "zero" in only:
        made["FSDP2"] = theirs(sharded(deepcopy(model)), x[mine], y[mine])
        made["ours, zero 3"] = ours(model, "dp", BATCH | stored, x, y)
    if "tp" in only:
        made["DTensor TP"] = theirs(tensor_parallel(deepcopy(model)), x, y)
        made["ours, tp"] = ours(model, "tp", MEGATRON, x, y)
    if "dp-update" in only or "zero-1-update" in only:
        module = DistributedDataParallel(deepcopy(model), gradient_as_bucket_view=True)
        made["DDP, AdamW"] = updated(module, x[mine], y[mine])
    if "dp-update" in only:
        made["ours, dp, step"] = with_optimizer(model, x, y, 0)
    if "zero-1-update" in only:
        made["ours, zero 1, step"] = with_optimizer(model, x, y, 1)
    if "zero-update" in only:
        made["FSDP2, AdamW"] = updated(sharded(deepcopy(model)), x[mine], y[mine])
        made["ours, zero 3, step"] = with_optimizer(model, x, y, 3)
    if "arena" in only:
        made["zero 3, no arena"] = with_optimizer(deepcopy(model), x, y, 3)
        made["zero 3, arena"] = with_optimizer(deepcopy(model), x, y, 3, arena=True)
    return made


def rank_main(rank: int, size: Size, rounds: int, steps: int, only: list[str], through: bool) -> None:
    torch.manual_seed(0)
    model = GPT(size)
    x, y = torch.randint(size.vocab, (2, size.batch, size.length)).unbind()
    made = variants(model, x, y, only)
    for module, _ in made.values() if through else ():
        module.compile()
    times = take_iterations(made, rounds, steps)
    if rank == 0:
        report(times, only)


def report(times: dict[str, Times], only: list[str]) -> None:
    for name, spent in times.items():
        print(f"{name:18} {spent}")
    for key in only:
        mine, other = PAIRS[key]
        both = ratio(times[other], times[mine])
        by_time = f"{both.processors:.2f} x by time of processors"
        print(f"{mine} is {both.clock:.2f} x as fast as {other} (aim {AIMS[key]}), {by_time}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    sized(parser)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=2, help="steps of a variant in a round")
    parser.add_argument("--only", nargs="+", choices=list(PAIRS), default=["dp", "zero", "tp"])
    parser.add_argument("--compile", action="store_true", help="through torch.compile")
    given = vars(parser.parse_args())
    with_ranks(rank_main, size_of(given), given["rounds"], given["steps"], given["only"], given["compile"])


if __name__ == "__main__":
    main()
