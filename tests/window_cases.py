"""Calls of ops that see a dim through a window, drawn from a seed: kernel, stride, padding, dilation and sizes."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch

from tests.op_calls import f

aten = torch.ops.aten
Draw = random.Random


def convolution(draw: Draw) -> tuple[Any, tuple[Any, ...]]:
    transposed, groups = draw.random() < 0.5, draw.choice((1, 2))
    kernel, stride, dilation = draw.randint(1, 5), draw.randint(1, 3), draw.randint(1, 3)
    padding = draw.randint(0, 3)
    more = draw.randrange(stride) if transposed else 0
    size = draw.randint(1, 14) if transposed else draw.randint(max(dilation * (kernel - 1) + 1 - 2 * padding, 1), 24)
    x, w = f(1, 2 * groups, size, 3), f(2 * groups, 2, kernel, 1)
    options = [stride, 1], [padding, 0], [dilation, 1], transposed, [more, 0], groups
    return aten.convolution.default, (x, w, f(2 * groups) if draw.random() < 0.5 else None, *options)


def weight_gradient(draw: Draw) -> tuple[Any, tuple[Any, ...]]:
    _, (x, w, bias, *options) = convolution(draw)
    y = aten.convolution.default(x, w, bias, *options)
    return aten.convolution_backward.default, (torch.randn_like(y), x, w, None, *options, [False, True, False])


def sliding(draw: Draw) -> tuple[Any, ...]:
    """An image, and kernel, stride and padding of windows that slide over it."""
    kernel, stride = draw.randint(1, 4), draw.randint(1, 4)
    padding = draw.randint(0, kernel // 2)
    return f(1, 2, draw.randint(1, 20), 5), [kernel, 2], [stride, 1], [padding, 1]


def max_pool(draw: Draw) -> tuple[Any, tuple[Any, ...]]:
    x, *windows = sliding(draw)
    x = x.round() if draw.random() < 0.5 else x  # with ties
    options = (*windows, [draw.randint(1, 2), 1], draw.random() < 0.5)
    if not aten.max_pool2d_with_indices.default(x, *options)[0].isfinite().all():
        raise ValueError("a window that sees padding alone, whose index is none of the image")
    return aten.max_pool2d_with_indices.default, (x, *options)


def max_pool_gradient(draw: Draw) -> tuple[Any, tuple[Any, ...]]:
    _, (x, *options) = max_pool(draw)
    y, indices = aten.max_pool2d_with_indices.default(x, *options)
    return aten.max_pool2d_with_indices_backward.default, (torch.randn_like(y), x, *options, indices)


def avg_pool(draw: Draw) -> tuple[Any, tuple[Any, ...]]:
    divisor = draw.choice((None, None, 3))
    return aten.avg_pool2d.default, (*sliding(draw), draw.random() < 0.5, draw.random() < 0.5, divisor)


def avg_pool_gradient(draw: Draw) -> tuple[Any, tuple[Any, ...]]:
    _, (x, *options) = avg_pool(draw)
    y = aten.avg_pool2d.default(x, *options)
    return aten.avg_pool2d_backward.default, (torch.randn_like(y), x, *options)


def pad(draw: Draw) -> tuple[Any, tuple[Any, ...]]:
    pads = [draw.randint(-2, 4) for _ in range(2)]
    return aten.constant_pad_nd.default, (f(2, draw.randint(1, 16), 3), [1, 0, *pads], draw.choice((0.0, 1.5)))


def resize(draw: Draw) -> tuple[Any, tuple[Any, ...]]:
    kinds = ("upsample_bilinear2d", "upsample_bicubic2d")
    name, sizes, aligned = draw.choice(kinds), [draw.randint(1, 20), 5], draw.random() < 0.5
    return getattr(aten, name).default, (f(1, 2, draw.randint(1, 20), 5), sizes, aligned)


def resize_gradient(draw: Draw) -> tuple[Any, tuple[Any, ...]]:
    op, (x, sizes, aligned) = resize(draw)
    y = torch.randn_like(op(x, sizes, aligned))
    return getattr(aten, f"{op._opname}_backward").default, (y, sizes, list(x.shape), aligned)


def slices(draw: Draw) -> tuple[Any, tuple[Any, ...]]:
    size = draw.randint(2, 30)
    start, end = sorted((draw.randint(0, size), draw.randint(0, size)))
    return aten.slice.Tensor, (f(2, size, 3), 1, start, end, draw.randint(1, 4))


def slice_gradient(draw: Draw) -> tuple[Any, tuple[Any, ...]]:
    op, (x, *of) = slices(draw)
    return aten.slice_backward.default, (torch.randn_like(op(x, *of)), list(x.shape), *of)


def edges(draw: Draw) -> tuple[Any, tuple[Any, ...]]:
    name = draw.choice(("reflection", "replication"))
    pads = [draw.randint(0, 1), 1, *(draw.randint(0, 4) for _ in range(2))]
    return getattr(aten, f"{name}_pad2d").default, (f(1, 2, draw.randint(2, 20), 5), pads)


def edges_gradient(draw: Draw) -> tuple[Any, tuple[Any, ...]]:
    op, (x, pads) = edges(draw)
    return getattr(aten, f"{op._opname}_backward").default, (torch.randn_like(op(x, pads)), x, pads)


KINDS: dict[str, Callable[[Draw], tuple[Any, tuple[Any, ...]]]] = {
    "convolution": convolution,
    "weight gradient": weight_gradient,
    "max pool": max_pool,
    "max pool gradient": max_pool_gradient,
    "avg pool": avg_pool,
    "avg pool gradient": avg_pool_gradient,
    "pad": pad,
    "resize": resize,
    "resize gradient": resize_gradient,
    "edges": edges,
    "edges gradient": edges_gradient,
    "slice": slices,
    "slice gradient": slice_gradient,
}
