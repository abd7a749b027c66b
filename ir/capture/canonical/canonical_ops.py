"""Canonical ops: one op of the graph for several equivalent ops of torch.

aten.index(x, [arange(8), %i])             ->   aten.gather(x, 1, ...)        8 rows may be sharded, in x and in %i
aten.index_put(x, [arange(8), %i], v, True)   ->   aten.scatter_add(x, 1, ..., v)
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from shardfx.ir.builder import GraphBuilder, types_of
from shardfx.ir.context.attention_masks import by_our_names, in_order, wanted_gradients
from shardfx.ir.errors import Error
from shardfx.ir.graph import Value, op_name
from shardfx.ir.ops.computing.grouped_product import grouped_mm, grouped_outer
from shardfx.ir.ops.dropout import dropout
from shardfx.ir.ops.fused_attention import attention, attention_backward
from shardfx.ir.ops.traits import OF_MEMORY, draws, with_defaults
from shardfx.ir.spec import TensorType

from .embedding_bags import OF_BAGS
from .random_numbers import DRAWN, RANDOM, calls_of, draws_nothing, seed_of

aten = torch.ops.aten


# ---- canonical forms ---------------------------------------------------------------------------------------


OF_A_DEVICE = ("device", "pin_memory")
"""Arguments that name a device: the graph serves all devices, see :mod:`shardfx.ir.program.devices`."""


def convert_call(builder: GraphBuilder, node: torch.fx.Node) -> Any:
    """Emit a call of the traced graph as nodes of ours, in canonical form; returns the result, or the list of them.

    Raises:
        Error: the call is none of an op of torch.
    """
    if node.target is operator.getitem:
        source, index = node.args
        return builder.env[source][index]  # type: ignore[index]
    args = torch.fx.map_arg(node.args, builder.env.__getitem__)
    args = tuple(list(a) if isinstance(a, (list, tuple)) else a for a in args)
    named = torch.fx.map_arg(node.kwargs, builder.env.__getitem__)
    kwargs = {name: arg for name, arg in named.items() if name not in OF_A_DEVICE}
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        raise Error(f"{target} is not an op of torch", where=str(builder.where))
    args = numbers_as_tensors(builder, target, args)
    types = types_of(node.meta.get("val"))
    if target.overloadpacket in OF_MEMORY:
        lies = node.args[0].meta["val"]  # type: ignore[union-attr]
        return _by_memory(builder, target, with_defaults(target, args, kwargs), types, lies)
    canonical = CANONICAL.get(target) or CANONICAL.get(target.overloadpacket) or OF_OTHERS.get(op_name(target))
    if canonical is not None:
        made = canonical(builder, target, args, kwargs, types)
        if canonical in DRAWN:
            builder.drawn |= calls_of(made, target, args, kwargs)
        return made
    if draws(target) and not draws_nothing(target, args, kwargs):
        raise Error(
            f"{target} draws random numbers in a way that ranks cannot agree on",
            where=str(builder.where),
            expected="dropout, rand, randn, uniform_, normal_, bernoulli_, exponential_ and the like",
            got=str(target),
            remedy="draw the numbers outside of the model and pass them as an input",
        )
    return builder.add(target, args, types, **kwargs)


def _by_memory(builder: GraphBuilder, op: Any, values: Mapping[str, Any], types: Any, lies: torch.Tensor) -> Any:
    """A strided view as an op of values: of the tensor with its dims in memory order, from its own first element on.

    ``lies`` is the tensor as it lies on one device. A view that starts behind its first element is one of a slice::

        as_strided(x, [3, 2], [1, 3], 2)    ->    as_strided(slice(view(x, [24]), 0, 2, 8), [3, 2], [1, 3])

    Raises:
        Error: the tensor is not dense, or the view leaves it.
    """
    x, size, stride = values["self"], values["size"], values["stride"]
    absolute = values["storage_offset"]
    offset = 0 if absolute is None else int(absolute) - int(lies.storage_offset())
    end = offset + (0 if 0 in size else 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True)))
    strides = lies.stride()
    order = sorted(range(lies.dim()), key=lambda dim: (-strides[dim], lies.shape[dim] == 1, dim))
    if not lies.permute(order).is_contiguous() or offset < 0 or end > lies.numel():
        raise Error(
            f"{op} of a tensor that does not lie in order in memory",
            where=str(builder.where),
            expected="a dense tensor, and a view of its elements alone",
            got=f"shape {tuple(lies.shape)}, strides {strides}, offset {lies.storage_offset()}; the view has "
            f"shape {tuple(size)}, strides {tuple(stride)}, offset {absolute}",
            remedy="call .clone(memory_format=torch.contiguous_format) on it before, and take the view of that",
        )
    permuted = order != sorted(order)
    dense = source = builder.add(aten.permute.default, (x, order)) if permuted else x
    if offset:
        flat = builder.add(aten.view.default, (dense, [lies.numel()]))
        source = builder.add(aten.slice.Tensor, (flat, 0, offset, end))
    if op.overloadpacket is not aten.as_strided_scatter:
        return builder.add(op, (source, size, stride), types)
    made = builder.add(op, (source, values["src"], size, stride))
    if offset:
        made = builder.add(aten.slice_scatter.default, (flat, made, 0, offset, end))
        made = builder.add(aten.view.default, (made, list(dense.shape)))
    return builder.add(aten.permute.default, (made, [order.index(d) for d in range(len(order))])) if permuted else made


Canonical = Callable[[GraphBuilder, Any, tuple[Any, ...], dict[str, Any], Any], Any]


def _filled(builder: GraphBuilder, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], types: Any) -> Any:
    """A tensor of one number depends on nothing, also where torch makes it like another one."""
    bound = with_defaults(op, args, kwargs)
    value = bound.get("fill_value", int("ones" in op_name(op)))
    if isinstance(value, Value):
        return builder.add(op, args, types, **kwargs)
    return builder.add(aten.full.default, (list(types.shape), value), types, dtype=types.dtype)


def _same(builder: GraphBuilder, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], types: Any) -> Any:
    return args[0]


def _nothing(builder: GraphBuilder, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], types: Any) -> Any:
    return None


def _to_copy(builder: GraphBuilder, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], types: Any) -> Any:
    if types.dtype == args[0].type.dtype:
        return args[0]
    return builder.add(op, args, types, dtype=types.dtype)


def _copy(builder: GraphBuilder, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], types: Any) -> Any:
    """A copy is its source, cast and expanded: nothing is left of the destination."""
    written = args[1]
    if written.type.dtype != types.dtype:
        written = builder.add(aten._to_copy.default, (written,), dtype=types.dtype)
    return written if written.shape == types.shape else builder.add(aten.expand.default, (written, list(types.shape)))


def _batch_norm(builder: GraphBuilder, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], types: Any) -> Any:
    """Statistics are as wide as on every device (torch's fake tensors of a CPU have those of bf16 as such)."""
    return builder.add(op, args, **kwargs)


def _all(builder: GraphBuilder, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], types: Any) -> Any:
    return builder.add(aten.all.default if op is aten._is_all_true.default else aten.any.default, args, types)


