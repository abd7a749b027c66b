"""Ops that move elements, done on element numbers: which element of what stands where then?"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardfx.ir.ops.computing.rings import ring
from shardfx.ir.ops.traits import base_name_of, gives_alias
from shardfx.runtime.verify.data_movement import ATEN_MOVES, PACKING
from shardfx.runtime.verify.proof.elements import Elements, read
from shardfx.runtime.verify.proof.strided_runs import by_dim

aten = torch.ops.aten

COPIED = {
    aten.cat.default,
    aten.stack.default,
    aten.flip.default,
    aten.roll.default,
    ring,
    aten.repeat.default,
    aten.reshape.default,
    aten.view_copy.default,
    aten.permute_copy.default,
    aten.transpose_copy.int,
    aten._unsafe_view.default,
}
"""Ops that move elements into memory of their own; those that give a view say so in their schema."""
ON_LOOPS: dict[Any, Callable[..., Any]] = {
    **{op: move for op, move in (ATEN_MOVES | PACKING).items() if op is not aten.narrow.default},
    aten._unsafe_view.default: Elements.reshape,
    aten.expand.default: lambda x, shape, implicit=False: spread(x, _whole(x, shape)),
}
"""Those that are done on loops, however large a tensor is; the others on elements that are written out."""
WRITTEN_OUT = 1 << 18
"""Moves that are not done on loops are done on up to so many elements."""
CANONICAL = 1 << 14
"""Patterns of several runs of up to so many elements are read anew, so that equal ones are written alike."""


def moves(op: Any) -> bool:
    """Whether an op moves elements only."""
    return op in ON_LOOPS or op in COPIED or (gives_alias(op) and not looks_at_memory(op))


def looks_at_memory(op: Any) -> bool:
    """Whether it hangs on how its operand lies what an op gives, or on what was in memory before."""
    names = {argument.name for argument in op._schema.arguments}
    return "storage_offset" in names or (gives_alias(op) and "stride" in names) or "empty" in base_name_of(op)


def moved(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """What such an op gives of elements.

    Raises:
        RuntimeError, TypeError, ValueError, IndexError: it cannot be done on them, or not on so many.
    """
    if op in ON_LOOPS:
        return ON_LOOPS[op](*args, **kwargs)

    def written(nest: Any) -> Any:
        if isinstance(nest, Elements):
            if nest.numel() > WRITTEN_OUT:
                raise RuntimeError("too many elements")
            return nest.written_out()
        return type(nest)(map(written, nest)) if isinstance(nest, (list, tuple)) else nest

    made = op(*written(list(args)), **{name: written(arg) for name, arg in kwargs.items()})
    every = list(made) if isinstance(made, (list, tuple)) else [made]
    if any(t.dtype != torch.int64 or t.numel() > WRITTEN_OUT or (t < 0).any() for t in every):
        raise RuntimeError(f"{op} gives other elements")
    return list(map(read, every)) if isinstance(made, (list, tuple)) else read(made)


def spread(x: Elements, shape: Sequence[int]) -> Elements:
    """The elements broadcast to a shape.

    Raises:
        RuntimeError: it is no shape of theirs, or they are too irregular.
    """
    shape = tuple(shape)
    if x.shape == shape:
        return x
    own = (1,) * (len(shape) - x.dim()) + x.shape
    if len(own) != len(shape) or any(a not in (1, b) for a, b in zip(own, shape, strict=True)):
        raise RuntimeError(f"{x.shape} is not broadcast to {shape}")
    loops = by_dim(x.runs[0], own) if len(x.runs) == 1 else None
    if loops is None:
        if math.prod(shape) > WRITTEN_OUT:
            raise RuntimeError("too irregular")
        return read(x.written_out().expand(shape))
    each = (loop if a == b else ((b, 0),) for loop, a, b in zip(loops, own, shape, strict=True))
    return Elements.of(shape, x.runs[0].base, (pair for loop in each for pair in loop))


def _whole(x: Elements, shape: Sequence[int]) -> tuple[int, ...]:
    lead = len(shape) - x.dim()
    return tuple(x.shape[i - lead] if size == -1 else size for i, size in enumerate(shape))


def canonical(x: Elements) -> Elements:
    """The same elements, written as whoever else has them writes them."""
    return x if len(x.runs) < 2 or x.numel() > CANONICAL else read(x.written_out())
