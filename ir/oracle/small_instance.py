"""A node as a small instance of itself: few elements, and what divides what stays as it is.

    f(f32[8, 4096, 1024], f32[3072, 1024], 16)   ->   f(f64[6, 24, 9], f64[27, 9], 8)

Equal sizes stay equal, multiples stay multiples (of up to four times: the same), sizes up to five stay what they are.
Numbers among the arguments follow where they are sizes or divide one. What the op then gives must have the shape that
the node's results have, in the same small sizes; else the next way of making it small is tried.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from shardfx.ir.graph import Node, Value, substitute

from .instance import Instance, instance

KEPT = 5
"""Sizes up to this stay as they are: they may mean something (three colours, two halves)."""
SAME_RATIO = 4
LARGEST = 400
MOST_ELEMENTS = 20_000
Sizes = Mapping[int, int]


def shrunk(node: Node, seed: int = 0) -> Instance | None:
    """A small instance of a node on random values, or None if there is none that behaves as the node does."""
    for sizes in _ways(node):
        for dtype in (torch.float64, None):
            for positive in (False, True):
                made = _make(node, sizes, dtype, positive, seed)
                if made is not None:
                    return made
    return None


def _ways(node: Node) -> Iterator[Sizes]:
    """Maps from the node's sizes to small ones, the most faithful first."""
    sizes = {s for value in node.operands for s in value.shape}
    numbers = {n for n in _numbers((node.args, tuple(node.kwargs.values()))) if n > 1}
    divisors = {n for n in numbers if n in sizes or any(s % n == 0 for s in sizes)}
    for free, fixed in ((sizes | divisors, set()), (sizes - divisors, divisors)):
        found = small_sizes(free, fixed)
        if found is not None:
            yield found
    large = sorted(s for s in sizes if s > KEPT)
    yield {s: min(s, KEPT + 1 + i) for i, s in enumerate(large)}
    yield {}


def _numbers(arg: Any) -> Iterator[int]:
    if isinstance(arg, (list, tuple)):
        for each in arg:
            yield from _numbers(each)
    elif isinstance(arg, int) and not isinstance(arg, bool):
        yield arg


def small_sizes(sizes: Iterable[int], fixed: Iterable[int] = ()) -> dict[int, int] | None:
    """For each size a small one, so that one divides another where it did; None if there are none below LARGEST.

    Example::

        small_sizes([3, 64, 1024, 3072])    # {3: 3, 64: 7, 1024: 14, 3072: 42}
    """
    found = {s: s for s in fixed}
    for size in sorted(set(sizes) - set(found)):
        least = max([KEPT, *(small for s, small in found.items() if s < size and s not in fixed)])
        options = (size,) if size <= KEPT else range(least + 1, min(size, LARGEST) + 1)
        small = next((o for o in options if _alike(size, o, found)), None)
        if small is None:
            return None
        found[size] = small
    return found


def _alike(size: int, small: int, found: Sizes) -> bool:
    """Whether ``small`` stands to the other small sizes as ``size`` does to the others."""
    for other, other_small in found.items():
        if other < 2 or other > size:
            continue
        divides = size % other == 0
        if divides != (small % other_small == 0):
            return False
        if divides and size // other <= SAME_RATIO and size // other != small // other_small:
            return False
    return True


def _make(node: Node, sizes: Sizes, dtype: torch.dtype | None, positive: bool, seed: int) -> Instance | None:
    """The instance, if the op takes it, and gives what can be compared."""
    draw = torch.Generator().manual_seed(seed)

    def tensor(value: Value) -> torch.Tensor:
        shape = [sizes.get(s, s) for s in value.shape]
        kind = value.type.dtype
        if kind.is_complex:
            return torch.randn(shape, generator=draw, dtype=kind)
        if kind.is_floating_point:
            made = torch.randn(shape, generator=draw, dtype=torch.float64)
            return (made.abs().clamp(0.05, 0.95) if positive else made).to(dtype or kind)
        return torch.randint(0, 2, shape, generator=draw).to(kind)

    if dtype is None and any(_coarse(value) for value in node.operands):
        return None
    if sum(_count(value, sizes) for value in (*node.operands, *node.outs)) > MOST_ELEMENTS:
        return None

    def number(arg: Any) -> Any:
        if isinstance(arg, (list, tuple)):
            return type(arg)(number(a) for a in arg) if type(arg) in (list, tuple) else [number(a) for a in arg]
        if isinstance(arg, int) and not isinstance(arg, bool) and arg > KEPT:
            return sizes.get(arg, arg)
        return arg

    try:
        args = tuple(number(substitute(arg, tensor)) for arg in node.args)
        made = instance(node.op, args, {k: number(substitute(a, tensor)) for k, a in node.kwargs.items()})
    except Exception:  # whatever the op says of its arguments
        return None
    return made if _fits(made, node, sizes) else None


def _count(value: Value, sizes: Sizes) -> int:
    count = 1
    for s in value.shape:
        count *= sizes.get(s, s)
    return count


def _coarse(value: Value) -> bool:
    """Too few digits to tell a right cut from one that is wrong by little."""
    return value.type.dtype.is_floating_point and torch.finfo(value.type.dtype).eps > 1e-5


def _fits(made: Instance, node: Node, sizes: Sizes) -> bool:
    """Whether the results are those of the node, in small sizes, and no NaN or zero that would hide what is wrong."""
    if len(made.results) != len(node.results):
        return False
    known = dict(sizes)
    for result, value in zip(made.results, node.results, strict=True):
        if value is None:
            continue
        if result is None or result.is_meta or result.dim() != value.type.ndim:
            return False  # on meta: an op whose own arguments say so has no numbers to look at
        if any(known.setdefault(s, small) != small for s, small in zip(value.shape, result.shape, strict=True)):
            return False
        if result.is_floating_point() and not (bool(torch.isfinite(result).all()) and bool((result != 0).any())):
            return False
    for value, wanted in zip(made.node.results, node.results, strict=True):
        if wanted is None and value is not None:
            made.node.results[value.index] = None
    return True
