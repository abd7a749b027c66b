"""Forms of ops: what several of torch's ops say is said by one op of the graph."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from shardfx.ir.builder import GraphBuilder, types_of
from shardfx.ir.errors import Error
from shardfx.ir.graph import Value, op_name
from shardfx.ir.ops.computing.grouped_product import grouped_mm, grouped_outer
from shardfx.ir.ops.dropout import dropout
from shardfx.ir.ops.fused_attention import attention, attention_backward
from shardfx.ir.ops.traits import OF_MEMORY, draws, positional, with_defaults

from .diagonals import within_rows
from .lone_numbers import numbers_as_tensors
from .random_numbers import DRAWN, RANDOM, calls_of, draws_nothing, seed_of, unshared

aten = torch.ops.aten


# ---- canonical forms ---------------------------------------------------------------------------------------


OF_A_DEVICE = ("device", "pin_memory")
"""Arguments that say where a tensor lies: the graph serves all devices, see :mod:`shardfx.ir.program.devices`."""


def convert_call(builder: GraphBuilder, node: torch.fx.Node) -> Any:
    """Write a call of the traced graph as nodes of ours, in canonical form; gives the result, or the list of them.

    Raises:
        Error: the call is none of an op of torch.
    """
    if node.target is operator.getitem:
        source, index = node.args
        return builder.env[source][index]  # type: ignore[index]
    args = torch.fx.map_arg(node.args, builder.env.__getitem__)
    args = tuple(list(a) if isinstance(a, (list, tuple)) else a for a in args)
    given = torch.fx.map_arg(node.kwargs, builder.env.__getitem__)
    kwargs = {name: arg for name, arg in given.items() if name not in OF_A_DEVICE}
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
        raise unshared(target, str(builder.where))
    return builder.add(target, args, types, **kwargs)


def _by_memory(builder: GraphBuilder, op: Any, given: Mapping[str, Any], types: Any, lies: torch.Tensor) -> Any:
    """A strided view as an op of values: of the tensor with its dims in memory order, from its own first element on.

    ``lies`` is the tensor as it lies on one device. A view that starts behind its first element is one of a slice::

        as_strided(x, [3, 2], [1, 3], 2)    ->    as_strided(slice(view(x, [24]), 0, 2, 8), [3, 2], [1, 3])

    Raises:
        Error: the tensor is not dense, or the view leaves it.
    """
    x, size, stride = given["self"], given["size"], given["stride"]
    absolute = given["storage_offset"]
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
    made = builder.add(op, (source, given["src"], size, stride))
    if offset:
        made = builder.add(aten.slice_scatter.default, (flat, made, 0, offset, end))
        made = builder.add(aten.view.default, (made, list(dense.shape)))
    return builder.add(aten.permute.default, (made, [order.index(d) for d in range(len(order))])) if permuted else made


Canonical = Callable[[GraphBuilder, Any, tuple[Any, ...], dict[str, Any], Any], Any]


def _filled(builder: GraphBuilder, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], types: Any) -> Any:
    """A tensor of one number is made of nothing: the tensor that it is made like is not waited for, nor sent."""
    given = with_defaults(op, args, kwargs)
    value = given.get("fill_value", int("ones" in op_name(op)))
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
    """What is written over a tensor, in its dtype and shape: nothing is left of the tensor itself."""
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
    """What a random op of ours draws by: the seed, a number of its own, and the box of the whole."""
    return *seed_of(builder), []


def _attention(builder: GraphBuilder, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], types: Any) -> Any:
    """Attention, by whichever name torch has it; with dropout it draws as dropout does. Types are those of our op: to
    torch 2.11 the logsumexp of float64 is float32."""
    given = _by_our_names(op, args, kwargs)
    if given["p"] > 0:
        given["seed"], given["number"], given["box"] = _draw(builder)
    return builder.add(attention, positional(attention, given))


def _attention_backward(
    builder: GraphBuilder, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], types: Any
) -> Any:
    """The backward drops what its forward, which made the logsumexp, has dropped."""
    given = _by_our_names(op, args, kwargs)
    forward = given["logsumexp"].node
    if forward is None or forward.op is not attention:
        raise Error("a gradient of attention stands apart from its forward", where=str(builder.where), got=str(op))
    drawn = with_defaults(attention, forward.args, forward.kwargs)
    given |= {name: drawn[name] for name in ("p", "seed", "number", "box")}
    kept = types if given.get("of_mask") else [*types[:3], None]
    return builder.add(attention_backward, positional(attention_backward, given), kept)


OUR_NAMES = {
    "query": "q",
    "key": "k",
    "value": "v",
    "attn_mask": "mask",
    "is_causal": "causal",
    "dropout_p": "p",
    "grad_out": "grad",
}
"""What our op of attention calls the arguments of torch's."""


def _by_our_names(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {OUR_NAMES.get(name, name): arg for name, arg in with_defaults(op, args, kwargs).items()}


def _nll(builder: GraphBuilder, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], types: Any) -> Any:
    """A mean loss is the summed loss over the total weight, both of the whole batch.

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
    """Torch's product by group, in each of its forms. What it leaves of memory in rows of no group is zero here."""
    given = with_defaults(op, args, kwargs)
    a, b, ends = given["self"], given["mat2"], given["offs"]
    if given["bias"] is not None or given["out_dtype"] not in (None, a.type.dtype):
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
    aten._grouped_mm: _grouped_mm,
    aten.index.Tensor: within_rows,
    aten.index_put.default: within_rows,
}
OF_OTHERS: dict[str, Canonical] = {
    "transformers.grouped_mm_fallback": _product,
    "transformers.grouped_mm_fallback_backward": _product_backward,
}
"""By name, for they are there only where the package that defines them was imported."""
