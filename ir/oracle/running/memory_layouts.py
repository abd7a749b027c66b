"""The same numbers, laid out otherwise in memory: as pieces of a program are that were permuted, sliced, expanded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from shardfx.ir.oracle.soundness import Held

Layout = Callable[[Tensor], Tensor]


def permuted(t: Tensor) -> Tensor:
    """The dims stand in memory the other way round."""
    turned = tuple(reversed(range(t.dim())))
    return t.permute(turned).clone(memory_format=torch.contiguous_format).permute(turned)


def sliced(t: Tensor) -> Tensor:
    """Every other element of the last dim of a larger tensor, from the second on."""
    if not t.dim():
        return t
    wide = t.new_zeros((*t.shape[:-1], 2 * t.shape[-1] + 1))
    held = wide[..., 1::2]
    held.copy_(t)
    return held


def expanded(t: Tensor) -> Tensor:
    """Dims along which all is equal take no memory."""
    for d in range(t.dim()):
        first = t.narrow(d, 0, 1) if t.shape[d] else t
        if t.shape[d] > 1 and torch.equal(first.expand_as(t), t):
            t = first.expand_as(t)
    return t


LAYOUTS: Mapping[str, Layout] = {"permuted": permuted, "sliced": sliced, "expanded": expanded}
"""The layouts by name."""


def laid_otherwise(held: Held) -> Iterator[tuple[str, Held]]:
    """What ranks hold in each layout in which it does not lie already."""
    tried = [_strides(held)]
    for name, layout in LAYOUTS.items():
        laid = {rank: [layout(t) for t in tensors] for rank, tensors in held.items()}
        if _strides(laid) not in tried:
            tried.append(_strides(laid))
            yield name, laid


def _strides(held: Held) -> list[tuple[int, ...]]:
    laid = (zip(t.stride(), t.shape, strict=True) for tensors in held.values() for t in tensors)
    return [tuple(step for step, size in dims if size > 1) for dims in laid]