def _transpose(builder: GraphBuilder, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], types: Any) -> Any:
    """A transpose of a transpose is nothing."""
    source = args[0].node
    if source is not None and source.op is op and list(source.args[1:]) == list(args[1:]):
        return source.args[0]
    return builder.add(op, args, types, **kwargs)


def _view(builder: GraphBuilder, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], types: Any) -> Any:
    """A view of a view of one module is one view; a view to the same shape is nothing."""
    source = args[0]
    if (
        source.node is not None
        and source.node.op is aten.view.default
        and source.node.where.module == builder.where.module
    ):
        source = source.node.args[0]
    if source.shape == types.shape:
        return source
    return builder.add(aten.view.default, (source, list(types.shape)), types)


def _dropout(builder: GraphBuilder, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], types: Any) -> Any:
    x, p, train = args
    if train is False or p == 0:
        mask = builder.add(aten.ones_like.default, (x,), types[1], dtype=torch.bool)
        return [x, mask]
    made = builder.add(dropout, (x, float(p), *_draw(builder)), types)
    builder.drawn[made[0]] = op, args, kwargs
    return made


def _draw(builder: GraphBuilder) -> tuple[Any, int, list[int]]:
    """Arguments of a random op of ours: the seed, a number of its own, and the box of the global tensor."""
    return *seed_of(builder), []


def _attention(builder: GraphBuilder, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], types: Any) -> Any:
    """Attention, by any of its names in torch; its dropout draws as ours. Types are those of our op: to torch 2.11 the
    logsumexp of float64 is float32."""
    bound = by_our_names(op, args, kwargs)
    if bound["p"] > 0:
        bound["seed"], bound["number"], bound["box"] = _draw(builder)
    given, named = in_order(attention, bound)
    return builder.add(attention, given, **named)


