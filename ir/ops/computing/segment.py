"""A segment of an optimizer's step: the same elementwise calls for many parameters, as one call.

    calls     "aten.mul.out(c0, s0, out=c0)", "aten.lerp.Scalar_out(c2, c1, 0.1, out=c2)", "aten.sqrt.default(c3)", ...
    tensors   w, its gradient, its states; b, its gradient, its states; ...     (c0, c1, c2, c3 of each member)
    scalars   the rate, corrections of bias                                     (s0, s1, ... of all)

    fused     "aten._fused_adamw_.tensor_lr([c0], [c1], [c2], [c3], [], [s1], lr=s0, beta1=0.9, ...)"

``r4`` is what call 4 gave. What a segment means is its calls, member by member (:func:`shardfx.ir.program.plain.plain`
writes them out). Where torch has a fused kernel that computes them (:mod:`.fused_update`), that is run, for all members
at once. Else it runs them block by block, so that what one call wrote is in the processor's cache for the next; members
that lie one behind the other in memory, as stores lay them, are one. Needs torch alone.
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
from torch.autograd.graph import increment_version

Tensor = torch.Tensor
Columns = Sequence[Tensor]
Rows = Sequence[Columns]
aten = torch.ops.aten
BLOCK = 2**18
"""The block size of each column in bytes on a processor with caches."""
CAST, COPY = aten._to_copy.default, aten.copy_.default
"""Elementwise, though torch does not tag them so; the second writes into its first operand."""
LARGE = 2**22
"""The minimum bytes of each column per launch of a fused kernel, if some operands are computed for it."""


@dataclass(frozen=True, slots=True)
class SegmentRef:
    """A tensor of a segment's call: a column (``c``), a scalar (``s``), or the result of another call (``r``)."""

    kind: str
    index: int

    def __str__(self) -> str:
        return f"{self.kind}{self.index}"


@dataclass(frozen=True)
class SegmentCall:
    """A call of a segment, with :class:`SegmentRef` for its tensors."""

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def into(self) -> SegmentRef | None:
        """The destination of its result, if not memory of its own."""
        found = self.args[0] if self.op is COPY else self.kwargs.get("out")
        return found if isinstance(found, SegmentRef) else None

    @property
    def refs(self) -> list[SegmentRef]:
        """The tensors that it uses, except lists of them."""
        return [arg for arg in (*self.args, *self.kwargs.values()) if isinstance(arg, SegmentRef)]


def home(calls: Sequence[SegmentCall], ref: SegmentRef) -> SegmentRef:
    """The owner of a tensor's memory: a column, a scalar, or a call that allocates its result."""
    while ref.kind == "r" and (into := calls[ref.index].into) is not None:
        ref = into
    return ref


