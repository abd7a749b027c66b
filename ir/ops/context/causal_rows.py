"""Causal attention of a rank's own rows, which see the keys before them and, of their own keys, those up to each.

Without a mask these are two calls of a kernel, whose results are joined by their logsumexps (Ring Attention,
https://arxiv.org/abs/2310.01889): no tensor has rows times keys elements. Else it is a mask of the keys that are seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from ..computing.library import places

Forward = Callable[[bool, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Attention, causal or not, to keys and values: the result and the logsumexp."""
Backward = Callable[[bool, Tensor, Tensor], tuple[Tensor, ...]]
"""Its gradients of queries, keys and values, by the result and the logsumexp of all keys."""


def forward_from(first: int, q: Tensor, k: Tensor, v: Tensor, forward: Forward) -> tuple[Tensor, Tensor]:
    """Attention of queries ``[b h s e]``, from row ``first`` on, to all keys ``[b g t e]``."""
    if first >= k.shape[2]:
        return forward(False, k, v)
    own = slice(first, first + q.shape[2])
    out, logsumexp = forward(True, k[:, :, own], v[:, :, own])
    if not first:
        return out, logsumexp
    past, of_past = forward(False, k[:, :, :first], v[:, :, :first])
    total = torch.logaddexp(logsumexp, of_past)
    shares = ((each - total).exp()[..., None] for each in (logsumexp, of_past))
    joined = sum(share * part for share, part in zip(shares, (out, past), strict=True))
    return torch.empty_like(out).copy_(joined), total  # type: ignore[arg-type]


def backward_from(first: int, q: Tensor, k: Tensor, v: Tensor, backward: Backward) -> tuple[Tensor, ...]:
    """The gradients of :func:`forward_from`."""
    if first >= k.shape[2]:
        return backward(False, k, v)[:4]
    end = min(first + q.shape[2], k.shape[2])
    grad_q, *own = backward(True, k[:, :, first:end], v[:, :, first:end])[:3]
    grads = [torch.zeros_like(each) for each in (k, v)]
    for grad, part in zip(grads, own, strict=True):
        grad[:, :, first:end] = part
    if first:
        of_past, *past = backward(False, k[:, :, :first], v[:, :, :first])[:3]
        grad_q = grad_q + of_past
        for grad, part in zip(grads, past, strict=True):
            grad[:, :, :first] = part
    return grad_q, *grads, grad_q.new_empty(0)


def box_places(shape: Sequence[int], box: Sequence[int], device: torch.device) -> Iterator[Tensor]:
    """Where each dim's elements stand globally. ``box`` has of each dim the first; or, where there are several
    contiguous ranges, how many sub-dims it has, and of each the size, start and length of the local shard."""
    if len(box) <= len(shape):
        box = [n for first, length in zip(box or [0] * 4, shape, strict=True) for n in (1, length, first, length)]
    rest = iter(box)
    for size in shape:
        yield places([next(rest) for _ in range(3 * next(rest))], size, device)


def seen_mask(q: Tensor, k: Tensor, mask: Tensor | None, box: Sequence[int]) -> Tensor:
    """The mask by which a rank's queries see the keys up to theirs, of those that a ``mask`` leaves."""
    _, _, rows, keys = box_places((*q.shape[:3], k.shape[2]), box, q.device)
    seen = keys <= rows[:, None]
    if mask is None or mask.dtype == torch.bool:
        return seen if mask is None else mask & seen
    return mask.masked_fill(~seen, -torch.inf)
