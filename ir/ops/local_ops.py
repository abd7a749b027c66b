"""The calls of rank programs that are no ops of the model, as rows: what they share, write and move."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from math import inf
from typing import Any, TypeVar, cast

import torch
import torch.utils._pytree as pytree
from torch import fx

from shardfx.ir.errors import Error

from . import memory_ops, pack
from .computing import no_share  # noqa: F401, an op that rules name
from .computing.materialize import materialize
from .computing.segment import segment, written_columns
from .loop import loop_ops, stage_transfer
from .pools import transfer
from .table import LocalOp, Written

aten, c10d = torch.ops.aten, torch.ops._c10d_functional


def _product(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Written:
    return aten.mm.default, args[:2], {}


STARTS = (
    LocalOp("c10d.all_reduce", c10d.all_reduce.default, group=2),
    LocalOp("c10d.all_gather_into_tensor", c10d.all_gather_into_tensor.default, group=2, holds=True),
    LocalOp("c10d.reduce_scatter_tensor", c10d.reduce_scatter_tensor.default, group=3, holds=True),
    LocalOp("c10d.all_to_all_single", c10d.all_to_all_single.default, group=3, holds=True),
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
        holds=True,
        plain=lambda args, kwargs: (c10d.all_gather_into_tensor.default, args, {}),
    ),
)
"""What starts a collective; its result is there once it was waited for."""

STAGES = (
    LocalOp("stage.send", stage_transfer.send, group=4, message="sends"),
    LocalOp("stage.receive", stage_transfer.receive, group=6, message="receives"),
)
"""From stage to stage (:mod:`.loop.stage_transfer`)."""

PACKING = (
    LocalOp("pack.pack", pack.pack, shares=True, moves=True),
    LocalOp("pack.unpack_gathered", pack.unpack_gathered, shares=True, moves=True),
    LocalOp("pack.pack_scattered", pack.pack_scattered, shares=True, moves=True),
    LocalOp("pack.unpack_scattered", pack.unpack_scattered, shares=True, moves=True),
    LocalOp("pack.pack_exchange", pack.pack_exchange, moves=True),
    LocalOp("pack.unpack_exchange", pack.unpack_exchange, moves=True),
    LocalOp("pack.pack_rows", pack.pack_rows, moves=True),
    LocalOp("pack.unpack_rows", pack.unpack_rows, shares=True, moves=True),
    LocalOp("pack.join_rows", pack.join_rows, shares=True, moves=True),
    LocalOp("pack.take", pack.take, shares=True, moves=True),
    LocalOp("pack.flatten", pack.flatten, moves=True),
    LocalOp("pack.unflatten", pack.unflatten, shares=True, moves=True),
    LocalOp("pack.part_of", pack.part_of, shares=True, moves=True),
    LocalOp("pack.dense_last", pack.dense_last, shares=True),
    LocalOp("pack.aligned", pack.aligned, shares=True),
    LocalOp("pack.inside", pack.inside, shares=True, plain=lambda args, kwargs: args[0]),
)
"""What stands before and after."""

MEMORY = (
    LocalOp("memory.empty", memory_ops.empty, memory=True),
    LocalOp("memory.arena", memory_ops.arena, memory=True),
    LocalOp("memory.slot", memory_ops.slot, memory=True),
    LocalOp("memory.part", memory_ops.part, shares=True, memory=True),
    LocalOp("memory.write", memory_ops.write, into=0, plain=lambda args, kwargs: args[1]),
    LocalOp(
        "memory.write_part",
        memory_ops.write_part,
        into=0,
        plain=lambda args, kwargs: (pack.part_of, args[1:], {}),
    ),
    LocalOp("memory.mm_pieces", memory_ops.mm_pieces, into=2, plain=_product),
    LocalOp("aten.mm.out", aten.mm.out, into="out", plain=_product),
    LocalOp("memory.join", memory_ops.join, shares=True, plain=lambda args, kwargs: (pack.flatten, args[1:], {})),
    LocalOp(
        "memory.adjoin",
        memory_ops.adjoin,
        shares=True,
        adjoins=True,
        plain=lambda args, kwargs: (pack.flatten, (*args, 1), {}),
    ),
    LocalOp("memory.spread", memory_ops.spread, into=0, plain=lambda args, kwargs: (pack.unflatten, args[1:], {})),
    LocalOp("memory.materialize", materialize, shares=True, plain=lambda args, kwargs: args[0]),
    LocalOp("memory.own", memory_ops.own, plain=lambda args, kwargs: args[0]),
)
"""Destinations."""

POOLS = (
    LocalOp(
        "memory.to_host",
        transfer.to_host,
        pool=transfer.HOST,
        copies=True,
        holds=True,
        plain=lambda args, kwargs: args[0],
    ),
    LocalOp(
        "memory.to_disk",
        transfer.to_disk,
        pool=transfer.DISK,
        copies=True,
        holds=True,
        plain=lambda args, kwargs: args[0],
    ),
    LocalOp(
        "memory.put",
        transfer.put,
        into=0,
        fetches=True,
        copies=True,
        holds=True,
        plain=lambda args, kwargs: args[1],
    ),
    LocalOp(
        "memory.stored", transfer.stored, shares=True, fetches=True, waits=True, plain=lambda args, kwargs: args[0]
    ),
    LocalOp("memory.to_device", transfer.to_device, fetches=True, copies=True, plain=lambda args, kwargs: args[0]),
    LocalOp(
        "memory.arrived", transfer.arrived, shares=True, fetches=True, waits=True, plain=lambda args, kwargs: args[0]
    ),
)
"""Between the device's memory and the pools beside it."""

