"""What a whole step holds at most (AdamW; the bytes of tensors that are there), beside torch's own wrappers, on 2 gloo
ranks of this machine.

    python -m benchmarks.step_memory [--dim 256 --layers 4]

Looked at op by op, whoever holds them: parameters and states, which are there before the step, and all that the step
makes; not what carries collectives (gloo's buffers, and ours where ranks share memory).
Memory that is kept between steps counts from its first use on. Beside ours stands what ``pm.memory()`` foresees.
"""

from __future__ import annotations

import argparse
import os
import socket
import warnings
from copy import deepcopy
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import shardfx as sx
from shardfx.runtime.same_host.neighbourhood import met

from .models import GPT, Size
from .step_time import RANKS, Step, sharded, updated, whole


class Live(TorchDispatchMode):
    """The bytes of all storages that ops give, as long as they are there; and the most of them at once."""

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
                storage = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage()
                self._found.setdefault(storage._cdata, StorageWeakRef(storage))
        self.peak = max(self.peak, self._there())

    def _there(self) -> int:
        total = 0
        carried = {each.untyped_storage()._cdata for near in met.values() for each in near.memory}
        for key, ref in list(self._found.items()):
            if key in carried:
                continue
            storage = torch.UntypedStorage._new_with_weak_ptr(ref.cdata)
            if storage is None:
                del self._found[key]
            else:
                total += storage.nbytes()  # now: FSDP2 lets go of storages by making them empty
        return total


def peak(module: nn.Module, step: Step, stored: list[Tensor]) -> int:
    """The most bytes in a step; the third one, when all that is kept between steps is there."""
    for _ in range(2):
        module.zero_grad(set_to_none=True)
        step()
    module.zero_grad(set_to_none=True)
    with Live() as live:
        live.see(stored)
        step()
    return live.peak


def rank_main(rank: int, port: int, size: Size) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=RANKS, timeout=timedelta(minutes=5))
    torch.manual_seed(0)
    model = GPT(size)
    x, y = torch.randint(size.vocab, (2, size.batch, size.length)).unbind()
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
        pm, step = whole(model, x, y, zero, arena)
        assert isinstance(pm, sx.ParallelModule)
        step()
        held = [*pm.parameters(), *tree_leaves(list(pm.store.states.values()))]
        print_peak(f"ours, zero {zero}, {'arena' if arena else 'step'}", peak(pm, step, held), pm.memory(rank).peak)
    dist.destroy_process_group()


def print_peak(name: str, nbytes: int, foreseen: int | None = None) -> None:
    if dist.get_rank() == 0:
        said = f"   foreseen {foreseen / 1e6:6.1f} MB" if foreseen is not None else ""
        print(f"{name:20} {nbytes / 1e6:6.1f} MB{said}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    for field, value in vars(Size()).items():
        parser.add_argument(f"--{field}", type=int, default=value)
    os.environ["OMP_NUM_THREADS"] = "1"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(rank_main, (port, Size(**vars(parser.parse_args()))), nprocs=RANKS)


if __name__ == "__main__":
    main()
