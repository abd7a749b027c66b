"""A rank's program as a coroutine that yields at its collectives, so that somebody else may do them.

all_reduce = c10d.all_reduce(mm, 'sum', 'tp2/tp@0')      all_reduce = yield request, mm, None
wait = c10d.wait_tensor(all_reduce)                 ->   wait = _here(all_reduce)
"""

from __future__ import annotations

import torch

from shardfx.ir.program.rank_program import RankProgram
from shardfx.ir.program.source import Forms, Source, Watch, write_source
from shardfx.runtime.rendezvous import Request

c10d = torch.ops._c10d_functional
Tensor = torch.Tensor


def _here(x: Tensor) -> Tensor:
    return x


FORMS = Forms(instead={c10d.wait_tensor.default: _here}, ask=Request.of)


def as_coroutine(program: RankProgram, watch: Watch | None = None) -> Source:
    """The program as a generator function; ``watch`` is shown every result."""
    return write_source(program, FORMS, watch)