LOOP_OPS = (
    LocalOp("loop.begin", loop_ops.begin, loop="opens"),
    LocalOp("loop.action", loop_ops.action, loop="unit"),
    LocalOp("loop.end", loop_ops.end, loop="closes"),
    LocalOp("loop.index", loop_ops.index, loop="number"),
    LocalOp("loop.piecewise_index", loop_ops.piecewise_index, loop="number"),
    LocalOp("loop.slice", loop_ops.slice_of, shares=True, moves=True),
    LocalOp("memory.filled", memory_ops.filled, memory=True, filled=True),
    LocalOp("loop.add", loop_ops.add, into=0, reads_into=True, loop="collects"),
    LocalOp(
        "loop.addmm",
        loop_ops.addmm,
        into=0,
        reads_into=True,
        loop="collects",
        adds=lambda args, kwargs: (aten.mm.default, args[1:], {}),
    ),
    LocalOp(
        "loop.index_add",
        loop_ops.index_add,
        into=0,
        reads_into=True,
        loop="collects",
        adds=lambda args, kwargs: (aten.embedding_dense_backward.default, args[1:], {}),
    ),
    LocalOp("loop.maximum", loop_ops.maximum, into=0, reads_into=True, loop="collects"),
    LocalOp("loop.minimum", loop_ops.minimum, into=0, reads_into=True, loop="collects"),
    LocalOp("loop.write", loop_ops.write, into=0, loop="collects"),
)
"""What is done once for each iteration of a loop axis, and what leaves it (:mod:`.loop.loop_ops`)."""
COLLECTING = {"sum": (loop_ops.add, 0.0), "max": (loop_ops.maximum, -inf), "min": (loop_ops.minimum, inf)}
"""By reduction: what collects it over iterations, and what that begins with."""
ADDING = {row.adds((), {})[0]: row.function for row in LOOP_OPS if row.adds is not None}
"""By op: what does it into the sum over iterations."""

POINTWISE = (
    aten.abs.default,
    aten.add.Tensor,
    aten.addcdiv.default,
    aten.addcmul.default,
    aten.div.Tensor,
    aten.lerp.Scalar,
    aten.lerp.Tensor,
    aten.maximum.default,
    aten.minimum.default,
    aten.mul.Tensor,
    aten.neg.default,
    aten.pow.Tensor_Scalar,
    aten.reciprocal.default,
    aten.sign.default,
    aten.sqrt.default,
    aten.sub.Tensor,
)
"""Ops of an optimizer's step whose result may lie where an operand does."""


def _over(op: Any) -> LocalOp:
    """The form of an op that writes into memory which it is given: ``out``, or what torch calls it there."""
    mine = [(argument.name, str(argument.type)) for argument in op._schema.arguments]
    packet = op.overloadpacket
    forms = [getattr(packet, name) for name in packet.overloads()]
    (form,) = (
        each
        for each in forms
        if [argument.is_out for argument in each._schema.arguments] == [*(False for _ in mine), True]
        and [(argument.name, str(argument.type)) for argument in each._schema.arguments][:-1] == mine
    )
    into = form._schema.arguments[-1].name
    return LocalOp(
        f"{form}",
        form,
        into=into,
        plain=lambda args, kwargs: (op, args, {name: arg for name, arg in kwargs.items() if name != into}),
    )


OVER = {op: _over(op) for op in POINTWISE}
OVERWRITING: dict[Any, Any] = {op: row.function for op, row in OVER.items()}
"""By op the form that writes into ``out``."""

