"""A segment of an optimizer's step: the same elementwise calls for many parameters, as one call.

    calls     "aten.mul.out(c0, s0, out=c0)", "aten.lerp.Scalar_out(c2, c1, 0.1, out=c2)", "aten.sqrt.default(c3)", ...
    tensors   w, its gradient, its states; b, its gradient, its states; ...     (c0, c1, c2, c3 of each member)
    scalars   the rate, corrections of bias                                     (s0, s1, ... of all)

``r4`` is what call 4 gave. What a segment means is its calls, member by member (:func:`shardfx.ir.program.plain.plain`
writes them out). It runs them block by block, so that what one call wrote is in the processor's cache for the next;
members that lie one behind the other in memory, as stores lay them, are one. Needs torch alone.
"""

from __future__ import annotations

import ast
import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

Tensor = torch.Tensor
BLOCK = 2**18
"""Bytes of each column that are computed at a time by a processor with caches."""


@dataclass(frozen=True, slots=True)
class Ref:
    """A tensor of a segment's call: a column (``c``), a scalar (``s``), or what another call gave (``r``)."""

    kind: str
    index: int

    def __str__(self) -> str:
        return f"{self.kind}{self.index}"


@dataclass(frozen=True)
class Call:
    """A call of a segment, its tensors being :class:`Ref`."""

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def into(self) -> Ref | None:
        """What it writes into, where that is not memory of its own."""
        found = self.kwargs.get("out")
        return found if isinstance(found, Ref) else None


def home(calls: Sequence[Call], ref: Ref) -> Ref:
    """In whose memory a tensor lies: a column, a scalar, or a call that has memory of its own."""
    while ref.kind == "r" and (into := calls[ref.index].into) is not None:
        ref = into
    return ref


