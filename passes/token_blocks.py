"""Blocks of tokens whose rows are sent to parts: of experts, or of tables.

Tokens ``[n, k]`` that are sharded over mesh axes are blocks ``d e t k``: those of ``e`` are over the axes of the parts
``p``, as far as these shard tokens at all. Blocks and parts that are sharded over the same axes imply an all-to-all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from shardfx.ir.dim_sharding import REPLICATED, DimSharding, Part, compound, project, without
from shardfx.ir.graph import Graph, Node, Output, OutputKind, Value
from shardfx.ir.ops.experts.dispatch import take_rows
from shardfx.ir.rewriter import Rewriter
from shardfx.ir.rules.strategy import factor_shardings, partial_operands
from shardfx.ir.spec import Spec

from .base import PassContext

aten = torch.ops.aten


class TokenBlocks:
    """The blocks of the tokens that some ids ``[n, k]`` are of, and the parts over some axes.

    ``slots`` and ``places``, which :meth:`_to_parts` and :meth:`_from_parts` use, are those of ``room`` rows from a
    block to a part (:func:`shardfx.ir.ops.experts.dispatch.expert_slots`).
    """

    why: ClassVar[str] = "rows by expert"
    room: int
    slots: Value
    places: Value

    def __init__(self, graph: Graph, context: PassContext, ids: Value, axes: Sequence[str]) -> None:
        self.graph, self.cache, self.mesh = graph, context.cache, graph.mesh
        self.rewriter, self.users = Rewriter(graph, context.rules), graph.users()
        self.count, self.each = ids.shape
        assert ids.spec is not None
        self.tokens = ids.spec.dims[0]
        axes = [axis for axis in axes if self._extent(axis) > 1]
        d_axes = [axis for axis in self.tokens.axes if axis not in axes and self._extent(axis) > 1]
        self.e_axes = [axis for axis in axes if axis in self.tokens.axes]
        extent = self.mesh.extent
        self.d, self.e, self.p = extent(d_axes), extent(self.e_axes), extent(axes)
        self.of_d, self.of_e, self.of_p = (DimSharding(tuple(each)) for each in (d_axes, self.e_axes, axes))
        held = [Part(self._extent(axis), (axis,) * (axis not in self.e_axes)) for axis in axes]
        self.of_own = compound(held, self.mesh) if held else REPLICATED
        """Of the parts, before they are sent: sharded where tokens are replicated."""
        self.t = self.count // (self.d * self.e)

    def _extent(self, axis: str) -> int:
        return self.mesh.extent((axis,))

    @property
    def is_even(self) -> bool:
        """Whether all ranks have equally many tokens."""
        parts = self.tokens.sub(self.count)
        return self.tokens.rows is None and all(each.size % self.mesh.extent(each.axes) == 0 for each in parts)

    # ---- rows to parts, and back -----------------------------------------------------------------------------------

    def _packed(self, node: Node, x: Value, index: Value) -> Value:
        """Rows of blocks in their slots."""
        return self._call(node, take_rows, x, index, b0=self.of_d, b1=self.of_e, m0=self.of_own)

    def _to_parts(self, node: Node, x: Value) -> Value:
        """Packed rows ``[d e p c h]`` as those that parts get, ``[d p e c h]``."""
        if self.e == 1:
            return x
        return self._call(node, aten.permute.default, x, [0, 2, 1, 3, 4], at={1: self.of_p, 2: REPLICATED})

    def _from_parts(self, node: Node, x: Value, shape: Sequence[int]) -> Value:
        """Rows ``[d p e c h]`` of parts as tokens of this shape ``[n ..]``."""
        if self.e > 1:
            x = self._call(node, aten.permute.default, x, [0, 2, 1, 3, 4])
        own = compound([*self.of_own.sub(self.p), Part(self.room)], self.mesh)
        packed = [self.d, self.e, self.p * self.room, shape[-1]]
        x = self._call(node, aten.reshape.default, x, packed, at={1: self.of_e, 2: own})
        return self._tokens(node, self._call(node, take_rows, x, self.places), shape)

    def _with_lost(self, node: Node, lost: Value, before: Value | None) -> Value:
        """The number of rows that are lost here, and before."""
        own = self._call(node, aten.sum.default, lost)
        none = before or self._call(node, aten.mul.Tensor, own, 0)  # so that the first layer is like the others
        total = self.rewriter.call(aten.add.Tensor, none, own, like=node, why=self.why)
        nodes = self.rewriter.graph.nodes
        if before is not None and before.node is not None and nodes.index(before.node) > nodes.index(node):
            return self.rewriter.after(before.node, total).outs[0]
        return self.rewriter.before(node, total).outs[0]

    # ---- blocks of tokens ------------------------------------------------------------------------------------------

    def _split(self) -> tuple[list[int], list[int]]:
        """The sizes of tokens as dims, one for each axis that shards them; and their order as blocks ``d e t``."""
        sizes, axes = list[int](), list[str]()
        for part in self.tokens.sub(self.count):
            sizes += [*map(self._extent, part.axes), part.size // self.mesh.extent(part.axes)]
            axes += [*part.axes, ""]
        first = [axes.index(axis) for axis in (*self.of_d.axes, *self.e_axes)]
        return sizes, first + [i for i in range(len(axes)) if i not in first]

    def _blocks(self, value: Value, node: Node) -> Value:
        """A value ``[n ..]`` as ``[d e t ..]``."""
        (sizes, order), rest = self._split(), value.shape[1:]
        if order != sorted(order):
            value = self._call(node, aten.reshape.default, value, [*sizes, *rest])
            more = range(len(order), len(order) + len(rest))
            value = self._call(node, aten.permute.default, value, [*order, *more])
        return self._call(node, aten.reshape.default, value, [self.d, self.e, self.t, *rest])

    def _tokens(self, node: Node, x: Value, shape: Sequence[int]) -> Value:
        """Blocks ``[d e t ..]`` as a value of this shape ``[n ..]``."""
        (sizes, order), rest = self._split(), shape[1:]
        if order != sorted(order):
            x = self._call(node, aten.reshape.default, x, [*(sizes[i] for i in order), *rest])
            more = range(len(order), len(order) + len(rest))
            x = self._call(node, aten.permute.default, x, [*sorted(range(len(order)), key=order.__getitem__), *more])
        return self._call(node, aten.reshape.default, x, [self.count, *rest])

    # ---- placements -----------------------------------------------------------------------------------------------

    def _shard(self, node: Node, at: Mapping[int, DimSharding], of: Mapping[str, DimSharding]) -> None:
        """Shard dims of a node's first result, and factors; all else stays as it is."""
        rule, asked = self.cache.rule(node), dict(of)
        for dim, sharding in at.items():
            factors = (rule.results[0] or ())[dim]
            made = project(sharding, node.outs[0].shape[dim], rule.dim_sizes(factors), self.mesh)
            asked.update(zip(factors, made or (), strict=True))
        axes = {axis for each in asked.values() for axis in each.axes}
        assert node.strategy is not None
        kept = factor_shardings(rule, node, self.mesh)
        for axis in axes:
            kept = {factor: without(each, axis, self.mesh) for factor, each in kept.items()}
        partial = {axis: each for axis, each in partial_operands(node.strategy).items() if axis not in axes}
        shardings = {factor: each for factor, each in {**kept, **asked}.items() if each.axes}
        node.strategy = self.cache.strategy(rule, shardings, partial)
        for value, spec in zip(node.outs, node.strategy.results, strict=True):
            value.spec = spec

    def _call(self, like: Node, op: Any, *args: Any, **how: Any) -> Value:
        return self._outs(like, op, *args, **how)[0]

    def _outs(
        self,
        like: Node,
        op: Any,
        *args: Any,
        at: Mapping[int, DimSharding] | None = None,
        how: Mapping[str, Any] | None = None,
        **of: DimSharding,
    ) -> Sequence[Value]:
        """The results of a new node; its placement follows its operands, but for dims ``at`` and factors ``of``."""
        made = self.rewriter.call(op, *args, like=like, why=self.why, **(how or {}))
        if at or of:
            self._shard(made, at or {}, of)
        self.rewriter.before(like, made)
        return made.outs


def is_filled(value: Value) -> bool:
    """Whether a value is of one number everywhere."""
    return value.node is not None and value.node.op is aten.full.default


def add_overflow(graph: Graph, name: str, lost: Value | None) -> None:
    """Give out the number of rows without room, if there may be some, as the one such output of a graph."""
    known = [output for output in graph.outputs if output.kind is OutputKind.OVERFLOW]
    if known and lost is not None:
        known[0].value = lost
    elif lost is not None:
        graph.outputs.append(Output(OutputKind.OVERFLOW, name, lost, Spec.replicated(0)))


def overflow(graph: Graph) -> Value | None:
    """The number of rows without room, where there is one."""
    return next((output.value for output in graph.outputs if output.kind is OutputKind.OVERFLOW), None)
