"""Rows of tokens in the order of the experts that they are sent to: dispatch, products by expert, and combine.

Tokens ``[n]`` are ``d * e`` blocks of ``t``, experts ``p`` parts of ``g``. Each block packs its pairs of a token and an
expert, ``k`` a token, by part, each part with room for ``c`` of them, so that what is sent has a size of its own:

    slots[d e p c], places[d e t k], counts[d e p g] = shardfx.expert_slots(ids[d e t k], p * g, p, c)
    sources[(d p) r], places[(d p) m], ends[(d p) g] = shardfx.expert_rows(counts, c)          r = m = e * c
    x[b.. m.. h] = shardfx.take_rows(x[b.. n h], index[b.. m..])

``slots`` are pairs, by their numbers in a block: row ``c`` of a part is that of its ``c``-th pair by expert.
``sources`` sort what a part has got of ``e`` blocks by expert, ``places`` are the way back, ``ends`` where the rows of
each expert end. An index of no row, such as -1, is a row of zeros. Pairs that find no room have none: a plan counts
them, and a step in which there are some is run again with more room. Then

    y[(d p) r m] = shardfx.parts_mm(x[(d p) r a], w[(p g) a m], ends[(d p) g])
    w[(p g) a m] = shardfx.parts_outer(x[(d p) r a], y[(d p) r m], ends[(d p) g], p)

GShard: Lepikhin et al. 2020 (https://arxiv.org/abs/2006.16668); rows by expert without padding within a part:
MegaBlocks, Gale et al. 2022 (https://arxiv.org/abs/2211.15841). Needs torch alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..computing.grouped_product import grouped_mm, grouped_outer
from ..computing.library import define


def _like_slots(ids: Tensor, experts: int, parts: int, room: int) -> tuple[Tensor, ...]:
    blocks = ids.shape[:2]
    made = (*blocks, parts, room), ids.shape, (*blocks, parts, experts // parts)
    return tuple(ids.new_empty(shape, dtype=torch.int64) for shape in made)


@define(
    "expert_slots(Tensor ids, int experts, int parts, int room) -> (Tensor slots, Tensor places, Tensor counts)",
    shapes=_like_slots,
)
def expert_slots(ids: Tensor, experts: int, parts: int, room: int) -> tuple[Tensor, Tensor, Tensor]:
    """The pairs in each slot of a part, the slot of each pair, and the pairs of each expert, of each block."""
    blocks, each = ids.shape[:2], experts // parts
    flat = ids.flatten(2).flatten(0, 1)
    flat = torch.where((flat < 0) | (flat >= experts), experts, flat)
    known, order = torch.sort(flat, dim=1, stable=True)
    experts_ = torch.arange(experts + 1, device=ids.device).expand(len(flat), -1).contiguous()
    begins = torch.searchsorted(known.contiguous(), experts_)
    counts = begins.diff(dim=1).unflatten(1, (parts, each))
    of_part, place = begins[:, :-1:each], torch.arange(room, device=ids.device)
    held = counts.sum(2, keepdim=True)
    slots = of_part[:, :, None] + place
    if flat.shape[1]:
        slots = order.gather(1, slots.flatten(1).clamp(max=flat.shape[1] - 1)).view(slots.shape)
    slots = torch.where(place < held, slots, -1)
    part = torch.div(known, each, rounding_mode="floor").clamp(max=parts - 1)
    at = torch.arange(flat.shape[1], device=ids.device) - of_part.gather(1, part)
    at = torch.where((at < room) & (known < experts), part * room + at, -1)
    places = torch.empty_like(at).scatter_(1, order, at)
    return slots.unflatten(0, blocks), places.view(ids.shape), counts.unflatten(0, blocks)


def _like_rows(counts: Tensor, room: int) -> tuple[Tensor, ...]:
    d, e, p, g = counts.shape
    return tuple(counts.new_empty((d * p, size)) for size in (e * room, e * room, g))


@define("expert_rows(Tensor counts, int room) -> (Tensor sources, Tensor places, Tensor ends)", shapes=_like_rows)
def expert_rows(counts: Tensor, room: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of rows that parts got from blocks: which each row by expert is, where each goes back to, where experts end."""
    counts = counts.transpose(1, 2).flatten(0, 1)  # [(d p) e g]
    blocks, experts = counts.shape[1:]
    until = counts.cumsum(2).clamp(max=room)
    begins = torch.cat([until.new_zeros((*until.shape[:2], 1)), until[:, :, :-1]], 2)
    segments = (until - begins).transpose(1, 2).flatten(1).cumsum(1)  # of experts, and of blocks in each
    first = segments - (until - begins).transpose(1, 2).flatten(1)
    row = torch.arange(blocks * room, device=counts.device).expand(len(counts), -1).contiguous()
    segment = torch.searchsorted(segments, row, right=True)
    known = segment < segments.shape[1]
    segment = segment.clamp(max=segments.shape[1] - 1)
    block = segment % blocks
    within = begins.transpose(1, 2).flatten(1).gather(1, segment) + row - first.gather(1, segment)
    sources = torch.where(known, block * room + within, -1)
    slot = torch.arange(room, device=counts.device).expand(*until.shape[:2], -1).contiguous()
    expert = torch.searchsorted(until.contiguous(), slot, right=True)
    known, expert = expert < experts, expert.clamp(max=experts - 1)
    at = first.unflatten(1, (experts, blocks)).transpose(1, 2).gather(2, expert) + slot - begins.gather(2, expert)
    return sources, torch.where(known, at, -1).flatten(1), segments[:, blocks - 1 :: blocks].contiguous()


