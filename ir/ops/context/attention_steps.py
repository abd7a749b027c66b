"""Attention to one block of keys after another, whose results are joined by their logsumexps: the steps of a ring.

Rows are ``m`` stripes of ``p`` blocks of ``n`` rows, of which a rank has a block of each stripe: one stripe is a plain
sharding, several share the work of a causal mask equally. In step ``shift`` the queries of block ``i`` see the keys of
block ``i - shift``, as far as the mask lets them::

    out, lse = attention_step(q[b h m p n e], k[b g m p n e], v[b g m p n v], ..., out=out, logsumexp=lse, shift=1)
    of_q, of_k, of_v, _ = attention_step_backward(grad, q, k, v, out, lse, ..., shift=1)

The arguments are those of attention. Between steps ``out`` is in the dtype of scores, and a logsumexp is -inf where
nothing was seen yet. ``of_k`` is the gradient of the keys of block ``i - shift``, which :func:`rotate` sends home.

Ring Attention: Liu et al. 2023 (https://arxiv.org/abs/2310.01889); stripes: Brandon et al. 2023
(https://arxiv.org/abs/2311.09431).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..computing.library import Ints, define
from ..fused_attention import BACKWARD, DEFAULTS, DRAW, HOW, attention, attention_backward
from .attention_kernels import dense_rows
from .plain_attention import Given, gradient_of_sinks, wide, with_sinks
from .window_tiles import EVERY, QueryTile, backward_by_tiles, forward_by_tiles, none_seen, seen_pairs, tiles

STEP = "int shift=0, int[] place=[]"
"""``place`` says where a rank stands: the number of all blocks, the first of its queries, the first of its keys."""


@define("rotate(Tensor x, int dim, int shift, int[] place=[]) -> Tensor")
def rotate(x: Tensor, dim: int, shift: int, place: Ints = ()) -> Tensor:
    """The blocks of a dim at other places: block ``i`` of the result is block ``i - shift``. ``place``, on a rank: the
    number of all blocks, the first and the number of the result's, and the first of those that are given."""
    blocks, first, count, given = place or (x.shape[dim], 0, x.shape[dim], 0)
    rows = [(first + i - shift) % blocks - given for i in range(count)]
    return torch.cat([x.narrow(dim, row, 1) for row in rows], dim) if rows else x.narrow(dim, 0, 0).clone()


class SeenPart(NamedTuple):
    """A part of the pairs of a block of queries and one of keys: stripes of both, whether it is causal by itself, and
    the box of both where the mask is by place."""

    stripes: slice
    keys: slice
    causal: bool
    box: list[int]


def parts_of(
    shape: Ints, blocks: int, own: int, other: int, causal: bool, window: Ints, by_place: bool
) -> Iterator[SeenPart]:
    """The parts that are seen of queries ``[b h m n e]`` of block ``own`` and keys of block ``other``."""
    stripes, rows = shape[2:4]
    if not window and not by_place and (not causal or own == other):
        yield SeenPart(slice(0, stripes), slice(0, stripes), causal, [])
    elif not window and not by_place:
        for stripe in range(stripes):
            if end := stripe + (other < own):
                yield SeenPart(slice(stripe, stripe + 1), slice(0, end), False, [])
    else:
        for stripe in range(stripes):
            for seen in range(stripes):
                box = [0, 0, (stripe * blocks + own) * rows, (seen * blocks + other) * rows]
                if seen_pairs((1, 1, rows, rows), causal, window or [EVERY, EVERY], box):
                    yield SeenPart(slice(stripe, stripe + 1), slice(seen, seen + 1), causal, box)


def step_pairs(q: Tensor, causal: bool, window: Ints, shift: int, place: Ints = ()) -> int:
    """The pairs of a query and a key that a step computes, of one batch and head; where no place is given those of all
    blocks, and of one block alone the most that it may be."""
    stripes, count, rows = q.shape[2:5]
    blocks, first, _ = place or ((count, 0, 0) if count > 1 else (2 * shift + 1, 2 * shift, 0))
    found = 0
    for own in range(first, first + count):
        for part in parts_of((1, 1, stripes, rows), blocks, own, (own - shift) % blocks, causal, window, False):
            many, keys = (rows * (each.stop - each.start) for each in (part.stripes, part.keys))
            found += seen_pairs((1, 1, rows, rows), causal, window, part.box) if part.box else many * keys
    return found


