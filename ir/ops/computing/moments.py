"""Mean and variance of a batch that lies in pieces: first of each piece, then of all (Chan, Golub and LeVeque, 1979).

    out[p, 2, c] = shardfx.piece_moments(x[n, c, ...], of, at, count)    mean and variance of each of p equal pieces
    mean[c], var[c] = shardfx.joined_moments(out)                        of all

``of`` says into how many pieces samples are sharded, and each dim of space. ``x`` is ``count`` of them, from ``at`` on,
and zeros stand for the others, so that what ranks have of a batch adds up to ``out``: one small sum. Squares are taken
of what is centred, so that nothing cancels. Numbers of 16 bits are taken as float32. Needs torch alone.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

_library = torch.library.Library("shardfx", "FRAGMENT")
_library.define("piece_moments(Tensor x, int[] of, int[] at, int[] count) -> Tensor")
_library.define("joined_moments(Tensor moments) -> (Tensor, Tensor)")


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _of_cpu(rows: Tensor) -> tuple[Tensor, Tensor]:
    mean, var = torch.batch_norm_update_stats(rows.contiguous(), None, None, 0.0)  # four times as fast as var_mean
    return mean, var


def _of_any(rows: Tensor) -> tuple[Tensor, Tensor]:
    var, mean = torch.var_mean(rows, [d for d in range(rows.dim()) if d != 1], correction=0)
    return mean, var


def _pieces(x: Tensor, of: Sequence[int], at: Sequence[int], count: Sequence[int]) -> Tensor:
    moments, boxes = _of_cpu if x.device.type == "cpu" else _of_any, [x.to(_wide(x.dtype))]
    for dim, n in zip((0, *range(2, x.dim())), count, strict=True):
        boxes = [part for box in boxes for part in box.split(x.shape[dim] // n, dim)] if n > 1 else boxes
    made = boxes[0].new_zeros((math.prod(of), 2, x.shape[1]))
    places = itertools.product(*(range(first, first + n) for first, n in zip(at, count, strict=True)))
    for place, box in zip(places, boxes, strict=True):
        number = 0
        for one, n in zip(place, of, strict=True):
            number = number * n + one
        torch.stack(moments(box), out=made[number])
    return made


def _joined(moments: Tensor) -> tuple[Tensor, Tensor]:
    means, variances = moments.unbind(1)
    mean = means.mean(0)
    return mean, variances.mean(0) + (means - mean).square_().mean(0)


def _pieces_meta(x: Tensor, of: Sequence[int], at: Sequence[int], count: Sequence[int]) -> Tensor:
    return x.new_empty((math.prod(of), 2, x.shape[1]), dtype=_wide(x.dtype))


def _joined_meta(moments: Tensor) -> tuple[Tensor, Tensor]:
    return moments.new_empty(moments.shape[2:]), moments.new_empty(moments.shape[2:])


for _key in ("CPU", "CUDA"):
    _library.impl("piece_moments", _pieces, _key)
    _library.impl("joined_moments", _joined, _key)
_library.impl("piece_moments", _pieces_meta, "Meta")
_library.impl("joined_moments", _joined_meta, "Meta")

piece_moments = torch.ops.shardfx.piece_moments.default
joined_moments = torch.ops.shardfx.joined_moments.default
