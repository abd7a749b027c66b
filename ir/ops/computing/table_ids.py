"""Ids of tables: in 32 bits, which are sent in half the bytes; and as numbers within parts of a table.

    %5 = aten.embedding(%w, %ids)        ->    %4 = shardfx.narrow_ids(%ids, 8000)
                                               %5 = aten.embedding(%w, %4)

An id beyond the table stays beyond it, whatever it was, so that its lookup is the same error. So of a table of at most
as many rows a lookup by narrow ids is that by the ids themselves, and its gradient is, too: ``wide_ids`` says so to the
proof (:mod:`shardfx.ir.rulebook.movement.table_lookups`).

A table ``[(p g) h]`` is also ``p`` parts of ``g`` rows. An id is a part and a number of a row within it, from 1; they
are sent to their parts (:mod:`shardfx.ir.ops.experts.dispatch`), in blocks ``d e`` with room for ``c``; 0 is no row:

    part[n..], numbers[n..] = shardfx.row_numbers(ids[n..], g, padding)
    rows[d p e c h] = shardfx.numbered_rows(table[(p g) h], numbers[d p e c])
    table[(p g) h] = shardfx.numbered_sums(rows[d p e c h], numbers[d p e c], g)

The padding's number is negative: its row is looked up, and has no gradient. Needs torch alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .library import define

aten = torch.ops.aten
LOOKUP, GRADIENT = aten.embedding.default, aten.embedding_dense_backward.default
LARGEST = 2**31 - 1


@define(
    "narrow_ids(Tensor ids, int size) -> Tensor",
    shapes=lambda ids, size: ids.new_empty(ids.shape, dtype=torch.int32),
)
def narrow_ids(ids: Tensor, size: int) -> Tensor:
    """Ids of a table of ``size`` rows in 32 bits; those beyond it as -1, or ``size``."""
    return ids.clamp(-1, size).to(torch.int32)


@define(
    "row_numbers(Tensor ids, int rows, int padding) -> (Tensor part, Tensor numbers)",
    shapes=lambda ids, rows, padding: (ids.new_empty(ids.shape), ids.new_empty(ids.shape, dtype=torch.int32)),
)
def row_numbers(ids: Tensor, rows: int, padding: int) -> tuple[Tensor, Tensor]:
    """The part that each id is in, by parts of ``rows``, and its number there; negative for the padding."""
    part = torch.div(ids, rows, rounding_mode="floor")
    numbers = (ids - part * rows + 1).to(torch.int32)
    return part, torch.where(ids == padding, -numbers, numbers) if padding >= 0 else numbers


def _places(numbers: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """The rows of the table that numbers are, and which of them are none."""
    first = torch.arange(numbers.shape[1], device=numbers.device)[:, None, None] * rows
    within = numbers.long().abs() - 1
    outside = (within < 0) | (within >= rows)
    return (within.masked_fill(outside, 0) + first).flatten(), outside


@define(
    "numbered_rows(Tensor table, Tensor numbers) -> Tensor",
    shapes=lambda table, numbers: table.new_empty((*numbers.shape, table.shape[1])),
)
def numbered_rows(table: Tensor, numbers: Tensor) -> Tensor:
    """The rows of each part that numbers are; zeros for no row."""
    rows = table.shape[0] // max(numbers.shape[1], 1)
    if not rows or not numbers.numel():
        return table.new_zeros((*numbers.shape, table.shape[1]))
    places, outside = _places(numbers, rows)
    found = table.index_select(0, places).view(*numbers.shape, table.shape[1])
    return found.masked_fill_(outside.unsqueeze(-1), 0)


@define(
    "numbered_sums(Tensor rows, Tensor numbers, int size) -> Tensor",
    shapes=lambda rows, numbers, size: rows.new_empty((numbers.shape[1] * size, rows.shape[-1])),
)
def numbered_sums(rows: Tensor, numbers: Tensor, size: int) -> Tensor:
    """The sum of the rows of each number, for all ``size`` rows of each part; the padding's are left out."""
    places, outside = _places(numbers.clamp(min=0), size)
    made = rows.new_zeros((numbers.shape[1] * size, rows.shape[-1]))
    kept = rows.masked_fill(outside.unsqueeze(-1), 0)
    return made.index_add_(0, places, kept.flatten(0, 3)) if len(made) else made