Index = tuple[Any, ...]


def _blocks(
    q: Tensor,
    shift: int,
    place: Ints,
    mask: Given,
    p: float,
    causal: bool,
    window: Ints,
    ids: Sequence[Given],
    bias: Given,
) -> Iterator[tuple[Index, Index, SeenPart, list[Given]]]:
    """The parts of a step on one rank: where its queries stand among those given, and its keys; and the ids of both."""
    if mask is not None or p:
        raise ValueError("attention in steps takes no dense mask, and no dropout")
    blocks, first, given = place or (q.shape[3], 0, 0)
    every = slice(None)
    for i in range(q.shape[3]):
        other = (first + i - shift) % blocks
        shape = (*q.shape[:3], *q.shape[4:])
        by_place = ids[0] is not None or bias is not None
        for part in parts_of(shape, blocks, first + i, other, causal, window, by_place):
            own, keys = (every, every, part.stripes, i), (every, every, part.keys, other - given)
            pairs = zip(ids, (own, keys), strict=True)
            yield own, keys, part, [None if each is None else each[:, at[2], at[3]].flatten(1) for each, at in pairs]


def _like_step(q: Tensor, k: Tensor, v: Tensor, *how: Any, last: bool = False, **step: Any) -> tuple[Tensor, Tensor]:
    dtype = q.dtype if last else wide(q.dtype)
    return q.new_empty((*q.shape[:5], v.shape[5]), dtype=dtype), q.new_empty(q.shape[:5], dtype=wide(q.dtype))


def _like_step_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *how: Any, **step: Any) -> tuple[Tensor, ...]:
    *_, sinks, bias, _, _ = [*how, *BACKWARD[max(len(how) - 2, 0) :]]
    of_keys = (t.new_empty((*t.shape[:3], q.shape[3], *t.shape[4:])) for t in (k, v))
    more = (q.new_empty(0 if each is None else each.shape) for each in (sinks, bias))
    return q.new_empty(q.shape), *of_keys, *more


@define(
    f"attention_step(Tensor q, Tensor k, Tensor v, {HOW}, {DRAW}, *, Tensor? out=None, Tensor? logsumexp=None, {STEP}, "
    "bool last=False) -> (Tensor out, Tensor logsumexp)",
    shapes=_like_step,
)
def attention_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Given = None,
    *how: Any,
    out: Given = None,
    logsumexp: Given = None,
    shift: int = 0,
    place: Ints = (),
    last: bool = False,
) -> tuple[Tensor, Tensor]:
    """Attention to the keys of one block each, joined with that to earlier ones."""
    causal, scale, p, _, _, _, window, *ids, softcap, sinks, bias, flat = [*how, *DEFAULTS[len(how) :]]
    size, dtype = (*q.shape[:5], v.shape[5]), wide(q.dtype)
    total = q.new_zeros(size, dtype=dtype) if out is None else out.to(dtype, copy=True)
    rows = q.new_full(size[:5], -torch.inf, dtype=dtype) if logsumexp is None else logsumexp.clone()
    for own, keys, part, own_ids in _blocks(q, shift, place, mask, p, causal, window, ids, bias):
        if flat and none_seen(own_ids):
            continue
        x, y, z = dense_rows(*(each[at].flatten(2, 3) for each, at in ((q, own), (k, keys), (v, keys))))
        if part.box:
            of_part = tiles(x, y, causal, part.box, window, own_ids, bias=bias)
            found = forward_by_tiles(x, y, z, of_part, _tile(scale, softcap, flat))
        else:
            found = attention(x, y, z, None, part.causal, scale, softcap=softcap, flat=flat)
        _join(total[own], rows[own], *(each.unflatten(2, total[own].shape[2:4]) for each in found))
    if last:
        rows.masked_fill_(rows == -torch.inf, 0.0)
    if last and sinks is not None:
        total, rows = (x.unflatten(2, size[2:5]) for x in with_sinks(total.flatten(2, 4), rows.flatten(2, 4), sinks))
    return total.to(q.dtype) if last else total, rows


