"""Random test values for ops: both signs, zeros and ties, integers over the full range that the op takes; in several
memory layouts.

A rule may be right by accident on some values (positive ones, distinct indices), and wrong on others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor
from torch._decomp import decomposition_table

from shardfx.ir.ops.context.attention_steps import ATTENTION
from shardfx.ir.rulebook.dims import argument

from .instance import UNCHECKED, Instance, bind, is_float, numbers, runs

aten = torch.ops.aten
Draw = Callable[[tuple[int, ...], torch.Generator], Tensor]


def both_signs(shape: tuple[int, ...], draw: torch.Generator) -> Tensor:
    """Numbers of both signs."""
    return torch.randn(shape, generator=draw, dtype=torch.float64)


def ties_and_zeros(shape: tuple[int, ...], draw: torch.Generator) -> Tensor:
    """Few different numbers, zero among them."""
    return torch.randint(-2, 3, shape, generator=draw).to(torch.float64)


def mostly_zeros(shape: tuple[int, ...], draw: torch.Generator) -> Tensor:
    """Numbers of both signs among zeros."""
    return both_signs(shape, draw) * (torch.rand(shape, generator=draw) < 0.4)


def positive(shape: tuple[int, ...], draw: torch.Generator) -> Tensor:
    """Numbers between 0 and 1, for ops that take no others."""
    return torch.rand(shape, generator=draw, dtype=torch.float64) * 0.9 + 0.05


def of_dtype(floats: Draw, shape: tuple[int, ...], dtype: torch.dtype, draw: torch.Generator) -> Tensor:
    """Random numbers of a dtype; of complex ones both parts are drawn."""
    if not dtype.is_complex:
        return floats(shape, draw).to(dtype)
    return torch.complex(floats(shape, draw), floats(shape, draw)).to(dtype)


FLOATS: tuple[Draw, ...] = (both_signs, ties_and_zeros, mostly_zeros, positive)
Range = tuple[int, int]
"""A half-open range of integers: the least one, and the end."""


def draws(of: Instance, seed: int = 0) -> Iterator[Instance]:
    """The instance on other values, a permutation of its own among them, as far as the op takes them and gives no NaN;
    masks are its own, if it takes no others."""
    generator = torch.Generator().manual_seed(seed)
    span = span_of(of)
    for floats in (*FLOATS, None):
        for ordered in (False, True) if any(_is_integer(t) for t in of.tensors) else (False,):
            drawn = [_draw(t, floats, span, ordered, generator) for t in of.tensors]
            masks_given = [t if t.dtype is torch.bool else new for t, new in zip(of.tensors, drawn, strict=True)]
            made = (as_given(of.on(each)) for each in (drawn, masks_given))
            if (taken := next(filter(_gives_numbers, made), None)) is not None:
                yield taken


EXTREMES: tuple[tuple[float, ...], ...] = (
    (math.nan, math.inf, -math.inf, 0.0, -0.0, 0.5, 1.5, -2.5, 1.0, -1.0),
    (1e200, -1e200, 1e-200, 30.0, -30.0, 800.0, -800.0, 2.0**53 + 2),
)
FAR = (2**53 + 1, -(2**53) - 1, 2**31 + 1, -(2**31) - 1, 2**15 + 1, -(2**15) - 1, 0, 3, -3)


def extremes(of: Instance) -> Iterator[Instance]:
    """A pointwise op's instance on extreme values, and NaN: a rank's version that is another op may differ there
    alone."""
    generator = torch.Generator().manual_seed(0)

    def drawn(like: Tensor, floats: tuple[float, ...]) -> Tensor:
        if like.dtype is torch.bool or like.is_complex():
            return like
        chosen = torch.tensor(floats, dtype=torch.float64) if like.is_floating_point() else torch.tensor(FAR)
        order = torch.randperm(like.numel(), generator=generator) % len(chosen)
        return chosen[order].reshape(like.shape).to(like.dtype)

    made = (of.on([drawn(tensor, floats) for tensor in of.tensors]) for floats in EXTREMES)
    yield from filter(runs, made)


def not_finite(of: Instance) -> Iterator[Instance]:
    """An instance with one infinity or NaN in one of its operands: a rank's version may multiply by zero what the op
    leaves out, or add up elements that it ignores. What attention does with keys that are not seen, its kernels decide
    by tiles."""
    if of.node.op in ATTENTION and (argument(of.node, "causal") or argument(of.node, "window")):
        return
    for i, tensor in enumerate(of.tensors):
        for number, at in zip((math.inf, math.nan, -math.inf), (0.5, 1.0, 0.0), strict=True):
            if tensor.is_floating_point() and tensor.numel():
                changed = tensor.clone()
                changed[tuple(min(int(at * size), size - 1) for size in tensor.shape)] = number
                made = as_given(of.on([changed if i == j else each for j, each in enumerate(of.tensors)]))
                if runs(made):
                    yield made


def beyond(of: Instance) -> Iterator[Instance]:
    """An instance on numbers larger than all among its arguments, where a linear op must be linear too."""
    magnitudes = map(abs, numbers((of.node.args, *of.node.kwargs.values())))
    bound = max([1.0, *(each for each in magnitudes if each < 1e9)])
    generator = torch.Generator().manual_seed(0)
    drawn = [
        of_dtype(both_signs, tuple(t.shape), t.dtype, generator) * 8 * bound if is_float(t) else t for t in of.tensors
    ]
    made = as_given(of.on(drawn))
    if bound > 1 and _gives_numbers(made) and all(r is None or bool(r.isfinite().all()) for r in made.results):
        yield made


FORWARDS = {
    aten.max_pool2d_with_indices_backward.default: aten.max_pool2d_with_indices.default,
    aten.max_pool3d_with_indices_backward.default: aten.max_pool3d_with_indices.default,
    aten.adaptive_max_pool2d_backward.default: aten.adaptive_max_pool2d.default,
    aten.adaptive_max_pool3d_backward.default: aten.adaptive_max_pool3d.default,
}
"""The forward of each op whose operands include the indices of its forward, and that is undefined on others."""


def as_given(of: Instance) -> Instance:
    """The instance with valid indices from the op's forward, for an op in FORWARDS."""
    forward = FORWARDS.get(of.node.op)
    if forward is None:
        return of
    (grad, x, *windows, _), _ = bind(of.node, of.tensors)
    space = 3 if "3d" in str(forward) else 2
    return of.on([grad, x, forward(x, *(windows or [list(grad.shape[-space:])]))[1]])


