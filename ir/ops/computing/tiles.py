"""Max-pools over tiles of a sharded image: a rank's windows, on the rows that they reach.

    y[n c p q], indices = shardfx.max_pool_tile(x[n c h w], kernel, stride, dilation, first, size)
    gx[n c h w]         = shardfx.max_pool_tile_backward(gy[n c p q], x, indices, at, size)

The rows of ``x`` begin at ``first`` of an image of ``size``, in every dim; what is not of the image is padding. ``at``
says where the rows begin that are made of a gradient. Indices count through the global image and name the first of
equal elements. Needs torch alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .library import Ints, define

aten = torch.ops.aten
MAX_POOL = {2: aten.max_pool2d_with_indices.default, 3: aten.max_pool3d_with_indices.default}


def by_dim(indices: Tensor, size: Ints) -> list[Tensor]:
    """The place in each dim of an element that is numbered through all of them."""
    found = []
    for n in reversed(size[1:]):
        above = torch.div(indices, n, rounding_mode="floor")
        found.append(indices - above * n)
        indices = above
    return [indices, *found[::-1]]


def number(places: Sequence[Tensor], size: Ints) -> Tensor:
    """The inverse of :func:`by_dim`."""
    found = places[0]
    for place, n in zip(places[1:], size[1:], strict=True):
        found = found * n + place
    return found


def _like_maxima(x: Tensor, kernel: Ints, stride: Ints, dilation: Ints, *_: Ints) -> tuple[Tensor, Tensor]:
    options = zip(x.shape[-len(kernel) :], kernel, stride, dilation, strict=True)
    shape = (*x.shape[: -len(kernel)], *((n - d * (k - 1) - 1) // s + 1 for n, k, s, d in options))
    return x.new_empty(shape), x.new_empty(shape, dtype=torch.int64)


@define(
    "max_pool_tile(Tensor x, int[] kernel, int[] stride, int[] dilation, int[] first, int[] size) -> (Tensor, Tensor)",
    shapes=_like_maxima,
)
def max_pool_tile(
    x: Tensor, kernel: Ints, stride: Ints, dilation: Ints, first: Ints, size: Ints
) -> tuple[Tensor, Tensor]:
    """The largest element of each window, and where it is."""
    y, indices = MAX_POOL[len(size)](x, kernel, stride, [0] * len(size), dilation, False)
    places = zip(by_dim(indices, x.shape[-len(size) :]), first, size, strict=True)
    inside = [(place + f).clamp(0, n - 1) for place, f, n in places]  # of what is lowest, padding may be the first
    return y, number(inside, size)


@define(
    "max_pool_tile_backward(Tensor grad, Tensor x, Tensor indices, int[] at, int[] size) -> Tensor",
    shapes=lambda grad, x, *_: grad.new_empty(x.shape),
)
def max_pool_tile_backward(grad: Tensor, x: Tensor, indices: Tensor, at: Ints, size: Ints) -> Tensor:
    """Each gradient added where its maximum is."""
    shape = x.shape[-len(size) :]
    batch, rest = math.prod(x.shape[: -len(size)]), math.prod(shape)
    places = [place - a for place, a in zip(by_dim(indices, size), at, strict=True)]
    beside = torch.zeros_like(indices, dtype=torch.bool)
    for place, n in zip(places, shape, strict=True):
        beside |= (place < 0) | (place >= n)
    flat = number(places, shape).masked_fill(beside, rest)  # what other ranks have goes into one element more
    made = grad.new_zeros((batch, rest + 1))
    made.scatter_add_(1, flat.reshape(batch, -1), grad.reshape(batch, -1))
    return made[:, :rest].reshape(x.shape).contiguous()
