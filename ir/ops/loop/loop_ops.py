"""Loop ops: iterations of a loop axis in a rank's step.

    total = memory.filled([8, 6], 0, torch.float32)
    iteration = loop.begin('mb', 4, [w, x, total])          what stands between is done 4 times; of what was made
        before, rows = loop.index(iteration, 0, 16)                    this much is used
        part = loop.slice(x, 0, rows, 16)
        grad = aten.mm(part, w)
        sum = loop.add(total, grad)                    leaves the iterations: it is read behind them only
    done = loop.end(iteration, [w, x], [total])
    sent = c10d.all_reduce(sum, ...)

Iterations may be done in parts, *units*, in an order that is data, as a pipeline's ranks do theirs. Numbers of the
iteration stand first, then unit by unit. Each unit is done once for each iteration, when the order says so; what it
makes is there in the units of the same iteration that the order does behind it, and kept until then:

    iteration = loop.begin('mb', 2, [w, x, total], 'F0.0 F0.1 B0.0 B0.1')
        rows = loop.index(iteration, 0, 16)
    f = loop.action(iteration, 'F0')
        part = loop.slice(x, 0, rows, 16)
    b = loop.action(iteration, 'B0')
        grad = aten.mm(part, w)
        sum = loop.add(total, grad)
    done = loop.end(iteration, [w, x], [total])

Who writes Python writes a loop (:mod:`shardfx.ir.program.source`); as a ``GraphModule`` the iterations are a module of
their own, called by :func:`repeat`. Needs torch alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch.fx.node import has_side_effect

Tensor = torch.Tensor


def begin(axis: str, count: int, around: Any, order: str = "") -> NoReturn:
    """Begin a loop; returns the induction variable. ``around`` are the values that the loop uses from outside;
    ``order``, in words such as ``F0.1``, is the execution order of its actions and iterations."""
    raise RuntimeError(f"the {count} iterations of {axis} are a loop: it is written by the engine")


@has_side_effect  # so that nobody takes it for dead code
def action(iteration: int, name: str, axis: str = "") -> int:
    """Begin an action of a loop; ``axis`` is the loop's, in the module of one action alone."""
    return iteration


def end(iteration: int, around: Any, into: Any) -> NoReturn:
    """End a loop: until then the values that it uses are live, and so are the accumulators ``into``."""
    raise RuntimeError("iterations are a loop: it is written by the engine")


def index(iteration: int, first: int, step: int) -> int:
    """An induction variable that grows by ``step`` per iteration."""
    return first + iteration * step


def piecewise_index(iteration: int, runs: Sequence[tuple[int, int, int]]) -> int:
    """An induction variable whose step changes; each of ``runs`` is an iteration, its value there and the step."""
    begin, first, step = next(run for run in reversed(runs) if run[0] <= iteration)
    return first + (iteration - begin) * step


def slice_of(x: Tensor, dim: int, start: int, length: int) -> Tensor:
    """An iteration's slice of an input that has those of all iterations."""
    return x.narrow(dim, start, length)


def add(total: Tensor, x: Tensor) -> Tensor:
    """Accumulate the sum over iterations, in the memory of ``total``."""
    return total.add_(x if x.shape == total.shape else x.reshape(total.shape))


def addmm(total: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Accumulate a matrix product over iterations, in the memory of ``total``; if that is in shards, in those of its
    rows."""
    if total.dim() == 2:
        return total.addmm_(a, b)
    for rows, shard in zip(a.chunk(total.shape[0]), total, strict=True):
        shard.addmm_(rows, b)
    return total


def index_add(total: Tensor, grad: Tensor, places: Tensor, rows: int, padding: int, by_frequency: bool) -> Tensor:
    """Accumulate the gradient of an embedding table over iterations; the arguments are those of
    ``aten.embedding_dense_backward``. Only rows that were looked up are touched."""
    added = grad.reshape(-1, total.shape[1])
    if padding >= 0:
        added = added.masked_fill((places == padding).reshape(-1, 1), 0.0)
    return total.index_add_(0, places.reshape(-1), added)


def maximum(most: Tensor, x: Tensor) -> Tensor:
    """Accumulate the maximum over iterations, in the memory of ``most``."""
    return torch.maximum(most, x, out=most)


def minimum(most: Tensor, x: Tensor) -> Tensor:
    """Accumulate the minimum over iterations, in the memory of ``most``."""
    return torch.minimum(most, x, out=most)


def write(full: Tensor, x: Tensor, dims: Sequence[int], starts: Sequence[int], lengths: Sequence[int]) -> Tensor:
    """Write an iteration's part to its position in the value of all iterations."""
    place = full
    for dim, start, length in zip(dims, starts, lengths, strict=True):
        place = place.narrow(dim, start, length)
    place.copy_(x.reshape(place.shape))
    return full


def repeat(unit: Callable[..., Any], axis: str, count: int, *around: Any) -> Any:
    """A loop: call a module once per iteration; returns the result of the last one, which has all accumulated
    values."""
    out = None
    for iteration in range(count):
        out = unit(iteration, *around)
    return out