def span_of(of: Instance) -> Range:
    """The range of the integer operands of an op: the widest that it accepts.

    For a kernel that does not check its indices, the decomposition is tried; it may accept negative ones, the kernel
    not, so none is negative. Without a decomposition they are 0 and 1, valid in every shard.
    """
    if not any(_is_integer(t) for t in of.tensors):
        return 0, 2
    checked, from_end = of.node.op, True
    if getattr(checked, "overloadpacket", None) in UNCHECKED or "backward" in str(checked):
        if checked not in decomposition_table:
            return 0, 2
        checked, from_end = decomposition_table[checked], False
    sizes = {s for t in of.tensors for s in t.shape if s}  # of no elements there is nothing to draw
    limits = sorted(sizes | {n for n in numbers(of.node.args) if isinstance(n, int) and 1 < n < 10_000}, reverse=True)
    from_zero = [(0, end) for m in limits if m > 1 for end in (m + 1, m)]
    for low, high in [(-m, m) for m in limits if from_end] + from_zero + [(1, m) for m in limits if m > 1]:
        ends = torch.tensor([low, high - 1])
        if of.attempt([_ends(t, ends) if _is_integer(t) else t for t in of.tensors], op=checked) is not None:
            return low, high
    return 0, 2


def _ends(like: Tensor, ends: Tensor) -> Tensor:
    return ends.repeat(-(-max(like.numel(), 1) // 2))[: like.numel()].reshape(like.shape).to(like.dtype)


def _draw(like: Tensor, floats: Draw | None, span: Range, ordered: bool, generator: torch.Generator) -> Tensor:
    """Random values like a tensor's, or (without ``floats``) its own permuted; integers are shuffled, or sorted, as
    offsets are."""
    shape = tuple(like.shape)
    if is_float(like):
        if floats is None:
            return like.flatten()[torch.randperm(like.numel(), generator=generator)].reshape(shape)
        return of_dtype(floats, shape, like.dtype, generator)
    if like.dtype is torch.bool:
        return torch.rand(shape, generator=generator) < 0.5
    made = torch.randint(*span, shape, generator=generator).flatten()
    made[: 2 if made.numel() > 1 else 0] = torch.tensor([span[0], span[1] - 1])[: made.numel()]
    made = made.sort().values if ordered else made[torch.randperm(made.numel(), generator=generator)]
    return made.reshape(shape).to(like.dtype)


def _gives_numbers(of: Instance) -> bool:
    """Whether the op accepts these values, and gives no NaN."""
    return runs(of) and not any(r is not None and r.is_floating_point() and bool(r.isnan().any()) for r in of.results)


def _is_integer(t: Tensor) -> bool:
    return not is_float(t) and t.dtype is not torch.bool


# ---- memory layouts --------------------------------------------------------------------------------------------------


def permuted(t: Tensor) -> Tensor:
    """A copy with its dims in reverse order in memory."""
    reverse = tuple(reversed(range(t.dim())))
    return t.permute(reverse).clone(memory_format=torch.contiguous_format).permute(reverse)


def sliced(t: Tensor) -> Tensor:
    """A strided copy: every other element of the last dim of a larger tensor, from the second on."""
    if not t.dim():
        return t
    wide = t.new_zeros((*t.shape[:-1], 2 * t.shape[-1] + 1))
    return wide[..., 1::2].copy_(t)


def expanded(t: Tensor) -> Tensor:
    """The tensor with stride 0 along dims on which it is constant."""
    for d in range(t.dim()):
        first = t.narrow(d, 0, 1) if t.shape[d] else t
        if t.shape[d] > 1 and torch.equal(first.expand_as(t), t):
            t = first.expand_as(t)
    return t


LAYOUTS: Mapping[str, Callable[[Tensor], Tensor]] = {"permuted": permuted, "sliced": sliced, "expanded": expanded}
"""The layouts by name."""
