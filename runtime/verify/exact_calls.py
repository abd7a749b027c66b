"""Calls that lay a value into memory of fewer bits: torch rounds it there without a word, which a proof of values in
memory of their own (:mod:`shardfx.ir.program.plain`) does not see."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from shardfx.ir.cost.fake_calls import FakeCalls, Layout, Made, Result, leaves
from shardfx.ir.ops.local_ops import row_of


class ExactCalls(FakeCalls):
    """Calls on fake tensors, of which each keeps what it writes.

    Raises:
        TypeError: memory cannot hold the dtype of what a call writes there.
    """

    def _run(self, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Made:
        made, row = super()._run(target, args, kwargs), row_of(target)
        if row is not None and row.into is not None and row.plain is not None:
            plain: Any = row.plain(tuple(args), dict(kwargs))
            values = [plain] if isinstance(plain, Layout) else _layouts(self.made(*plain))
            for value, memory in zip(values, _layouts(made), strict=False):
                if torch.promote_types(value.dtype, memory.dtype) != memory.dtype:
                    raise TypeError(f"a value of {value.dtype} is written into memory of {memory.dtype}")
        return made


def _layouts(made: Made) -> list[Layout]:
    return [result.layout for result in leaves(made.results, Result)]