def _tile(scale: float | None, softcap: float, flat: bool) -> Any:
    def one(tile: QueryTile, *qkv: Tensor) -> tuple[Tensor, Tensor]:
        out, rows = attention(*qkv, tile.mask, False, scale, softcap=softcap, flat=flat)
        seen = tile.mask if tile.mask.dtype == torch.bool else tile.mask > -torch.inf
        none = ~seen.any(-1)
        return out, rows.masked_fill(none if none.dim() == 1 else none.expand_as(rows), -torch.inf)

    return one


def _join(total: Tensor, rows: Tensor, out: Tensor, logsumexp: Tensor) -> None:
    """Add attention to further keys to a result, in place."""
    both = torch.logaddexp(rows, logsumexp)
    weights = ((each - both).exp().masked_fill_(both == -torch.inf, 0.0)[..., None] for each in (rows, logsumexp))
    total.mul_(next(weights)).add_(out * next(weights))
    rows.copy_(both)


@define(
    f"attention_step_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor logsumexp, {HOW}, "
    f"bool of_mask=False, {DRAW}, int[] rows=[], *, {STEP}) "
    "-> (Tensor grad_q, Tensor grad_k, Tensor grad_v, Tensor grad_sinks, Tensor grad_bias)",
    shapes=_like_step_backward,
)
def attention_step_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    mask: Given = None,
    *how: Any,
    shift: int = 0,
    place: Ints = (),
) -> tuple[Tensor, ...]:
    """The part of the gradients that comes from the keys of one block, by the result and the logsumexp of all keys (the
    last one that of a relative bias, if asked for); and the whole gradient of the sinks."""
    causal, scale, of_bias, p, _, _, _, window, *ids, softcap, sinks, bias, flat, _ = [*how, *BACKWARD[len(how) + 1 :]]
    more = q.new_empty(0 if bias is None else bias.shape, dtype=wide(q.dtype)).zero_()
    grads = [each.new_zeros(each.shape, dtype=wide(q.dtype)) for each in _like_step_backward(grad, q, k, v)[:3]]
    for own, keys, part, own_ids in _blocks(q, shift, place, mask, p, causal, window, ids, bias):
        if flat and none_seen(own_ids):
            continue
        at = own, own, own, keys, keys
        given = (each[where].flatten(2, 3) for each, where in zip((grad, out, q, k, v), at, strict=True))
        of_rows, result, x, y, z = dense_rows(*given)
        results = of_rows, result, logsumexp[own].flatten(2, 3)

        def one(tile: QueryTile, *qkv: Tensor, results: Sequence[Tensor] = results) -> tuple[Tensor, ...]:
            grad, out, rows = (each[:, :, tile.rows] for each in results)
            given = grad, *qkv, out, rows, tile.mask
            made: tuple[Tensor, ...] = attention_backward(*given, False, scale, of_bias, softcap=softcap, flat=flat)
            return made

        if part.box:
            of_part = tiles(x, y, causal, part.box, window, own_ids, bias=bias)
            made = backward_by_tiles(x, y, z, of_part, one, bias=bias if of_bias else None)
            more += made[4] if of_bias else 0
        else:
            how = None, part.causal, scale
            made = attention_backward(results[0], x, y, z, *results[1:], *how, softcap=softcap, flat=flat)
        home = own, (*keys[:3], own[3]), (*keys[:3], own[3])
        for total, each, place_of in zip(grads, made, home, strict=False):
            total[place_of] += each.unflatten(2, total[place_of].shape[2:4])
    of_sinks = q.new_empty(0)
    if sinks is not None:
        of_sinks = gradient_of_sinks(grad.flatten(2, 4), out.flatten(2, 4), logsumexp.flatten(2, 4), sinks)
    return *(total.to(each.dtype) for total, each in zip(grads, (q, k, v), strict=False)), of_sinks, more.to(q.dtype)


ATTENTION = {attention, attention_backward, attention_step, attention_step_backward}
"""The ops of attention, whole and in steps."""
