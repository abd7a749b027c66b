"""The calls of rank programs that are no ops of the model, as rows: what they share, write and move."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from . import memory_ops, pack
from .table import LocalOp, Written

aten, c10d = torch.ops.aten, torch.ops._c10d_functional


def _product(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Written:
    return aten.mm.default, args[:2], {}


STARTS = (
    LocalOp("c10d.all_reduce", c10d.all_reduce.default, group=2),
    LocalOp("c10d.all_gather_into_tensor", c10d.all_gather_into_tensor.default, group=2),
    LocalOp("c10d.reduce_scatter_tensor", c10d.reduce_scatter_tensor.default, group=3),
    LocalOp("c10d.all_to_all_single", c10d.all_to_all_single.default, group=3),
    LocalOp(
        "c10d.all_reduce_",
        memory_ops.all_reduce_,
        group=2,
        into=0,
        reads_into=True,
        plain=lambda args, kwargs: (c10d.all_reduce.default, args, {}),
    ),
    LocalOp(
        "c10d.all_gather_into",
        memory_ops.all_gather_into,
        group=2,
        into="out",
        plain=lambda args, kwargs: (c10d.all_gather_into_tensor.default, args, {}),
    ),
)
"""What starts a collective; its result is there once it was waited for."""

PACKING = (
    LocalOp("pack.pack", pack.pack, shares=True, moves=True),
    LocalOp("pack.unpack_gathered", pack.unpack_gathered, shares=True, moves=True),
    LocalOp("pack.pack_scattered", pack.pack_scattered, shares=True, moves=True),
    LocalOp("pack.unpack_scattered", pack.unpack_scattered, shares=True, moves=True),
    LocalOp("pack.pack_exchange", pack.pack_exchange, moves=True),
    LocalOp("pack.unpack_exchange", pack.unpack_exchange, moves=True),
    LocalOp("pack.take", pack.take, shares=True, moves=True),
    LocalOp("pack.flatten", pack.flatten, moves=True),
    LocalOp("pack.unflatten", pack.unflatten, shares=True, moves=True),
    LocalOp("pack.dense_last", pack.dense_last, shares=True),
)
"""What stands before and after."""

MEMORY = (
    LocalOp("memory.empty", memory_ops.empty, memory=True),
    LocalOp("memory.part", memory_ops.part, shares=True, memory=True),
    LocalOp("memory.write", memory_ops.write, into=0, plain=lambda args, kwargs: args[1]),
    LocalOp("memory.mm_pieces", memory_ops.mm_pieces, into=2, plain=_product),
    LocalOp("aten.mm.out", aten.mm.out, into="out", plain=_product),
    LocalOp("memory.join", memory_ops.join, shares=True, plain=lambda args, kwargs: (pack.flatten, args[1:], {})),
    LocalOp("memory.adjoin", memory_ops.adjoin, shares=True, plain=lambda args, kwargs: (pack.flatten, (*args, 1), {})),
    LocalOp("memory.spread", memory_ops.spread, into=0, plain=lambda args, kwargs: (pack.unflatten, args[1:], {})),
    LocalOp("memory.own", memory_ops.own, plain=lambda args, kwargs: args[0]),
)
"""Destinations."""

OTHER = (
    LocalOp("c10d.wait_tensor", c10d.wait_tensor.default, shares=True),
    LocalOp("getitem", operator.getitem, shares=True),
)

LOCAL_OPS: dict[Any, LocalOp] = {row.function: row for row in (*STARTS, *PACKING, *MEMORY, *OTHER)}
"""The rows by their function."""
_BY_IDENTITY = {id(function): row for function, row in LOCAL_OPS.items()}
BY_NAME: dict[str, LocalOp] = {row.name: row for row in LOCAL_OPS.values()}


def row_of(target: Any) -> LocalOp | None:
    """The row of a program's function; None for torch's own ops and for functions of which nothing is known."""
    found = _BY_IDENTITY.get(id(target))  # torch hashes its ops in Python
    return found if found is not None else getattr(target, ROW, None)


ROW = "shardfx_row"
Function = TypeVar("Function", bound=Callable[..., Any])


def observes(function: Function) -> Function:
    """Say of a function that it looks at its first argument and gives it back: a rank pass may put it into programs.

    Such a program is proven as if the call were not there.

    Example::

        @sx.observes
        def noted(x, name):
            times[name] = time.perf_counter()
            return x
    """
    name = f"{function.__module__}.{function.__qualname__}"
    row = LocalOp(name, function, shares=True, plain=lambda args, kwargs: args[0])
    setattr(function, ROW, row)
    return function
