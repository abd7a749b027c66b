"""Attention of queries that see the keys of a window, or with the same id, by tiles of query rows: no tensor has rows
times keys elements.

    query i sees keys i - left to i + right             rows a to b - 1: keys a - left to b - 1 + right

Each tile is a complete attention to the keys that any of its rows sees, with a mask of its own, by any kernel. That is
``rows * (left + right + tile)`` scores, and nothing is joined but gradients of keys, which add up. Needs torch alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..computing.library import Ints
from .causal_rows import box_places
from .plain_attention import Given, wide
from .striped_rows import places_of_stripes, ranges_of

SMALLEST, LARGEST, PAIRS = 128, 1024, 2**22
"""Numbers of rows of a tile: a quarter of the keys that a row sees, between these, and of no more pairs than this."""
EVERY = 2**40
"""More keys than there are."""


class QueryTile(NamedTuple):
    """Query rows, the keys that they see, the mask ``[.. rows, keys]`` of these, the box of both; where there is a
    relative bias, the places ``[rows, keys]`` of its numbers; and whether the rows are a rank's own."""

    rows: slice
    keys: slice
    mask: Tensor
    box: list[int]
    distances: Given = None
    is_own: bool = True


Parts = Iterable[QueryTile]
Forward = Callable[[QueryTile, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Attention of a tile: of its queries, keys and values the result and the logsumexp."""
Backward = Callable[[QueryTile, Tensor, Tensor, Tensor], tuple[Tensor, ...]]
"""Its gradients of queries, keys and values."""


def none_seen(ids: Sequence[Given]) -> bool:
    """Whether no query has the id of a key; False on a GPU, where the host would have to wait for the answer."""
    if ids[0] is None or ids[1] is None or ids[0].is_cuda:
        return False
    return not bool(torch.isin(ids[0].flatten(), ids[1].flatten()).any())


def reach(causal: bool, window: Ints) -> tuple[int, int]:
    """How many keys before and behind its own place a query sees."""
    left, right = window or (EVERY, EVERY)
    return left, min(right, 0) if causal else right


def tiles(
    q: Tensor,
    k: Tensor,
    causal: bool,
    box: Ints,
    window: Ints,
    ids: Sequence[Given],
    own: Ints = (),
    mask: Given = None,
    bias: Given = None,
) -> Iterator[QueryTile]:
    """The tiles of queries ``[b h s e]`` and keys ``[b g t e]`` at ``box``; one, where rows or keys are no contiguous
    range. ``ids`` are of queries ``[b s]`` and of keys ``[b t]``; a relative ``bias`` ``[h 2s-1]`` is added to masks.
    """
    (left, right), (rows, keys) = reach(causal, window), (q.shape[2], k.shape[2])
    places = [*box_places((*q.shape[:3], keys), box, q.device)]
    ranges = ranges_of((*q.shape[:3], keys), box)
    plain = all(len(each) == 3 for each in ranges[2:])
    span = min(max(left + right, 1), max(keys, 1))
    size = max(min(span // 4, LARGEST, PAIRS // span), SMALLEST) if plain else max(rows, 1)
    apart = ranges[2][1] - ranges[3][1]  # the local key at the place of the first local row
    for begin, end, keys_from, keys_to in _segments(ranges, rows, keys, own):
        for start in range(begin, end, size):
            stop = min(start + size, end)
            first = min(max(start + apart - left, keys_from), keys_to) if plain else 0
            last = max(min(stop + apart + right, keys_to), first) if plain else keys
            apart_by = places[3][first:last] - places[2][start:stop, None]
            seen = (apart_by >= -left) & (apart_by <= right)
            if ids[0] is not None and ids[1] is not None:
                seen = seen & (ids[0][:, None, start:stop, None] == ids[1][:, None, None, first:last])
            if mask is not None:
                of_tile = part_of(mask, slice(start, stop), slice(first, last))
                seen = of_tile & seen if mask.dtype == torch.bool else of_tile.masked_fill(~seen, -torch.inf)
            distances = None
            if bias is not None:  # rows behind the last one, which pad a sequence, are at no place of it
                distances = (apart_by + bias.shape[1] // 2).clamp_(0, bias.shape[1] - 1)
                of_bias = bias[None, :, distances]
                seen = of_bias.masked_fill(~seen, -torch.inf) if seen.dtype == torch.bool else of_bias + seen
            part = [[*each] for each in ranges]
            if plain:
                part[2][1:], part[3][1:] = [part[2][1] + start, stop - start], [part[3][1] + first, last - first]
            numbers = [number for each in part for number in (len(each) // 3, *each)]
            is_own = not own or 0 <= start + ranges[2][1] - own[0] < own[1]
            yield QueryTile(slice(start, stop), slice(first, last), seen, numbers, distances, is_own)


def _segments(ranges: Sequence[Sequence[int]], rows: int, keys: int, own: Ints) -> list[tuple[int, int, int, int]]:
    """Ranges of local queries, each with the range of local keys that matters: a rank's own keys, for queries that are
    not its own."""
    if not own:
        return [(0, rows, 0, keys)]
    (first, last), (keys_from, keys_to) = (
        (own[0] - start, own[0] + own[1] - start) for start in (ranges[2][1], ranges[3][1])
    )
    return [(0, first, keys_from, keys_to), (first, last, 0, keys), (last, rows, keys_from, keys_to)]


def forward_by_tiles(q: Tensor, k: Tensor, v: Tensor, parts: Parts, forward: Forward) -> tuple[Tensor, Tensor]:
    """The result ``[b h s v]``, laid out as the queries, and the logsumexp ``[b h s]``."""
    out = torch.empty_like(q) if q.shape[-1] == v.shape[-1] else q.new_empty((*q.shape[:3], v.shape[-1]))
    logsumexp = q.new_empty(q.shape[:3], dtype=wide(q.dtype))
    for tile in parts:
        own, seen = tile.rows, tile.keys
        out[:, :, own], logsumexp[:, :, own] = forward(tile, q[:, :, own], k[:, :, seen], v[:, :, seen])
    return out, logsumexp


def own_rows(tensors: Sequence[Tensor], box: Ints, own: Ints) -> list[Tensor]:
    """Of queries, keys and values at ``box`` those at the places ``[first, number]``: all, where these are empty."""
    if not own:
        return [*tensors]
    ranges = ranges_of((*tensors[0].shape[:3], tensors[1].shape[2]), box)
    starts = ranges[2][1], ranges[3][1], ranges[3][1]
    return [each.narrow(2, own[0] - start, own[1]) for each, start in zip(tensors, starts, strict=True)]


def part_of(mask: Tensor, rows: slice, keys: slice) -> Tensor:
    """Of a mask ``[.. s t]`` some rows and keys; a dim of one broadcasts."""
    return mask[..., rows if mask.shape[-2] > 1 else slice(None), keys if mask.shape[-1] > 1 else slice(None)]


def backward_by_tiles(
    q: Tensor, k: Tensor, v: Tensor, parts: Parts, backward: Backward, mask: Given = None, bias: Given = None
) -> tuple[Tensor, ...]:
    """The gradients of queries, keys, values, a mask and a relative bias; all but those of queries and of the mask are
    summed in the dtype of scores."""
    grad_q, grad_mask = torch.empty_like(q), q.new_empty(0) if mask is None else torch.zeros_like(mask)
    grad_bias = q.new_empty(0) if bias is None else torch.zeros_like(bias, dtype=wide(bias.dtype))
    sums = [torch.zeros_like(each, dtype=wide(each.dtype)) for each in (k, v)]
    for tile in parts:
        own, seen = tile.rows, tile.keys
        grad_q[:, :, own], *grads = backward(tile, q[:, :, own], k[:, :, seen], v[:, :, seen])
        if mask is not None:
            total = part_of(grad_mask, own, seen)
            total += grads[2].sum_to_size(*total.shape)
        if bias is not None and tile.is_own and tile.distances is not None:
            grad = grads[2].to(grad_bias.dtype).sum(0)
            grad_bias.index_add_(1, tile.distances.flatten(), grad.flatten(1))
        for total, grad in zip(sums, grads[:2], strict=True):
            total[:, :, seen] += grad
    of_keys = (total.to(each.dtype) for total, each in zip(sums, (k, v), strict=True))
    return grad_q, *of_keys, grad_mask, grad_bias if bias is None else grad_bias.to(bias.dtype)


def seen_pairs(shape: Sequence[int], causal: bool, window: Ints, box: Ints, own: Ints = ()) -> int:
    """The number of pairs of a query and a key that it sees, of scores ``[b h s t]`` at ``box``; all, where rows or
    keys are no contiguous range."""
    parts = places_of_stripes(shape, box)
    if len(parts) > 1:
        sizes = ((*shape[:2], part.stop - part.start, shape[3]) for part, _ in parts)
        return sum(seen_pairs(size, causal, window, at) for size, (_, at) in zip(sizes, parts, strict=True))
    ranges, (left, right), (rows, keys) = ranges_of(shape, box), reach(causal, window), shape[2:]
    if not all(len(each) == 3 for each in ranges[2:]):
        return rows * keys
    apart, found = ranges[2][1] - ranges[3][1], 0
    for begin, end, first, last in _segments(ranges, rows, keys, own):
        number, size, ahead = end - begin, last - first, apart + begin - first
        found += max(_up_to(ahead + right + 1, number, size) - _up_to(ahead - left, number, size), 0)
    return found


def _up_to(end: int, rows: int, keys: int) -> int:
    """The pairs of a query ``i`` and a key before ``i + end``."""
    none, all_of = (min(max(each, 0), rows) for each in (-end, keys - end))
    some = all_of - none
    return some * end + (none + all_of - 1) * some // 2 + (rows - all_of) * keys
