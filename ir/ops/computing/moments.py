"""Mean and variance of a batch that lies in pieces: first of each piece, then of all (Chan, Golub and LeVeque, 1979).

    out[p, 2, c] = shardfx.piece_moments(x[n, c, ...], p)     mean and variance of each of p equal pieces of the rows
    mean[c], var[c] = shardfx.joined_moments(out)             of all rows

A rank makes the moments of its own rows, and what the ranks exchange is one small tensor. Squares are taken of what is
centred, so that nothing cancels. Numbers of 16 bits are taken as float32. Needs torch alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

_library = torch.library.Library("shardfx", "FRAGMENT")
_library.define("piece_moments(Tensor x, int pieces) -> Tensor")
_library.define("joined_moments(Tensor moments) -> (Tensor, Tensor)")


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _of_cpu(rows: Tensor) -> tuple[Tensor, Tensor]:
    mean, var = torch.batch_norm_update_stats(rows.contiguous(), None, None, 0.0)  # four times as fast as var_mean
    return mean, var


def _of_any(rows: Tensor) -> tuple[Tensor, Tensor]:
    var, mean = torch.var_mean(rows, [d for d in range(rows.dim()) if d != 1], correction=0)
    return mean, var


def _pieces(x: Tensor, pieces: int) -> Tensor:
    of = _of_cpu if x.device.type == "cpu" else _of_any
    each = [torch.stack(of(rows)) for rows in x.to(_wide(x.dtype)).split(x.shape[0] // pieces)]
    return each[0][None] if len(each) == 1 else torch.stack(each)


def _joined(moments: Tensor) -> tuple[Tensor, Tensor]:
    means, variances = moments.unbind(1)
    mean = means.mean(0)
    return mean, variances.mean(0) + (means - mean).square_().mean(0)


def _pieces_meta(x: Tensor, pieces: int) -> Tensor:
    return x.new_empty((pieces, 2, x.shape[1]), dtype=_wide(x.dtype))


def _joined_meta(moments: Tensor) -> tuple[Tensor, Tensor]:
    return moments.new_empty(moments.shape[2:]), moments.new_empty(moments.shape[2:])


for _key in ("CPU", "CUDA"):
    _library.impl("piece_moments", _pieces, _key)
    _library.impl("joined_moments", _joined, _key)
_library.impl("piece_moments", _pieces_meta, "Meta")
_library.impl("joined_moments", _joined_meta, "Meta")

piece_moments = torch.ops.shardfx.piece_moments.default
joined_moments = torch.ops.shardfx.joined_moments.default