COMPUTED_INTO = (
    aten._log_softmax.default,
    aten._log_softmax_backward_data.default,
    aten._softmax.default,
    aten.addmm.default,
    aten.bmm.default,
    aten.gelu.default,
    aten.gelu_backward.default,
    aten.nll_loss_backward.default,
    aten.silu.default,
    aten.tanh.default,
    aten.threshold_backward.default,
)
"""Other ops that torch's kernels compute into memory which they are given, and do not copy there."""
INTO = {op: _over(op) for op in COMPUTED_INTO}
MM_OUT = next(row for row in MEMORY if row.function is aten.mm.out)
WITH_DESTINATION: dict[Any, LocalOp] = {aten.mm.default: MM_OUT, **OVER, **INTO}
"""By op the row of the form that is computed into given memory."""

OTHER = (
    LocalOp("update.segment", segment, shares=True, rewrites=written_columns),
    LocalOp("c10d.wait_tensor", c10d.wait_tensor.default, shares=True, waits=True),
    LocalOp("getitem", operator.getitem, shares=True),
)

LOCAL_OPS: dict[Any, LocalOp] = {
    row.function: row
    for row in (*STARTS, *STAGES, *PACKING, *MEMORY, *POOLS, *LOOP_OPS, *OVER.values(), *INTO.values(), *OTHER)
}
"""The rows by their function."""
BY_NAME: dict[str, LocalOp] = {row.name: row for row in LOCAL_OPS.values()}


def sent_by(wait: fx.Node) -> list[fx.Node]:
    """What a wait sets free: the operands of collectives, and the sources of copies, that hold them until then."""
    row = row_of(wait.target)
    if row is None or not row.waits:
        return []
    started = [(node, row_of(node.target)) for node in wait.all_input_nodes]
    held = [(node, row.destination(node)) for node, row in started if row is not None and row.holds]
    return [next(used for used in node.all_input_nodes if used is not into) for node, into in held]


def row_of(target: Any) -> LocalOp | None:
    """The row of a program's function; None for torch's own ops and for functions of which nothing is known."""
    if isinstance(target, torch._ops.OpOverload):
        return TORCH_OPS.get(target._op)
    try:
        found = LOCAL_OPS.get(target)
    except TypeError:  # a target that is not hashable
        return None
    return found if found is not None else getattr(target, ROW, None)


TORCH_OPS = {op._op: row for op, row in LOCAL_OPS.items() if isinstance(op, torch._ops.OpOverload)}
"""The rows of torch's ops, by what hashes without calling Python."""
ROW = "shardfx_row"
Function = TypeVar("Function", bound=Callable[..., Any])


def observes(function: Function) -> Function:
    """Declare a function an observer, which a rank pass may insert into programs: a call of it is the identity.

    The function gets copies of its tensors; what it returns is ignored, and its first argument is passed on. Such a
    program is proven as if the call were not there, and the assumptions of the verdict name the function.

    Raises:
        Error: when a program runs: the function writes in place to a tensor that it is given.

    Example::

        @sx.observes
        def noted(x, name):
            times[name] = time.perf_counter()
    """
    name = f"{function.__module__}.{function.__qualname__}"

    @torch._disable_dynamo  # it is no part of what torch.compile traces
    @functools.wraps(function)
    def observer(x: Any, *args: Any, **kwargs: Any) -> Any:
        copies: list[tuple[torch.Tensor, int]] = []

        def copy(tensor: torch.Tensor) -> torch.Tensor:
            made = tensor.detach().clone()
            copies.append((made, made._version))
            return made

        with torch.inference_mode(False):  # else copies have no version
            given = (
                pytree.tree_map_only(torch.Tensor, copy, (x, *args)),
                pytree.tree_map_only(torch.Tensor, copy, kwargs),
            )
            function(*given[0], **given[1])
        if any(made._version != version for made, version in copies):
            code = getattr(function, "__code__", None)
            raise Error(
                f"the observer {name} writes in place to a tensor that it is given",
                where=f"{code.co_filename}:{code.co_firstlineno}" if code is not None else name,
                expected="a function that reads its arguments",
                got="a tensor that was written to",
                remedy="write to a clone() of it; a function that computes something new is an op with a rule",
            )
        return x

    row = LocalOp(name, observer, shares=True, observes=True, plain=lambda args, kwargs: args[0])
    setattr(observer, ROW, row)
    return cast(Function, observer)


def observers(graph: fx.Graph) -> list[str]:
    """The names of the observers that a program calls."""
    rows = (row_of(node.target) for node in graph.nodes if node.op == "call_function")
    return list(dict.fromkeys(row.name for row in rows if row is not None and row.observes))
