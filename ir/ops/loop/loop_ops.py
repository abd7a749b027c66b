"""Loop ops: iterations of a loop axis in a rank's step.

    total = memory.filled([8, 6], 0, torch.float32)
    iteration = loop.begin('mb', 4, [w, x, total])          what stands between is done 4 times; of what was made
        part = loop.slice(x, 0, loop.index(iteration, 0, 16), 16)       this much is used
        grad = aten.mm(part, w)
        sum = loop.add(total, grad)                    leaves the iterations: it is read behind them only
    done = loop.end(iteration, [w, x], [total])
    sent = c10d.all_reduce(sum, ...)

Iterations may be done in actions, in an order that is data; numbers of the iteration stand before them, and what one
makes is there in those of the same iteration that run behind it:

    iteration = loop.begin('mb', 2, [w, x, total], 'F0.0 F0.1 B0.0 B0.1')
    f = loop.action(iteration, 'F0')
        ...
    b = loop.action(iteration, 'B0')
        ...

A ``GraphModule`` has a module for the iterations, or for each action, which :func:`repeat` calls. Needs torch alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch.fx.node import has_side_effect

Tensor = torch.Tensor


def begin(axis: str, count: int, around: Any, order: str = "") -> NoReturn:
    """Begin a loop; returns the induction variable. ``around`` are the values that the loop uses from outside;
    ``order``, in words such as ``F0.1``, is the execution order of its actions and iterations."""
    raise RuntimeError(f"the {count} iterations of {axis} are a loop: it is written by the engine")


@has_side_effect  # so that nobody takes it for dead code
def action(iteration: int, name: str) -> int:
    """Begin an action of a loop."""
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


@has_side_effect
def repeat(axis: str, count: int, bodies: Mapping[str, Any], takes: Mapping[str, Any], order: str) -> list[Any]:
    """A loop: call a body once per iteration, or that of each action in the ``order`` of the schedule. Of what it
    ``takes`` ``("F0", 1)`` is result 1 of ``F0`` in this iteration. Returns what the last call of each body gives."""
    words = [word.split(".") for word in order.split()] or [["", str(iteration)] for iteration in range(count)]
    made, last = dict[str, dict[str, Any]](), dict[str, Any]()
    for name, iteration in words:
        there = made.setdefault(iteration, {})
        operands = [there[each[0]][each[1]] if isinstance(each, tuple) else each for each in takes[name]]
        there[name] = last[name] = bodies[name](int(iteration), *operands)
        if len(there) == len(bodies):
            del made[iteration]
    return [each for name in bodies for each in last[name]]
