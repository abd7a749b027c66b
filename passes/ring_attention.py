"""Ring attention: an attention as one step after another, each to the keys of one rank.

    before   %7, %8 = shardfx.attention(%4, %5, %6, None, True)            rows S{cp}

    after    %7 = aten.reshape(%4, [b, h, m, p, n, e])                     p{cp}; as keys and values
             %10, %11 = shardfx.attention_step(%7, %8, %9, None, True)
             %12, %13 = shardfx.attention_step(%7, %8, %9, None, True, out=%10, logsumexp=%11, shift=1)     ...

In step ``shift`` keys are those of the block so many places before (:mod:`shardfx.ir.ops.context.attention_steps`):
which rank they come from, its sharding rule says. In the backward each rank computes gradients of the keys that it was
sent, and sends these back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch

from shardfx.ir.dim_sharding import DimSharding
from shardfx.ir.graph import Node, Strategy, Value, substitute
from shardfx.ir.mesh import Mesh
from shardfx.ir.ops.context.attention_steps import attention_step, attention_step_backward, rotate
from shardfx.ir.ops.context.plain_attention import wide
from shardfx.ir.rewriter import Rewriter
from shardfx.ir.rulebook.dims import argument
from shardfx.ir.rules.strategy import as_placed
from shardfx.ir.spec import Spec, TensorType

from .base import RuleCache

aten = torch.ops.aten
BLOCKS = 3
"""The dim of the blocks of queries and keys."""


def stripes_of(node: Node, rows: DimSharding, mesh: Mesh) -> int:
    """The number of stripes of rows of which a rank has a block each; 0 where an attention cannot be done in steps.

    That is where it has a dense mask, dropout, or keys of other rows than queries; or where ranks do not divide the
    rows, and the mask is not causal: else they are padded.
    """
    size: int = argument(node, "q").shape[2]
    ranks = mesh.extent(rows.axes)
    plain = argument(node, "mask") is None and not argument(node, "p") and argument(node, "k").shape[2] == size
    parts = [each for each in rows.sub(size) if each.size > 1]
    if not plain or ranks < 2 or parts[-1].axes != rows.axes or len(parts) > 2:
        return 0
    return size // parts[-1].size if parts[-1].size % ranks == 0 else int(argument(node, "causal") and len(parts) == 1)


@dataclass
class RingSteps:
    """The conversion of one attention, and its backward, into steps.

    Args:
        rows: the sharding of rows.
        shardings: of each node the factors' shardings, with keys and values of all rows.
        by: why, as the nodes say it.
    """

    rewriter: Rewriter
    cache: RuleCache
    mesh: Mesh
    rows: DimSharding
    shardings: dict[Node, dict[str, DimSharding]]
    by: str

    def convert(self, forward: Node, *backward: Node) -> None:
        """Write the steps in the place of the nodes."""
        q, _, v = forward.operands[:3]
        ranks = self.mesh.extent(self.rows.axes)
        stripes = stripes_of(forward, self.rows, self.mesh)
        self._view = (stripes, ranks, -(-q.shape[2] // (stripes * ranks)))
        self._blocks = DimSharding(self.rows.axes)
        given = self._given(forward)
        how = {name: given(each) for name, each in forward.kwargs.items()}
        out: dict[str, Value] = {}
        for shift in range(ranks):
            last = shift == ranks - 1
            kwargs = {**how, **out, **({"shift": shift} if shift else {}), **({"last": True} if last else {})}
            dtype = q.type.dtype if last else wide(q.type.dtype)
            shape = (*q.shape[:2], *self._view)
            types = [TensorType((*shape, v.shape[3]), dtype), TensorType(shape, wide(q.type.dtype))]
            step = self._call(forward, attention_step, given(forward.args), types, kwargs)
            out = dict(zip(("out", "logsumexp"), step.outs, strict=True))
        for value, made in zip(forward.outs, out.values(), strict=True):
            self.rewriter.replace(value, self._flat(forward, made, value))
        self.rewriter.erase(forward)
        for node in backward:
            known = dict(zip(forward.outs, out.values(), strict=True))
            self._backward(node, ranks, known)

    def _backward(self, node: Node, ranks: int, known: dict[Value, Value]) -> None:
        given = self._given(node, known)
        q, k, v = node.operands[1:4]
        types = [TensorType((*each.shape[:2], *self._view, each.shape[3]), each.type.dtype) for each in (q, k, v)]
        of_sinks, of_bias = [*node.results, None, None, None][4:6]
        summed = (*node.results[:3], of_bias)
        sums: list[Value | None] = [None] * 4
        wanted = [None if old is None else each for old, each in zip(node.results[:3], types, strict=True)]
        how = {name: given(each) for name, each in node.kwargs.items()}
        for shift in range(ranks):
            kwargs = how | ({"shift": shift} if shift else {})
            sinks = of_sinks.type if of_sinks is not None and not shift else None
            step = self._call(
                node, attention_step_backward, given(node.args), [*wanted, sinks, of_bias and of_bias.type], kwargs
            )
            if of_sinks is not None and step.results[3] is not None:
                self.rewriter.replace(of_sinks, step.results[3])
            for i, made in enumerate((*step.results[:3], step.results[4])):
                if made is None:
                    continue
                if i in (1, 2) and shift:
                    made = self._insert(node, rotate, (made, BLOCKS, -shift), made.type)
                sums[i] = made if sums[i] is None else self._insert(node, aten.add.Tensor, (sums[i], made), made.type)
        for old, made in zip(summed, sums, strict=True):
            if old is not None and made is not None:
                self.rewriter.replace(old, made if old is of_bias else self._flat(node, made, old))
        self.rewriter.erase(node)

    def _given(self, node: Node, known: dict[Value, Value] | None = None) -> Callable[[Any], Any]:
        """A mapping of arguments: rows of tensors as stripes, blocks, and rows in a block."""
        made = dict(known or {})
        strategy = self.cache.strategy(self.cache.rule(node), self.shardings[node])
        for value, spec in zip(node.operands, strategy.operands, strict=True):
            if value not in made and (value.type.ndim < 2 or value is argument(node, "relative_bias")):
                made[value] = value
            elif value not in made:
                dim = 2 if value.type.ndim > 2 else 1
                shape = [*value.shape[:dim], *self._view, *value.shape[dim + 1 :]]
                spec = spec.with_dim(dim, self.rows)
                rows = self._padded(node, value, dim, spec)
                made[value] = self._reshape(node, rows, shape, spec)
        return lambda arguments: substitute(arguments, made.__getitem__)

    def _reshape(self, node: Node, value: Value, shape: Sequence[int], spec: Spec) -> Value:
        made = Rewriter.make(
            aten.reshape.default, (value, [*shape]), TensorType(tuple(shape), value.type.dtype), like=node
        )
        made.why = f"blocks of {self.rows.text(value.shape[1 if value.type.ndim == 2 else 2])}, for a ring"
        self._write(made, as_placed(self.cache.rule(made), made, self.mesh, {value: spec}.get))
        return self.rewriter.before(node, made).outs[0]

    def _padded(self, node: Node, value: Value, dim: int, spec: Spec) -> Value:
        """A value with rows behind its last one, so that all blocks are equal."""
        more = math.prod(self._view) - value.shape[dim]
        if not more:
            return value
        pads = [0] * (2 * (value.type.ndim - dim) - 1) + [more]
        shape = (*value.shape[:dim], value.shape[dim] + more, *value.shape[dim + 1 :])
        return self._insert(
            node, aten.constant_pad_nd.default, (value, pads), TensorType(shape, value.type.dtype), {value: spec}.get
        )

    def _flat(self, node: Node, value: Value, like: Value) -> Value:
        assert value.spec is not None
        rows = math.prod(self._view)
        flat = self._reshape(node, value, (*like.shape[:2], rows, *like.shape[3:]), value.spec)
        if like.shape[2] == rows:
            return flat
        return self._insert(node, aten.slice.Tensor, (flat, 2, 0, like.shape[2]), like.type)

    def _call(self, node: Node, op: Any, args: Any, types: Any, kwargs: Any) -> Node:
        made = Rewriter.make(op, args, types, like=node, kwargs=kwargs)
        made.why = self.by
        shardings = {f: each for f, each in self.shardings[node].items() if f != "s"} | {"p": self._blocks}
        self._write(made, self.cache.strategy(self.cache.rule(made), shardings))
        return self.rewriter.before(node, made)

    def _insert(
        self,
        node: Node,
        op: Any,
        args: Any,
        type: TensorType,
        seen: Callable[[Value], Spec | None] = attrgetter("spec"),
    ) -> Value:
        made = Rewriter.make(op, args, type, like=node)
        self._write(made, as_placed(self.cache.rule(made), made, self.mesh, seen))
        return self.rewriter.before(node, made).outs[0]

    def _write(self, node: Node, made: Strategy) -> None:
        node.strategy = made
        for value, spec in zip(node.outs, made.results, strict=True):
            value.spec = spec
