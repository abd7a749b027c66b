"""What a rank gives that has nothing of a dim which its op shares: of a sum zeros, of a maximum what is lowest.

    y = shardfx.no_share(x, shapes, of, values)        one tensor for each shape, full of its value; ``of`` are dtypes

Most kernels refuse tensors without elements, and a map of three rows on four ranks leaves one of them none. Needs torch
alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_library = torch.library.Library("shardfx", "FRAGMENT")
_library.define("no_share(Tensor like, int[] shapes, int[] dims, ScalarType[] dtypes, float[] values) -> Tensor[]")


def _no_share(
    like: Tensor, shapes: Sequence[int], dims: Sequence[int], dtypes: Sequence[torch.dtype], values: Sequence[float]
) -> list[Tensor]:
    made, at = [], 0
    for count, dtype, value in zip(dims, dtypes, values, strict=True):  # torch 2.11 gives dtypes in a list as numbers
        made.append(torch.ops.aten.new_full.default(like, list(shapes[at : at + count]), value, dtype=dtype))
        at += count
    return made


_library.impl("no_share", _no_share, "CompositeExplicitAutograd")

no_share = torch.ops.shardfx.no_share.default