@define("take_rows(Tensor x, Tensor index) -> Tensor", shapes=lambda x, index: x.new_empty((*index.shape, x.shape[-1])))
def take_rows(x: Tensor, index: Tensor) -> Tensor:
    """The rows at an index, in each block."""
    blocks, (count, width) = x.shape[:-2], x.shape[-2:]
    flat, at = x.reshape(-1, width), index.reshape(x.shape[:-2].numel(), -1)
    begins = torch.arange(len(at), device=index.device)[:, None] * count
    if not count:
        return x.new_zeros((*index.shape, width))
    found = flat.index_select(0, (at.clamp(0, count - 1) + begins).flatten())
    assert index.shape[: len(blocks)] == blocks
    outside = (at < 0) | (at >= count)
    return found.masked_fill_(outside.reshape(-1, 1), 0).view(*index.shape, width)


@define(
    "parts_mm(Tensor x, Tensor w, Tensor ends) -> Tensor",
    shapes=lambda x, w, ends: x.new_empty((*x.shape[:2], w.shape[2])),
)
def parts_mm(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    """The product of each row with the matrix of its expert, in each part; zeros behind the last of them."""
    weights = w.unflatten(0, (-1, ends.shape[1])) if w.shape[0] else w.new_zeros((0, 0, *w.shape[1:]))
    made = [grouped_mm(rows, weights[i % len(weights)], ends[i]) for i, rows in enumerate(x)]
    return torch.stack(made) if made else x.new_zeros((*x.shape[:2], w.shape[2]))


@define(
    "parts_outer(Tensor x, Tensor y, Tensor ends, int parts) -> Tensor",
    shapes=lambda x, y, ends, parts: x.new_empty((parts * ends.shape[1], x.shape[2], y.shape[2])),
)
def parts_outer(x: Tensor, y: Tensor, ends: Tensor, parts: int) -> Tensor:
    """The sum of the products of two rows each, over the rows of each expert."""
    found: list[Tensor | None] = [None] * parts
    for i, (left, right) in enumerate(zip(x, y, strict=True)):
        made = grouped_outer(left, right, ends[i])
        before = found[i % parts]
        found[i % parts] = made if before is None else before + made
    none = x.new_zeros((ends.shape[1], x.shape[2], y.shape[2]))
    return torch.cat([none if each is None else each for each in found]) if found else none[:0]


class Overflow(RuntimeError):
    """Rows of experts without room, found before anything of a step was written."""


def check_room(lost: Tensor) -> Tensor:
    """The number of rows without room, which is 0.

    Raises:
        Overflow: there are some.
    """
    if lost.any():
        raise Overflow(f"{int(lost)} rows of experts have no room")
    return lost
