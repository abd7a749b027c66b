"""The table of calls in rank programs that are no ops of the model: aliasing, destinations and communication."""

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
from shardfx.ir.registry import BY_FUNCTION, register

from . import memory_ops, pack
from .computing.row_update import step_rows
from .computing.segment import segment, written_columns
from .experts.dispatch import check_room
from .loop import loop_ops, stage_transfer
from .pools import transfer
from .table import Arguments, Keywords, LocalOp, Plain

aten, c10d = torch.ops.aten, torch.ops._c10d_functional


def _operand(args: Arguments, kwargs: Keywords) -> Any:
    return args[0]


def _second(args: Arguments, kwargs: Keywords) -> Any:
    return args[1]


def _call(op: Any, start: int = 0, end: int | None = None, more: tuple[Any, ...] = ()) -> Plain:
    """A plain form that calls another function with some of the arguments."""
    return lambda args, kwargs: (op, (*args[start:end], *more), {})


def _rows(names: str, module: Any, **facts: Any) -> list[LocalOp]:
    """Rows for functions of a module with the same facts."""
    made = [getattr(module, name) for name in names.split()]
    return [LocalOp(f"{NAMESPACES[module]}.{each.__name__}", each, **facts) for each in made]


NAMESPACES = {pack: "pack", memory_ops: "memory", transfer: "memory", loop_ops: "loop"}

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
        plain=_call(c10d.all_reduce.default),
    ),
    LocalOp(
        "c10d.all_gather_into",
        memory_ops.all_gather_into,
        group=2,
        into="out",
        holds=True,
        plain=_call(c10d.all_gather_into_tensor.default),
    ),
)
"""Calls that start a collective; the result is available after a wait."""

STAGES = (
    LocalOp("stage.send", stage_transfer.send, group=4, message="sends"),
    LocalOp("stage.receive", stage_transfer.receive, group=6, message="receives"),
)
"""Transfers between stages (:mod:`.loop.stage_transfer`)."""

PACKING = (
    *_rows("pack unpack_gathered pack_scattered unpack_scattered", pack, shares=True, moves=True),
    *_rows("unpack_rows take unflatten part_of", pack, shares=True, moves=True),
    *_rows("pack_exchange unpack_exchange pack_rows flatten", pack, moves=True),
    *_rows("dense_last aligned", pack, shares=True),
    *_rows("inside", pack, shares=True, plain=_operand),
)
"""Packing and unpacking for collectives."""

MM_OUT = LocalOp("aten.mm.out", aten.mm.out, into="out", plain=_call(aten.mm.default, 0, 2))
MEMORY = (
    *_rows("empty arena slot", memory_ops, memory=True),
    *_rows("part", memory_ops, shares=True, memory=True),
    *_rows("write", memory_ops, into=0, plain=_second),
    *_rows("write_part", memory_ops, into=0, plain=_call(pack.part_of, 1)),
    *_rows("mm_shards", memory_ops, into=2, plain=_call(aten.mm.default, 0, 2)),
    MM_OUT,
    *_rows("join", memory_ops, shares=True, plain=_call(pack.flatten, 1)),
    *_rows("adjoin", memory_ops, shares=True, adjoins=True, plain=_call(pack.flatten, more=(1,))),
    *_rows("spread", memory_ops, into=0, plain=_call(pack.unflatten, 1)),
    *_rows("materialize", memory_ops, shares=True, plain=_operand),
    *_rows("own", memory_ops, plain=_operand),
)
"""Buffers and destinations."""

POOLS = (
    *_rows("to_host", transfer, pool=transfer.HOST, copies=True, holds=True, plain=_operand),
    *_rows("to_disk", transfer, pool=transfer.DISK, copies=True, holds=True, plain=_operand),
    *_rows("put", transfer, into=0, fetches=True, copies=True, holds=True, plain=_second),
    *_rows("stored arrived", transfer, shares=True, fetches=True, waits=True, plain=_operand),
    *_rows("to_device", transfer, fetches=True, copies=True, plain=_operand),
)
"""Copies between the device's memory and other pools."""

