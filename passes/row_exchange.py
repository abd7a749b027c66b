"""Lookups in a table that is sharded by rows, by two all-to-alls: ids to the ranks of their rows, and rows back.

    %5 = aten.embedding(%w, %ids)     ->     %2, %3 = shardfx.row_numbers(%1, 2000, -1)     a rank, and a row of its
                                             %4, %5, %6 = shardfx.expert_slots(%2, 4, 4, 40)         room for 40 each
                                             %7 = shardfx.take_rows(%3, %4)                 [1, 4{dp}, 4, 40, 1]
                                             %8 = aten.permute(%7, [0, 2, 1, 3, 4])         all-to-all
                                             %9 = shardfx.numbered_rows(%w, ...)            [1, 4{dp}, 4, 40, 64]

Rows of tables, and their gradients, are sent as those of experts are (:mod:`.expert_parallel`): ids without room, and
ids beyond the table, are counted, and the step is run again. (Row-wise sharding of TorchRec, Ivchenko et al., 2022.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

import torch

from shardfx.ir.graph import Graph, Node, Value
from shardfx.ir.ops.computing.table_ids import GRADIENT, LARGEST, LOOKUP, numbered_rows, numbered_sums, row_numbers
from shardfx.ir.ops.experts.dispatch import expert_slots
from shardfx.ir.rewriter import Rewriter

from .base import PassContext
from .token_blocks import TokenBlocks, is_filled

aten = torch.ops.aten
DEVIATIONS = 4
"""The room for ids is that many standard deviations above the mean, at least: that of uniform ids."""


class TableExchange(TokenBlocks):
    """The exchange of the rows of one table that some ids name, by which ``nodes`` look up, and make gradients."""

    why: ClassVar[str] = "rows of a table"

    def __init__(
        self, graph: Graph, context: PassContext, table: Value, nodes: Sequence[Node], capacity: float
    ) -> None:
        self.table, self.nodes, self.like = table, nodes, nodes[0]
        call, ids = Rewriter(graph, context.rules).call, self.like.operands[1]
        self.flat = call(aten.reshape.default, ids, [ids.type.numel, 1], like=self.like, why=self.why)
        assert table.spec is not None
        by_rows, by_columns = table.spec.dims
        super().__init__(graph, context, self.flat.outs[0], by_rows.axes)
        self.by_rows = self.p == self.e > 1 and not by_columns.axes
        mean, self.size = self.t / self.p, table.shape[0] // self.p
        self.room = min(self.t, math.ceil(max(capacity * mean, mean + DEVIATIONS * math.sqrt(mean))))
        self.paddings = {node.args[3] for node in self.nodes if node.op is GRADIENT}

    @property
    def fits(self) -> bool:
        """Whether ranks have equally many ids and rows, and gradients are sums of rows."""
        sums = all(not node.args[4] for node in self.nodes if node.op is GRADIENT) and len(self.paddings) < 2
        even = self.is_even and self.size * self.p == self.table.shape[0] and self.size < LARGEST
        return sums and even and self.by_rows and self.t > 0 and self.like.op is LOOKUP

    @property
    def sent(self) -> float:
        """The bytes that a rank sends."""
        values = (node.outs[0] if node.op is LOOKUP else node.operands[0] for node in self.nodes)
        rows = sum(v.type.nbytes // max(self.count, 1) for v in values if not is_filled(v))
        return (self.p - 1) * self.room * (4 + rows)

    def convert(self, lost: Value | None) -> Value:
        """Convert the lookups and the gradients; returns the number of ids that are ``lost``, here and before."""
        like, of = self.like, {"d": self.of_d, "p": self.of_p}
        self.rewriter.before(like, self.flat)
        blocks = self._blocks(self.flat.outs[0], like)
        part, numbers = self._outs(like, row_numbers, blocks, self.size, next(iter(self.paddings), -1))
        self.slots, self.places, _ = self._outs(like, expert_slots, part, self.p, self.p, self.room)
        x = self._to_parts(like, self._packed(like, numbers, self.slots))
        self.numbers = self._call(like, aten.reshape.default, x, [self.d, self.p, self.e, self.room])
        lost = self._with_lost(like, self._call(like, aten.lt.Scalar, self.places, 0), lost)
        for node in self.nodes:
            value = node.operands[0]
            if node.op is LOOKUP:
                found = self._call(node, numbered_rows, value, self.numbers, **of)
                made = self._from_parts(node, found, (self.count, value.shape[1]))
                if made.shape != node.outs[0].shape:
                    made = self._call(node, aten.reshape.default, made, [*node.outs[0].shape])
            else:
                made = self._call(node, numbered_sums, self._rows(node), self.numbers, self.size, **of)
            made.hint = node.outs[0].hint
            self.rewriter.replace(node.outs[0], made)
            self.rewriter.erase(node)
        self.rewriter.apply()
        return lost

    def _rows(self, node: Node) -> Value:
        """The gradients of the rows that parts have got ids of."""
        value, width = node.operands[0], node.operands[0].shape[-1]
        if is_filled(value) and (fill := value.node) is not None:
            shape, at = [self.d, self.p, self.e, self.room, width], {0: self.of_d, 1: self.of_p}
            return self._call(node, fill.op, shape, *fill.args[1:], at=at, how=fill.kwargs)
        if value.type.ndim > 2:
            value = self._call(node, aten.reshape.default, value, [self.count, width])
        return self._to_parts(node, self._packed(node, self._blocks(value, node), self.slots))