def call_text(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> str:
    """The text of a call in a segment."""
    parts = [_text(arg) for arg in args]
    parts += [f"{key}={_text(arg)}" for key, arg in kwargs.items()]
    return f"{op}({', '.join(parts)})"


def _text(arg: Any) -> str:
    if isinstance(arg, (list, tuple)):
        return f"[{', '.join(map(_text, arg))}]"
    return str(arg) if isinstance(arg, SegmentRef) else repr(arg)


@functools.lru_cache(maxsize=4096)
def read_call(text: str) -> SegmentCall:
    """Parse the text of a call.

    Raises:
        ValueError: it says none.
    """
    try:
        found: Any = ast.parse(text, mode="eval").body
        packet, overload = ast.unparse(found.func).rsplit(".", 1)
        op = getattr(operator.attrgetter(packet)(torch.ops), overload)
        args = tuple(_argument(each) for each in found.args)
        return SegmentCall(op, args, {str(each.arg): _argument(each.value) for each in found.keywords})
    except (SyntaxError, AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"{text!r} is no call of a segment") from error


def _argument(each: ast.expr) -> Any:
    if isinstance(each, ast.List):
        return [_argument(one) for one in each.elts]
    if isinstance(each, ast.Name):
        return SegmentRef(each.id[0], int(each.id[1:]))
    if isinstance(each, ast.Attribute):
        return getattr(torch, each.attr)  # a dtype
    return ast.literal_eval(each)


def misfit(calls: Sequence[str], gives: Sequence[int], members: int, tensors: Sequence[Any], scalars: int) -> str:
    """An error text for an invalid segment; empty if it is valid.

    Members are computed side by side, so a member's written tensors belong to no other: written ``tensors`` occur
    once.
    """
    if members < 1 or len(tensors) % members:
        return f"{len(tensors)} tensors are not those of {members} members"
    width, written, read = len(tensors) // members, set[int](), list[SegmentCall]()
    for number, text in enumerate(calls):
        try:
            call = read_call(text)
        except ValueError as error:
            return str(error)
        read.append(call)
        if torch.Tag.pointwise not in call.op.tags and call.op not in (CAST, COPY):
            return f"{call.op} computes on more than one element at a time"
        room = {"c": width, "s": scalars, "r": number}
        for ref in (*call.args, *call.kwargs.values()):
            if isinstance(ref, SegmentRef) and not 0 <= ref.index < room.get(ref.kind, 0):
                return f"{text} takes {ref}, which is not there"
        into = home(read, call.into) if call.into is not None else SegmentRef("r", number)
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
    calls: Sequence[str],
    gives: Sequence[int],
    members: int,
    tensors: Columns,
    scalars: Columns,
    fused: Sequence[str] = (),
) -> list[Tensor]:
    """Run ``calls`` for each member; returns of each member the written columns ``gives``.

    ``fused``: equivalent calls, the last of which is a fused kernel, with lists of members.
    """
    width = len(tensors) // members
    rows = [tensors[i * width : (i + 1) * width] for i in range(members)]
    left = _run_fused(fused, gives, rows, scalars) if fused else rows
    if left:
        body = _body(tuple(calls), width, len(scalars))(*scalars)
        for columns in _joined(left, BLOCK):
            size = BLOCK if columns[0].device.type == "cpu" else columns[0].nbytes
            for block in _blocks(columns, size):
                body(*block)
    return [row[column] for row in rows for column in gives]


def written_columns(args: Sequence[Any]) -> list[Any]:
    """The tensors among a segment's arguments that it writes."""
    _, gives, members, tensors, *_ = args
    width = len(tensors) // members
    return [tensors[member * width + column] for member in range(members) for column in gives]