LOOP_OPS = (
    *_rows("begin", loop_ops, loop="opens"),
    *_rows("action", loop_ops, loop="unit"),
    *_rows("end", loop_ops, loop="closes"),
    *_rows("index piecewise_index", loop_ops, loop="number"),
    LocalOp("loop.slice", loop_ops.slice_of, shares=True, moves=True),
    *_rows("filled", memory_ops, memory=True, filled=True),
    *_rows("add maximum minimum", loop_ops, into=0, reads_into=True, loop="collects"),
    *_rows("addmm", loop_ops, into=0, reads_into=True, loop="collects", adds=_call(aten.mm.default, 1)),
    *_rows(
        *("index_add", loop_ops),
        into=0,
        reads_into=True,
        loop="collects",
        adds=_call(aten.embedding_dense_backward.default, 1),
    ),
    *_rows("write", loop_ops, into=0, loop="collects"),
)
"""Loop calls: induction variables, actions, and accumulation (:mod:`.loop.loop_ops`)."""
COLLECTING = {"sum": (loop_ops.add, 0.0), "max": (loop_ops.maximum, -inf), "min": (loop_ops.minimum, inf)}
"""The accumulating call of each reduction, and its initial value."""
ADDING = {row.adds((), {})[0]: row.function for row in LOOP_OPS if row.adds is not None}
"""The accumulating form of ops, which add to a sum over iterations."""

POINTWISE: tuple[Any, ...] = operator.attrgetter(
    *"abs.default add.Tensor addcdiv.default addcmul.default div.Tensor lerp.Scalar lerp.Tensor".split(),
    *"maximum.default minimum.default mul.Tensor neg.default pow.Tensor_Scalar reciprocal.default".split(),
    *"sign.default sqrt.default sub.Tensor".split(),
)(aten)
"""Pointwise ops of optimizer steps that may overwrite an operand."""


def _over(op: Any) -> LocalOp:
    """The form of an op that writes into a destination: ``out``, or torch's name for it."""

    def named(form: Any) -> list[tuple[str, str]]:
        return [(argument.name, str(argument.type)) for argument in form._schema.arguments if not argument.is_out]

    forms = [getattr(op.overloadpacket, name) for name in op.overloadpacket.overloads()]
    counts = len(op._schema.arguments) + 1
    (form,) = (each for each in forms if named(each) == named(op) and len(each._schema.arguments) == counts)
    into = form._schema.arguments[-1].name
    return LocalOp(
        f"{form}",
        form,
        into=into,
        plain=lambda args, kwargs: (op, args, {name: arg for name, arg in kwargs.items() if name != into}),
    )


OVER = {op: _over(op) for op in POINTWISE}
OVERWRITING: dict[Any, Any] = {op: row.function for op, row in OVER.items()}
"""The form of each op that writes into ``out``."""

COMPUTED_INTO: tuple[Any, ...] = operator.attrgetter(
    *"_log_softmax.default _log_softmax_backward_data.default _softmax.default addmm.default bmm.default".split(),
    *"gelu.default gelu_backward.default nll_loss_backward.default silu.default tanh.default".split(),
    "threshold_backward.default",
)(aten)
"""Other ops whose ``out`` variant computes into the destination, without a copy."""
INTO = {op: _over(op) for op in COMPUTED_INTO}
WITH_DESTINATION: dict[Any, LocalOp] = {aten.mm.default: MM_OUT, **OVER, **INTO}
"""The row of each op's form with a destination."""

OTHER = (
    LocalOp("update.segment", segment, shares=True, rewrites=written_columns),
    LocalOp("update.rows", step_rows, shares=True, rewrites=written_columns),
    LocalOp("c10d.wait_tensor", c10d.wait_tensor.default, shares=True, waits=True),
    LocalOp("getitem", operator.getitem, shares=True),
    LocalOp("experts.check_room", check_room, shares=True, plain=lambda args, kwargs: args[0]),
)

register(*STARTS, *STAGES, *PACKING, *MEMORY, *POOLS, *LOOP_OPS, *OVER.values(), *INTO.values(), *OTHER)


def sent_by(wait: fx.Node) -> list[fx.Node]:
    """The operands of collectives, and sources of copies, that are released by a wait."""
    row = row_of(wait.target)
    if row is None or not row.waits:
        return []
    started = [(node, row_of(node.target)) for node in wait.all_input_nodes]
    sent = [(node, row.destination(node)) for node, row in started if row is not None and row.holds]
    return [next(used for used in node.all_input_nodes if used is not into) for node, into in sent]


def row_of(target: Any) -> LocalOp | None:
    """The row of a program's function; None for torch's own ops and unknown functions."""
    if isinstance(target, torch._ops.OpOverload):
        return BY_FUNCTION.get(target._op)
    try:
        found = BY_FUNCTION.get(target)
    except TypeError:  # a target that is not hashable
        return None
    return found if found is not None else getattr(target, ROW, None)


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
            copied = (
                pytree.tree_map_only(torch.Tensor, copy, (x, *args)),
                pytree.tree_map_only(torch.Tensor, copy, kwargs),
            )
            function(*copied[0], **copied[1])
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
