"""Biases of attention that are functions of the distance of a key from its query: one number for each distance.

    bias[h, i, j] = table[bucket(j - i), h]             T5
    bias[h, i, j] = -slope[h] * abs(i - j)              ALiBi

    relative_bias[h, d] = table[bucket(d), h]           d from 1 - t to t - 1, in place of each j - i

The ops that make the bias are written again for a tensor in which queries are one, and keys all distances. So each
number is computed as before, but of the ``t * t`` ones only ``2 t - 1``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from .mask_reader import Affine, MaskReader, behind, write
from .written_attention import CASTS, COPIES

aten = torch.ops.aten
REPEATED = {
    *CASTS,
    *COPIES,
    aten.unsqueeze.default,
    aten.permute.default,
    aten.transpose.int,
    aten.movedim.int,
    aten.detach.default,
    aten.embedding.default,
    aten.index.Tensor,
    aten.full_like.default,
    aten.zeros_like.default,
    aten.ones_like.default,
}
"""The ops, beside elementwise ones, that do the same to a tensor of distances."""


class RelativeBiases:
    """The values of a graph that are functions of the distance of two dims, and the same for all distances."""

    def __init__(self, reader: MaskReader) -> None:
        self.reader = reader
        self._values: dict[fx.Node, Any] = {}
        """For all distances: what the op gives."""
        self._written: dict[fx.Node, fx.Node] = {}
        for node in reader.graph.nodes:
            value = reader.values.get(node)
            if node.op == "call_function" and node not in reader.written and len(_shape(node)) > 1:
                found = self._first(node, value) if isinstance(value, Affine) else self._repeated(node)
                if found is not None:
                    self._values[node] = found

    def of(self, node: fx.Node, heads: int, rows: int, dtype: torch.dtype) -> fx.Node | None:
        """The numbers ``[heads, 2 rows - 1]`` of a bias ``[.. heads, rows, rows]``; None where it is no such."""
        shape = _shape(self._values.get(node))
        if (
            shape[-2:] != (1, 2 * rows - 1)
            or max(shape[:-3], default=1) > 1
            or shape[-3:-2] not in ((), (1,), (heads,))
        ):
            return None
        for each in self._needed(node):
            self._write(each)
        made = self._written[node]
        at = behind(made)
        made = write(node, at, aten.reshape.default, made, [*(shape[-3:-2] or (1,)), shape[-1]])
        made = made if shape[-3:-2] == (heads,) else write(node, at, aten.expand.default, made, [heads, -1])
        return made if made.meta["val"].dtype is dtype else write(node, at, aten._to_copy.default, made, dtype=dtype)

    @staticmethod
    def _first(node: fx.Node, value: Affine) -> Any:
        """That of an integer which is a multiple of the distance, and a number."""
        dims = [dim for dim, step in enumerate(value.steps) if step]
        if len(dims) != 2 or value.steps[dims[0]] != -value.steps[dims[1]]:
            return None
        shape, (i, j) = [*_shape(node)], dims
        if shape[i] != shape[j] or math.prod(shape) != shape[i] ** 2:
            return None
        shape[i], shape[j] = 1, 2 * shape[j] - 1
        return node.meta["val"].new_empty(shape)

    def _repeated(self, node: fx.Node) -> Any:
        """What an op gives for all distances; None where it reads something of two dims that are no distances."""
        op: Any = node.target
        if not any(each in self._values for each in node.all_input_nodes) or not isinstance(op, torch._ops.OpOverload):
            return None
        if torch.Tag.nondeterministic_seeded in op.tags or not (torch.Tag.pointwise in op.tags or op in REPEATED):
            return None
        args: Any = fx.map_arg(node.args, self._operand)
        kwargs: Any = fx.map_arg(dict(node.kwargs), self._operand)
        try:
            value = op(*args, **kwargs)
        except (RuntimeError, IndexError):  # shapes that do not fit: something depends on the place of a key
            return None
        before, after = _shape(node), _shape(value)
        changed = {(a, b) for a, b in zip(before, after, strict=False) if a != b}
        rows = min(changed, default=(0, 0))[0]
        return value if len(before) == len(after) and changed == {(rows, 1), (rows, 2 * rows - 1)} else None

    def _operand(self, node: fx.Node) -> Any:
        if node in self._values:
            return self._values[node]
        known, value = self.reader.values.get(node), node.meta["val"]
        is_number = isinstance(known, Affine) and known.is_constant
        return value.new_empty([1] * value.dim()) if is_number else value

    def _needed(self, last: fx.Node) -> Iterator[fx.Node]:
        """The nodes that one is computed of, as far as they are functions of a distance, in order."""
        found, todo = set[fx.Node](), [last]
        while todo:
            node = todo.pop()
            found.add(node)
            if not isinstance(self.reader.values.get(node), Affine):
                todo += [each for each in node.all_input_nodes if each in self._values and each not in found]
        return (node for node in [*self.reader.graph.nodes] if node in found and node not in self._written)

    def _write(self, node: fx.Node) -> None:
        value, at, known = self._values[node], behind(node), self.reader.values.get(node)
        if isinstance(known, Affine):
            step, many = next(each for each in reversed(known.steps) if each), value.numel()
            first, like = known.start - step * (many // 2), {"dtype": value.dtype, "device": value.device}
            numbers = write(node, at, aten.arange.start_step, first, first + step * many, step, **like)
            self._written[node] = write(node, at, aten.reshape.default, numbers, [*value.shape])
            return

        def operand(each: fx.Node) -> fx.Node:
            number, known = self.reader.values.get(each), each.meta["val"]
            if each in self._written:
                return self._written[each]
            if not isinstance(number, Affine) or not number.is_constant:
                return each
            like = {"dtype": known.dtype, "device": known.device}
            return write(each, at, aten.full.default, [1] * known.dim(), number.start, **like)

        op, args, kwargs = node.target, fx.map_arg(node.args, operand), fx.map_arg(dict(node.kwargs), operand)
        with at.graph.inserting_before(at):
            self._written[node] = at.graph.call_function(op, args, kwargs)  # type: ignore[arg-type]
        self._written[node].meta = {**node.meta, "val": value}


def _shape(of: Any) -> tuple[Any, ...]:
    value = of.meta.get("val") if isinstance(of, fx.Node) else of
    return tuple(value.shape) if isinstance(value, torch.Tensor) else ()