def _blocks(columns: Columns, nbytes: int) -> Iterator[Columns]:
    """Columns in blocks of ``nbytes``, if they are flat."""
    first = columns[0]
    if first.nbytes <= nbytes or first.dim() != 1:
        return iter([columns])
    return zip(*(column.split(nbytes // first.element_size()) for column in columns), strict=True)


@functools.lru_cache(maxsize=256)
def _body(calls: tuple[str, ...], columns: int, scalars: int, wanted: tuple[int, ...] = ()) -> Callable[..., Any]:
    """The calls as a function of scalars, which returns a function of columns to the results of ``wanted`` calls."""
    scope: dict[str, Any] = {"torch": torch}
    shared, own = list[str](), list[str]()
    read = list(map(read_call, calls))
    among = common(read)
    for number, call in enumerate(read):
        scope[f"op{number}"] = call.op._op
        lines = shared if number in among else own
        lines.append(f"r{number} = {call_text(f'op{number}', call.args, call.kwargs)}")
    code = [
        f"def body({', '.join(f's{i}' for i in range(scalars))}):",
        *(f"    {line}" for line in shared),
        f"    def of({', '.join(f'c{i}' for i in range(columns))}):",
        *(f"        {line}" for line in own),
        f"        return [{', '.join(f'r{number}' for number in wanted)}]",
        "    return of",
    ]
    exec("\n".join(code), scope)
    made: Callable[..., Any] = scope["body"]
    return made


def common(calls: Sequence[SegmentCall]) -> set[int]:
    """The calls that use no column: they are common to all members."""
    found = set[int]()
    for number, call in enumerate(calls):
        if all(ref.kind == "s" or (ref.kind == "r" and ref.index in found) for ref in call.refs):
            found.add(number)
    return found


def _run_fused(fused: Sequence[str], gives: Sequence[int], rows: Rows, scalars: Columns) -> Rows:
    """Run a fused kernel on the members that it supports; returns the others.

    Temporaries for the kernel exist for one member at a time, or for as many as the largest's memory allows.
    """
    *before, kernel = map(read_call, fused)
    taken = [_as_taken(kernel, row, gives) for row in rows]
    left = [row for row, found in zip(rows, taken, strict=True) if not found]
    fitting = [found for found in taken if found]
    if not fitting:
        return left
    if not before:
        _launch(kernel, gives, fitting, [[] for _ in fitting], scalars)
        return left
    wanted = tuple(range(len(before)))
    body = _body(tuple(fused[:-1]), len(rows[0]), len(scalars), wanted)(*scalars)
    largest = max(row[0].nbytes for row in fitting)
    for columns in _joined(fitting, largest):
        for block in _blocks(columns, max(largest, LARGE)):
            _launch(kernel, gives, [block], [body(*block)], scalars)
    return left


def _as_taken(kernel: SegmentCall, row: Columns, gives: Sequence[int]) -> Columns:
    """The columns of a member as fused kernels need them: of one dtype and memory order; empty if written ones are
    not."""
    like = row[gives[0]]
    if not like.is_floating_point() or any(column.dtype != like.dtype for column in row):
        return ()
    if like.is_cuda and like.dtype is torch.float64:  # there kernels take the learning rate in float32
        return ()
    if not like.is_cuda and like.itemsize == 2 and kernel.op is aten._fused_sgd_.tensor_lr:  # wrong before torch 2.15
        return ()
    if not like.is_contiguous() and not aten.is_non_overlapping_and_dense(like):
        return ()
    if any(row[place].stride() != like.stride() for place in gives):
        return ()
    return [c if c.stride() == like.stride() else torch.empty_like(like).copy_(c) for c in row]


def _launch(kernel: SegmentCall, gives: Sequence[int], rows: Rows, results: Rows, scalars: Columns) -> None:
    """Run a kernel on members, with computed ``results``."""
    if isinstance(rows[0][0], FakeTensor):  # for which some kernels are not known: they allocate nothing
        torch._foreach_zero_([row[place] for row in rows for place in gives])
        return
    on_cuda = rows[0][0].is_cuda

    def scalar(ref: SegmentRef) -> Tensor:
        return scalars[ref.index].float() if on_cuda else scalars[ref.index]

    def put(arg: Any) -> Any:
        if not isinstance(arg, list):
            return scalar(arg) if isinstance(arg, SegmentRef) else arg
        found = list[Tensor]()
        for ref in arg:
            if ref.kind == "s":
                found += [scalar(ref)] * len(rows)
            else:
                found += [each[ref.index] for each in (rows if ref.kind == "c" else results)]
        return found

    kernel.op._op(*map(put, kernel.args), **{key: put(arg) for key, arg in kernel.kwargs.items()})
    written = [row[place] for row in rows for place in gives]
    increment_version([each for each in written if not each.is_inference()])  # which fused kernels do not


def _joined(rows: Rows, nbytes: int) -> Iterator[Columns]:
    """The flat columns of members, joined if they are adjacent in memory in all columns; in blocks of
    ``nbytes``."""
    if isinstance(rows[0][0], FakeTensor):  # which lies nowhere, and is computed in one block
        largest = max(rows, key=lambda row: row[0].numel())
        total = min(sum(row[0].numel() for row in rows), nbytes // rows[0][0].element_size())
        count = min(total, largest[0].numel())
        flat = all(column.is_contiguous() for column in largest)
        yield [column.reshape(-1)[:count] for column in largest] if flat else largest
        return
    run: list[Columns] = []
    ends: list[int] = []
    for row in sorted(rows, key=lambda row: row[0].data_ptr()):
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


def _one(run: Rows) -> Iterator[Columns]:
    """Adjacent members as one, if they are in one storage."""
    total = sum(row[0].numel() for row in run)
    if len(run) == 1 or any(_room(column) < total for column in run[0]):
        for row in run:
            yield [column.view(-1) for column in row]
    else:
        yield [column.as_strided((total,), (1,)) for column in run[0]]


def _room(tensor: Tensor) -> int:
    """The number of elements in a tensor's storage, from its first on."""
    return tensor.untyped_storage().nbytes() // tensor.element_size() - int(tensor.storage_offset())
