"""Peak memory of a full step (AdamW; the bytes of live tensors), compared with torch's own wrappers, on 2 gloo
ranks of this machine.

    python -m benchmarks.step_memory [--dim 256 --layers 4]
    python -m benchmarks.step_memory --accumulate  (forward and backward in four micro-batches; DDP's by no_sync)

Observed op by op, whoever owns them: parameters and states, which are live before the step, and all results of
ops; not buffers of collectives (gloo's buffers, and ours where ranks share memory).
Memory that is reused between steps counts all along. The prediction of ``pm.memory()`` is printed beside ours.
"""

from __future__ import annotations

import argparse
from copy import deepcopy

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

import shardfx as sx

from .contenders import RANKS, peak, size_of, sized, with_ranks
from .models import GPT, Size
from .step_time import sharded, updated, variants, with_optimizer


def rank_main(rank: int, size: Size, grad_accumulation: bool) -> None:
    torch.manual_seed(0)
    model = GPT(size)
    x, y = torch.randint(size.vocab, (2, size.batch, size.length)).unbind()
    if grad_accumulation:
        for name, (module, step) in variants(model, x, y, ["accumulate"]).items():
            print_peak(name, peak(module, step, module.parameters()), predicted(module, rank))
        return
    half = size.batch // RANKS
    mine = slice(rank * half, (rank + 1) * half)
    theirs = {
        "DDP": DistributedDataParallel(deepcopy(model), gradient_as_bucket_view=True),
        "FSDP2": sharded(deepcopy(model)),
    }
    for name, module in theirs.items():
        optimizer = torch.optim.AdamW(module.parameters())
        _, step = updated(module, x[mine], y[mine], optimizer)
        step()
        states = [value for state in optimizer.state.values() for value in state.values()]
        print_peak(f"{name}, AdamW", peak(module, step, [*module.parameters(), *states]))
    for zero, arena in ((0, False), (1, False), (3, False), (1, True), (3, True)):
        pm, step = with_optimizer(model, x, y, zero, arena)
        assert isinstance(pm, sx.ParallelModule)
        step()
        stored = [*pm.parameters(), *tree_leaves(list(pm._store.states.values()))]
        print_peak(f"ours, zero {zero}, {'arena' if arena else 'step'}", peak(pm, step, stored), pm.memory(rank).peak)


def predicted(module: torch.nn.Module, rank: int) -> int | None:
    """The prediction for our plan."""
    return module.memory(rank).peak if isinstance(module, sx.ParallelModule) else None


def print_peak(name: str, nbytes: int, said: int | None = None) -> None:
    if dist.get_rank() == 0:
        beside = f"   predicted {said / 1e6:6.1f} MB" if said is not None else ""
        print(f"{name:20} {nbytes / 1e6:6.1f} MB{beside}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    sized(parser)
    parser.add_argument("--accumulate", action="store_true", help="four micro-batches, without an update")
    given = vars(parser.parse_args())
    with_ranks(rank_main, size_of(given), given["accumulate"])


if __name__ == "__main__":
    main()