def call_text(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> str:
    """A call as it stands in a segment."""
    parts = [str(a) if isinstance(a, Ref) else repr(a) for a in args]
    parts += [f"{key}={str(a) if isinstance(a, Ref) else repr(a)}" for key, a in kwargs.items()]
    return f"{op}({', '.join(parts)})"


@functools.lru_cache(maxsize=4096)
def read_call(text: str) -> Call:
    """The call that a text says.

    Raises:
        ValueError: it says none.
    """
    try:
        found: Any = ast.parse(text, mode="eval").body
        packet, overload = ast.unparse(found.func).rsplit(".", 1)
        op = getattr(operator.attrgetter(packet)(torch.ops), overload)
        args = tuple(_argument(each) for each in found.args)
        return Call(op, args, {str(each.arg): _argument(each.value) for each in found.keywords})
    except (SyntaxError, AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"{text!r} is no call of a segment") from error


def _argument(each: ast.expr) -> Any:
    if isinstance(each, ast.Name):
        return Ref(each.id[0], int(each.id[1:]))
    return ast.literal_eval(each)


def misfit(calls: Sequence[str], gives: Sequence[int], members: int, tensors: Sequence[Any], scalars: int) -> str:
    """What is wrong with a segment; empty where nothing is.

    Members are computed side by side, so that what one writes is nobody else's: ``tensors`` that are written stand
    once.
    """
    if members < 1 or len(tensors) % members:
        return f"{len(tensors)} tensors are not those of {members} members"
    width, written, read = len(tensors) // members, set[int](), list[Call]()
    for number, text in enumerate(calls):
        try:
            call = read_call(text)
        except ValueError as error:
            return str(error)
        read.append(call)
        if torch.Tag.pointwise not in call.op.tags:
            return f"{call.op} computes on more than one element at a time"
        room = {"c": width, "s": scalars, "r": number}
        for ref in (*call.args, *call.kwargs.values()):
            if isinstance(ref, Ref) and not 0 <= ref.index < room.get(ref.kind, 0):
                return f"{text} takes {ref}, which is not there"
        into = home(read, call.into) if call.into is not None else Ref("r", number)
        if into.kind == "s":
            return f"{text} writes over what all members take"
        written |= {into.index} if into.kind == "c" else set()
    if not written.issuperset(gives):
        return "a segment gives what it does not write"
    rows = [tensors[i * width : (i + 1) * width] for i in range(members)]
    often = [row[i] for row in rows for i in range(width) if i in written]
    others = {each for row in rows for i, each in enumerate(row) if i not in written}
    if len(set(often)) != len(often) or others & set(often):
        return "two members of a segment write, or read, what one of them writes"
    return ""


def segment(
    calls: Sequence[str], gives: Sequence[int], members: int, tensors: Sequence[Tensor], scalars: Sequence[Tensor]
) -> list[Tensor]:
    """Compute ``calls`` for each member; of each member the columns ``gives``, which were written."""
    width = len(tensors) // members
    body = _body(tuple(calls), width, len(scalars))
    rows = [tensors[i * width : (i + 1) * width] for i in range(members)]
    for columns in _joined(sorted(rows, key=_begin)):
        first = columns[0]
        size = BLOCK // first.element_size() if first.device.type == "cpu" else first.numel()
        if first.numel() <= size or first.dim() != 1:
            body(*columns, *scalars)
        else:
            for block in zip(*(column.split(size) for column in columns), strict=True):
                body(*block, *scalars)
    return [row[column] for row in rows for column in gives]


@functools.lru_cache(maxsize=256)
def _body(calls: tuple[str, ...], columns: int, scalars: int) -> Callable[..., None]:
    """The calls as a function of columns and scalars."""
    takes = [*(f"c{i}" for i in range(columns)), *(f"s{i}" for i in range(scalars))]
    scope: dict[str, Any] = {}
    lines = [f"def body({', '.join(takes)}):"]
    for number, call in enumerate(map(read_call, calls)):
        scope[f"op{number}"] = call.op._op
        lines.append(f"    r{number} = {call_text(f'op{number}', call.args, call.kwargs)}")
    exec("\n".join(lines), scope)
    made: Callable[..., None] = scope["body"]
    return made


def _joined(rows: Sequence[Sequence[Tensor]]) -> Iterator[Sequence[Tensor]]:
    """The columns of members, flat; of those that lie one behind the other in all columns, together."""
    if isinstance(rows[0][0], FakeTensor):  # which lies nowhere, and is computed in one block
        largest = max(rows, key=lambda row: row[0].numel())
        total = min(sum(row[0].numel() for row in rows), BLOCK // rows[0][0].element_size())
        count = min(total, largest[0].numel())
        flat = all(column.is_contiguous() for column in largest)
        yield [column.reshape(-1)[:count] for column in largest] if flat else largest
        return
    run: list[Sequence[Tensor]] = []
    ends: list[int] = []
    for row in rows:
        shape = row[0].shape
        if any(column.shape != shape for column in row):
            raise ValueError(f"a member of a segment has columns of shapes {[tuple(c.shape) for c in row]}")
        if not all(column.is_contiguous() for column in row):
            yield row
            continue
        begins = [column.data_ptr() for column in row]
        if run and begins != ends:
            yield from _one(run)
            run = []
        run.append(row)
        count = shape.numel()
        ends = [begin + count * column.element_size() for begin, column in zip(begins, row, strict=True)]
    if run:
        yield from _one(run)


def _begin(row: Sequence[Tensor]) -> int:
    """Where a member lies."""
    return 0 if isinstance(row[0], FakeTensor) else row[0].data_ptr()


def _one(run: Sequence[Sequence[Tensor]]) -> Iterator[Sequence[Tensor]]:
    """Members that lie one behind the other as one, where that is one memory."""
    total = sum(row[0].numel() for row in run)
    if len(run) == 1 or any(_room(column) < total for column in run[0]):
        for row in run:
            yield [column.view(-1) for column in row]
    else:
        yield [column.as_strided((total,), (1,)) for column in run[0]]


def _room(tensor: Tensor) -> int:
    """How many elements stand in a tensor's memory from its first on."""
    return tensor.untyped_storage().nbytes() // tensor.element_size() - int(tensor.storage_offset())
