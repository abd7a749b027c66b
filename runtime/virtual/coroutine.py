"""A rank's program as a coroutine that yields at its collectives, so that somebody else may do them.

all_reduce = c10d.all_reduce(mm, 'sum', 'tp2/tp@0')      all_reduce = (yield request, mm, None).pop()
wait = c10d.wait_tensor(all_reduce)                 ->   wait = _here(all_reduce)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shardfx.ir.ops import memory_ops
from shardfx.ir.ops.computing import products
from shardfx.ir.program.rank_program import RankProgram
from shardfx.ir.program.source import Forms, Source, Watch, write_source
from shardfx.runtime.memory_pool import MemoryPool
from shardfx.runtime.rendezvous import Request

c10d = torch.ops._c10d_functional
Tensor = torch.Tensor


def _here(x: Tensor) -> Tensor:
    return x


def as_coroutine(program: RankProgram, pool: MemoryPool, watch: Watch | None = None) -> Source:
    """The program as a generator function on the memory of a pool; ``watch`` is shown every result."""
    instead: dict[Any, Callable[..., Any]] = {c10d.wait_tensor.default: _here, memory_ops.empty: pool.empty}
    return write_source(program, Forms(instead | products.instead(), Request.of), watch)
