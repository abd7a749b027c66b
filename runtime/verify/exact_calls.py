"""Calls that depend on memory, which a proof of values in memory of their own (:mod:`shardfx.ir.program.plain`) does
not see: those that write a value into memory of fewer bits, where torch rounds it without a word, and kernels that
misread an operand of another layout than they take."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

import torch

from shardfx.ir.cost.fake_calls import FakeCalls, Layout, Made, Result, leaves
from shardfx.ir.graph import op_name
from shardfx.ir.ops.local_ops import row_of
from shardfx.ir.rules.book import RuleBook


class Misread(TypeError):
    """A kernel does not take the memory layout of an operand, so that it may compute something else of it."""


class ExactCalls(FakeCalls):
    """Calls on fake tensors, of which each keeps what it writes, and takes operands as the row of its op states.

    ``planned`` are the ops of the graph: rows that are discovered speak of these alone.

    Raises:
        TypeError: memory cannot hold the dtype of what a call writes there.
        Misread: an operand has another memory layout than the row of the op states.
    """

    def __init__(self, book: RuleBook, planned: Container[Any]) -> None:
        super().__init__()
        self._book, self._planned = book, planned

    def _run(self, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Made:
        self._check_layouts(target, leaves((args, kwargs), Layout))
        made, row = super()._run(target, args, kwargs), row_of(target)
        if row is not None and row.into is not None and row.plain is not None:
            plain: Any = row.plain(tuple(args), dict(kwargs))
            values = [plain] if isinstance(plain, Layout) else _layouts(self.made(*plain))
            for value, memory in zip(values, _layouts(made), strict=False):
                if torch.promote_types(value.dtype, memory.dtype) != memory.dtype:
                    raise TypeError(f"a value of {value.dtype} is written into memory of {memory.dtype}")
        return made

    def _check_layouts(self, target: Any, layouts: Iterable[Layout]) -> None:
        entry = self._book.entry(target) if isinstance(target, torch._ops.OpOverload) else None
        if entry is None or (entry.discovered and target not in self._planned):
            return
        for layout in layouts:
            if not entry.contiguous.takes(layout.shape, layout.stride):
                wanted = f"contiguous in {entry.contiguous.value}"
                raise Misread(f"{op_name(target)} takes operands {wanted}, not of strides {layout.stride}")


def _layouts(made: Made) -> list[Layout]:
    return [result.layout for result in leaves(made.results, Result)]