def _attention_backward(
    builder: GraphBuilder, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], types: Any
) -> Any:
    """The backward drops what its forward, which made the logsumexp, has dropped."""
    bound = by_our_names(op, args, kwargs)
    forward = bound["logsumexp"].node
    if forward is None or forward.op is not attention:
        raise Error("a gradient of attention stands apart from its forward", where=str(builder.where), got=str(op))
    drawn = with_defaults(attention, forward.args, forward.kwargs)
    bound |= {name: drawn[name] for name in ("p", "seed", "number", "box")}
    given, named = in_order(attention_backward, bound)
    return builder.add(attention_backward, given, wanted_gradients(bound, drawn, types), **named)


def _nll(builder: GraphBuilder, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], types: Any) -> Any:
    """A mean loss is the summed loss over the total weight, both of the global batch.

    How many targets count follows from the targets alone: so it is known, and reduced, before the loss is.
    """
    logp, target, weight, reduction, ignore = args
    if reduction != 1:
        return builder.add(op, args, types)
    total, count = builder.add(op, (logp, target, weight, 2, ignore), types)
    if weight is None:
        counted = builder.add(aten.sum.default, (builder.add(aten.ne.Scalar, (target, ignore)),))
        count = builder.add(aten._to_copy.default, (counted,), types[1], dtype=types[1].dtype)
    return [builder.add(aten.div.Tensor, (total, count), types[0]), count]


def _grouped_mm(builder: GraphBuilder, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], types: Any) -> Any:
    """Torch's grouped product, in each of its variants. Rows of no group, which it leaves uninitialised, are zero
    here."""
    bound = with_defaults(op, args, kwargs)
    a, b, ends = bound["self"], bound["mat2"], bound["offs"]
    if bound["bias"] is not None or bound["out_dtype"] not in (None, a.type.dtype):
        return builder.add(op, args, types, **kwargs)
    if ends is None:
        return builder.add(aten.bmm.default, (a, b), types)
    if a.type.ndim == b.type.ndim == 2:  # what is summed is in groups
        return builder.add(grouped_outer, (_turned(builder, a), b, ends), types)
    if a.type.ndim == 2:
        return builder.add(grouped_mm, (a, b, ends), types)
    turned = builder.add(grouped_mm, (_turned(builder, b), _turned(builder, a), ends))
    return _turned(builder, turned)


def _turned(builder: GraphBuilder, x: Value) -> Value:
    """The matrix, or each of them, transposed."""
    op, how = (aten.t.default, ()) if x.type.ndim == 2 else (aten.transpose.int, (-2, -1))
    made: Value = _transpose(builder, op, (x, *how), {}, None)
    return made


def _product(builder: GraphBuilder, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], types: Any) -> Any:
    return builder.add(grouped_mm, args, types)


def _product_backward(builder: GraphBuilder, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], types: Any) -> Any:
    x, w, ends, grad = args
    of_x = builder.add(grouped_mm, (grad, _turned(builder, w), ends), types[0])
    return [of_x, builder.add(grouped_outer, (x, grad, ends), types[1])]


ARANGES = (aten.arange.default, aten.arange.start, aten.arange.start_step)
LOOKS = (aten.view.default, aten.unsqueeze.default, aten.expand.default)
"""Ops that keep a range a range, if its first dim is all of it."""


def within_rows(builder: GraphBuilder, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], types: Any) -> Any:
    """An index that looks up (or writes) within rows, as gather or scatter; any other as it stands."""
    x, indices, *rest = args
    places = _places(builder, x, indices)
    if places is None:
        return builder.add(op, args, types, **kwargs)
    if not rest:
        return _seen(builder, builder.add(aten.gather.default, (x, 1, places)), types.shape)
    values, adds = rest[0], len(rest) > 1 and rest[1]
    shape = [*torch.broadcast_shapes(*(index.shape for index in indices if index is not None)), *x.shape[2:]]
    if list(values.shape) != shape:
        values = builder.add(aten.expand.default, (values, shape))
    values = _seen(builder, values, places.shape)
    return builder.add(aten.scatter_add.default if adds else aten.scatter.src, (x, 1, places, values), types)


