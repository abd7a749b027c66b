"""A step of the rows of a table that lookups name: the calls of an optimizer's step, on these rows and no others.

    calls     "aten.embedding_dense_backward.default(s0, s1, 8000, -1, False)"       r0, the gradient
              "aten.embedding_dense_backward.default(s2, s1, 8000, -1, False)"       r1, how often each row is named
              "aten.gt.Scalar(r1, 0)", "aten.mul.Tensor(r0, s3)", "aten.sub.Tensor(c0, r3)",
              "aten.where.self(r2, r4, c0)", "aten.copy_.default(c0, r5)"
    tensors   the table, its states (c0, c1, ...)
    others    gradients of rows, ids, numbers (s0, s1, ...)

As a segment (:mod:`.segment`), it means its calls. What is written is chosen by a mask that is false in all rows that
no index names; so the calls are run on the rows that are named, which are written where they lie. Needs torch alone.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from .segment import COPY, SegmentCall, SegmentRef, read_call

aten = torch.ops.aten
DENSE, CHOOSE, ABOVE, PLUS = (
    aten.embedding_dense_backward.default,
    aten.where.self,
    aten.gt.Scalar,
    aten.add.Tensor,
)
OF_COLUMNS = (aten.mean.dim, aten.sum.dim_IntList)
"""Ops that reduce columns, as a row-wise Adagrad does."""


def step_rows(
    calls: Sequence[str], gives: Sequence[int], members: int, tensors: Sequence[Tensor], others: Sequence[Tensor]
) -> list[Tensor]:
    """Run ``calls`` on the rows that are named, and write these; returns the columns ``gives``.

    Raises:
        ValueError: the calls do not keep other rows, or compute on more than one row at a time.
    """
    read, wrong = _checked(tuple(calls), tuple(gives), members, len(tensors), len(others))
    if wrong:
        raise ValueError(wrong)
    named = dict.fromkeys(call.args[1].index for call in read if call.op is DENSE)
    rows, places = _named_rows({number: others[number] for number in named}, tensors[0].shape[0])
    results: list[Any] = []

    def value(arg: Any) -> Any:
        if not isinstance(arg, SegmentRef):
            return arg
        if arg.kind == "c":
            return tensors[arg.index].index_select(0, rows)
        return (others if arg.kind == "s" else results)[arg.index]

    written: dict[int, Tensor] = {}
    for call in read:
        if call.op is COPY:
            written[call.args[0].index] = value(call.args[1])
            results.append(None)
        elif call.op is DENSE:
            results.append(_summed(call, value(call.args[0]), value(call.args[1]), places, rows))
        else:
            if any(ref.kind == "s" and others[ref.index].dim() for ref in call.refs):
                raise ValueError(f"{call.op} takes something that has no rows of the table")
            args = [value(arg) for arg in call.args]
            results.append(call.op(*args, **{name: value(arg) for name, arg in call.kwargs.items()}))
    for number, made in written.items():
        tensors[number].index_copy_(0, rows, made)
    return [tensors[number] for number in gives]


def _named_rows(indices: Mapping[int, Tensor], size: int) -> tuple[Tensor, dict[int, Tensor]]:
    """The rows that some indices name, each once, and the place of each index among them."""
    flat = torch.cat([each.reshape(-1) for each in indices.values()])
    if isinstance(flat, FakeTensor):  # as many as there may be
        rows, inverse = torch.empty_like(flat[:size], dtype=torch.int64), torch.empty_like(flat, dtype=torch.int64)
    else:
        rows, inverse = torch.unique(flat.long(), return_inverse=True)
    parts = inverse.split([each.numel() for each in indices.values()])
    return rows, {number: part.view(each.shape) for (number, each), part in zip(indices.items(), parts, strict=True)}


def _summed(call: SegmentCall, values: Tensor, index: Tensor, places: Mapping[int, Tensor], rows: Tensor) -> Tensor:
    """A dense gradient's rows that are named."""
    padding = call.args[3]
    if padding >= 0:
        values = values.masked_fill((index == padding).unsqueeze(-1), 0)
    made: Tensor = DENSE(values, places[call.args[1].index], rows.shape[0], -1, False)
    return made


def wrong_rows(calls: Sequence[str], gives: Sequence[int], members: int, tensors: int, others: int) -> str:
    """What is wrong with the arguments of a step of rows; empty if nothing is."""
    return _checked(tuple(calls), tuple(gives), members, tensors, others)[1]


@functools.lru_cache(maxsize=1024)
def _checked(
    calls: tuple[str, ...], gives: tuple[int, ...], members: int, tensors: int, others: int
) -> tuple[tuple[SegmentCall, ...], str]:
    """The calls, and what is wrong with them."""
    try:
        read = tuple(map(read_call, calls))
    except ValueError as error:
        return (), str(error)
    wrong = "" if members == 1 else f"{members} tables are stepped by one call"
    written = set[int]()
    for number, call in enumerate(read):
        room = {"c": tensors, "s": others, "r": number}
        if any(not 0 <= ref.index < room.get(ref.kind, 0) for ref in call.refs):
            wrong = f"{calls[number]} takes what is not there"
        elif call.op is COPY:
            column, source = call.args
            chosen = read[source.index] if isinstance(source, SegmentRef) and source.kind == "r" else call
            if chosen.op is not CHOOSE or column.kind != "c" or chosen.args[2] != column or column.index in written:
                wrong = f"{calls[number]} writes rows that no index names"
            elif not _is_mask(read, chosen.args[0]):
                wrong = f"{calls[number]} is chosen by what is no mask of rows that an index names"
            written.add(column.index)
        elif call.op is DENSE:
            fits = len(call.args) == 5 and call.args[1].kind == "s" and call.args[0].kind != "c" and not call.args[4]
            wrong = wrong if fits else f"{calls[number]} is no sum of rows by an index"
        elif not is_by_rows(call.op, call.args) or call.op._schema.is_mutable:
            wrong = f"{call.op} computes on more than one row at a time"
    return read, wrong or ("" if written == set(gives) else "a step of rows gives what it does not write")


def is_by_rows(op: Any, args: Sequence[Any]) -> bool:
    """Whether a call computes each row of its result of the same rows: it is elementwise, or reduces the columns."""
    return torch.Tag.pointwise in getattr(op, "tags", ()) or (op in OF_COLUMNS and list(args[1]) == [1])


def _is_mask(calls: Sequence[SegmentCall], ref: Any) -> bool:
    """Whether a value is false in each row that no index names."""
    call = calls[ref.index] if isinstance(ref, SegmentRef) and ref.kind == "r" else None
    return call is not None and call.op is ABOVE and call.args[1] == 0 and _is_count(calls, call.args[0])


def _is_count(calls: Sequence[SegmentCall], ref: Any) -> bool:
    """Whether a value is zero in each row that no index names."""
    call = calls[ref.index] if isinstance(ref, SegmentRef) and ref.kind == "r" else None
    if call is None or call.op is not PLUS:
        return call is not None and call.op is DENSE
    return not call.kwargs and all(_is_count(calls, each) for each in call.args)
