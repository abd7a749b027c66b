"""Attention of query rows of several stripes of the sequence, which share the work of a causal mask equally: stripe by
stripe, each with a place of its own.

    queries [b h s e], s of (16 4096{cp})      box ... 2 ranges of rows: 16 0 16, 4096 1024 1024
    stripe i                                   rows i * 1024 to (i + 1) * 1024, from place i * 4096 + 1024 on

Needs torch alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..computing.library import Ints
from .plain_attention import Given, wide


class Stripe(NamedTuple):
    """Contiguous query rows: which of the given ones, what a mask and ids have of them, and their box."""

    rows: slice
    mask: Given
    box: list[int]
    q_ids: Given


def ranges_of(shape: Sequence[int], box: Sequence[int]) -> list[list[int]]:
    """Of each dim the size, start and length of its sub-dims, from either form of a box; sub-dims that lie together
    are one."""
    if len(box) <= len(shape):
        return [[length, first, length] for first, length in zip(box or [0] * len(shape), shape, strict=True)]
    rest = iter(box)
    return [_merged([[next(rest) for _ in range(3)] for _ in range(next(rest))]) for _ in shape]


def _merged(sub_dims: list[list[int]]) -> list[int]:
    made = [sub_dims[-1]]
    for size, first, length in sub_dims[-2::-1]:
        inner = made[0]
        if inner[2] == inner[0]:
            made[0] = [each * inner[0] for each in (size, first, length)]
        else:
            made.insert(0, [size, first, length])
    return [number for each in made for number in each]


def places_of_stripes(shape: Ints, box: Ints) -> list[tuple[slice, list[int]]]:
    """The contiguous ranges of a rank's query rows, of scores ``[b h s t]`` at ``box``, each with its own box.

    One, where the keys are no contiguous range, or the rows are one.
    """
    ranges = ranges_of(shape, box) if len(box) > len(shape) else [[0, 0, 0]] * 4
    if len(ranges[2]) == 3 or len(ranges[3]) > 3:
        return [(slice(0, shape[2]), [*box])]
    *outer, (size, first, length) = zip(*[iter(ranges[2])] * 3, strict=True)
    made, starts = [], [0]
    for count, start, many in outer:
        starts = [place * count + start + i for place in starts for i in range(many)]
    for number, place in enumerate(starts):
        part = [*ranges[:2], [size, size * place + first, length], ranges[3]]
        plain = all(len(each) == 3 for each in part)
        numbers = [each[1] for each in part] if plain else [n for each in part for n in (len(each) // 3, *each)]
        made.append((slice(number * length, (number + 1) * length), numbers))
    return made


def stripes(q: Tensor, k: Tensor, box: Ints, mask: Given, q_ids: Given) -> list[Stripe]:
    """The stripes of queries ``[b h s e]`` at ``box``."""
    return [
        Stripe(
            rows,
            mask if mask is None or mask.shape[-2] == 1 else mask[..., rows, :],
            at,
            None if q_ids is None else q_ids[:, rows],
        )
        for rows, at in places_of_stripes((*q.shape[:3], k.shape[2]), box)
    ]


def forward_by_stripes(
    attention: Any,
    parts: Iterable[Stripe],
    made: tuple[Tensor, Tensor],
    qkv: Sequence[Tensor],
    how: Mapping[str, Any],
) -> tuple[Tensor, Tensor]:
    """The result and the logsumexp, written into ``made``; ``how`` are the other arguments of all rows."""
    q, k, v = qkv
    for rows, mask, box, q_ids in parts:
        results = attention(q[:, :, rows], k, v, mask, **{**how, "box": box, "q_ids": q_ids})
        for whole, each in zip(made, results, strict=True):
            whole[:, :, rows] = each
    return made


def backward_by_stripes(
    attention_backward: Any,
    parts: Iterable[Stripe],
    tensors: Sequence[Tensor],
    biases: tuple[Given, Given],
    how: Mapping[str, Any],
) -> tuple[Tensor, ...]:
    """The gradients of queries, keys, values, a mask, sinks (none) and a relative bias; of ``biases`` those that are
    wanted. All but those of queries are sums in the dtype of scores."""
    grad, q, k, v, *out = tensors
    grad_q, none, of_mask = torch.empty_like(q), q.new_empty(0), any(each is not None for each in biases)
    sums = [none if each is None else torch.zeros_like(each, dtype=wide(each.dtype)) for each in (k, v, *biases)]
    for rows, mask, box, q_ids in parts:
        own = (grad[:, :, rows], q[:, :, rows], k, v, *(each[:, :, rows] for each in out), mask)
        made = attention_backward(*own, of_mask=of_mask, **{**how, "box": box, "q_ids": q_ids})
        grad_q[:, :, rows] = made[0]
        of_rows = sums[2] if biases[0] is None or biases[0].shape[-2] == 1 else sums[2][..., rows, :]
        for total, each in zip((*sums[:2], of_rows, sums[3]), (*made[1:4], made[5]), strict=True):
            total += each
    of_k, of_v, grad_mask, grad_bias = (total.to(q.dtype) for total in sums)
    return grad_q, of_k, of_v, grad_mask, none, grad_bias