def _places(builder: GraphBuilder, x: Value, indices: Sequence[Value | None]) -> Value | None:
    """The places within each row of x, in the shape of the result, ``[B, K, ...]``; None where the index is another
    one."""
    if len(indices) < 2 or any(index is not None for index in indices[2:]):
        return None
    rows, places = indices[:2]
    if rows is None or places is None or places.type.dtype not in (torch.int32, torch.int64):
        return None
    shape = torch.broadcast_shapes(rows.shape, places.shape)
    if not _is_range(rows, x.shape[0]) or rows.type.ndim != len(shape):
        return None
    if places.shape != shape:
        places = builder.add(aten.expand.default, (places, list(shape)))
    if places.type.dtype is not torch.int64:
        places = builder.add(aten._to_copy.default, (places,), dtype=torch.int64)
    below = builder.add(aten.lt.Scalar, (places, 0))
    places = builder.add(aten.where.self, (below, builder.add(aten.add.Tensor, (places, x.shape[1])), places))
    size, each = math.prod(shape[1:]), x.shape[2:]
    flat = _seen(builder, places, [shape[0], size, *[1] * len(each)])
    wide: Value = builder.add(aten.expand.default, (flat, [shape[0], size, *each])) if each else flat
    return wide


def _is_range(index: Value, size: int) -> bool:
    """Whether an index counts the rows: ``arange(size)``, with dims of one element behind it."""
    if index.shape[:1] != (size,) or index.type.numel != size:
        return False
    node = index.node
    while node is not None and node.op in LOOKS:
        node = node.args[0].node
    if node is None or node.op not in ARANGES:
        return False
    numbers = {aten.arange.default: [0, *node.args, 1], aten.arange.start: [*node.args, 1]}.get(node.op, node.args)
    return list(numbers) in ([0, size, 1], [0, size])


def _seen(builder: GraphBuilder, x: Value, shape: Sequence[int]) -> Value:
    """A view of the value in another shape."""
    if tuple(x.shape) == tuple(shape):
        return x
    made: Value = builder.add(aten.view.default, (x, list(shape)))
    return made


KINDS = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}
"""The dtype of the tensor that torch makes of a Python number for an op."""


def numbers_as_tensors(builder: GraphBuilder, op: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of a call, with tensors in place of numbers if no tensor is among those that the schema names."""
    made = [*args]
    taken = [i for i, each in enumerate(op._schema.arguments[: len(args)]) if "Tensor" in str(each.type)]
    for i in taken if not any(isinstance(args[i], (Value, list)) for i in taken) else ():
        dtype = KINDS.get(type(args[i]))
        if dtype is not None:
            made[i] = builder.add(aten.full.default, ([], args[i]), TensorType((), dtype), dtype=dtype)
    return tuple(made)


CANONICAL: dict[Any, Canonical] = {
    **dict.fromkeys((aten.new_zeros, aten.new_ones, aten.new_full, aten.new_empty, aten.new_empty_strided), _filled),
    **dict.fromkeys((aten.zeros_like, aten.ones_like, aten.full_like, aten.empty_like), _filled),
    aten.detach: _same,
    aten.alias: _same,
    aten.clone: _same,
    aten.lift_fresh_copy: _same,
    aten.lift_fresh: _same,
    aten.contiguous: _same,
    aten._assert_tensor_metadata: _nothing,
    aten._assert_async: _nothing,
    aten._is_all_true: _all,
    aten._is_any_true: _all,
    aten._to_copy: _to_copy,
    aten.copy: _copy,
    aten._native_batch_norm_legit_functional: _batch_norm,
    aten._native_batch_norm_legit: _batch_norm,
    aten.t: _transpose,
    aten.transpose.int: _transpose,
    aten.view.default: _view,
    aten._unsafe_view: _view,
    aten.reshape: _view,
    aten.native_dropout: _dropout,
    attention: _attention,
    attention_backward: _attention_backward,
    aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    aten.nll_loss_forward: _nll,
    aten.nll_loss2d_forward: _nll,
    **RANDOM,
    **OF_BAGS,
    aten._grouped_mm: _grouped_mm,
    aten.index.Tensor: within_rows,
    aten.index_put.default: within_rows,
}
OF_OTHERS: dict[str, Canonical] = {
    "transformers.grouped_mm_fallback": _product,
    "transformers.grouped_mm_fallback_backward": _product_backward,
}
"""Canonical ops of other packages, by name: they exist only where the package that defines them was imported."""
