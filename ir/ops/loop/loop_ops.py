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
    """The begin of iterations, and the number of the iteration; ``around`` is what they use of what was made before,
    ``order`` says as words ``F0.1`` which unit is done of which iteration, where iterations have units."""
    raise RuntimeError(f"the {count} iterations of {axis} are a loop: it is written by the engine")


@has_side_effect  # so that nobody takes it for dead code
def action(iteration: int, name: str, axis: str = "") -> int:
    """The begin of a unit of iterations; ``axis`` is theirs, in the module of one unit alone."""
    return iteration


def end(iteration: int, around: Any, into: Any) -> NoReturn:
    """The end of iterations: until then all that they use stays, and the memory ``into`` which they collect."""
    raise RuntimeError("iterations are a loop: it is written by the engine")


def index(iteration: int, first: int, step: int) -> int:
    """A number that grows by ``step`` from one iteration to the next."""
    return first + iteration * step


def piecewise_index(iteration: int, runs: Sequence[tuple[int, int, int]]) -> int:
    """A number whose step changes at some iterations; each of ``runs`` is an iteration, its number and the step."""
    begin, first, step = next(run for run in reversed(runs) if run[0] <= iteration)
    return first + (iteration - begin) * step


def slice_of(x: Tensor, dim: int, start: int, length: int) -> Tensor:
    """An iteration's part of an input that holds those of all iterations, one behind the other."""
    return x.narrow(dim, start, length)


def add(total: Tensor, x: Tensor) -> Tensor:
    """The sum over the iterations so far, in the memory of ``total``."""
    return total.add_(x if x.shape == total.shape else x.reshape(total.shape))


def addmm(total: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """The sum over the iterations so far, and a matrix product, in the memory of ``total``; where that is in shards,
    those of its rows."""
    if total.dim() == 2:
        return total.addmm_(a, b)
    for rows, shard in zip(a.chunk(total.shape[0]), total, strict=True):
        shard.addmm_(rows, b)
    return total


def index_add(total: Tensor, grad: Tensor, places: Tensor, rows: int, padding: int, by_frequency: bool) -> Tensor:
    """The sum over the iterations so far, and the gradient of a table by that of what was looked up at some places; the
    arguments are those of ``aten.embedding_dense_backward``. Only the rows of these places are touched."""
    added = grad.reshape(-1, total.shape[1])
    if padding >= 0:
        added = added.masked_fill((places == padding).reshape(-1, 1), 0.0)
    return total.index_add_(0, places.reshape(-1), added)


def maximum(most: Tensor, x: Tensor) -> Tensor:
    """The maximum over the iterations so far, in the memory of ``most``."""
    return torch.maximum(most, x, out=most)


def minimum(most: Tensor, x: Tensor) -> Tensor:
    """The minimum over the iterations so far, in the memory of ``most``."""
    return torch.minimum(most, x, out=most)


def write(full: Tensor, x: Tensor, dims: Sequence[int], starts: Sequence[int], lengths: Sequence[int]) -> Tensor:
    """An iteration's part at its place in what all iterations make together."""
    place = full
    for dim, start, length in zip(dims, starts, lengths, strict=True):
        place = place.narrow(dim, start, length)
    place.copy_(x.reshape(place.shape))
    return full


def repeat(unit: Callable[..., Any], axis: str, count: int, *around: Any) -> Any:
    """The iterations of an axis: call a module once for each; gives what the last one gives, which all have
    collected."""
    out = None
    for iteration in range(count):
        out = unit(iteration, *around)
    return out
