"""Laws of rows of tables that ids are sent for (:mod:`shardfx.ir.ops.computing.table_ids`): as rows of experts are
(:mod:`.expert_laws`), each is of one id, in whatever order they are::

    part, numbers = row_numbers(blocks(ids), g, padding)          sent as take_rows(numbers, slots), by part
    numbered_rows(w, rows(numbers)) = rows(embedding(w, ids))
    numbered_sums(rows(x), rows(numbers), g) = embedding_dense_backward(x, ids, p g, padding)

That each id has a place is an assumption, which a flag checks in each step: of those beyond the table, too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from shardfx.ir.graph import Node, Value
from shardfx.ir.ops.computing.table_ids import GRADIENT, LOOKUP, numbered_rows, numbered_sums, row_numbers
from shardfx.ir.spec import TensorType

from .expert_laws import ExpertRows, Route, maker_of
from .head_copies import Made, TermOf, Types

aten = torch.ops.aten


class Numbers(NamedTuple):
    """The numbers of rows: the terms of their parts and of the ids ``[n 1]``, the rows of a part, and the padding."""

    parts: int
    ids: int
    size: int
    padding: int


@dataclass
class ExchangedRows(ExpertRows):
    """The terms of rows of tables, and of rows by expert."""

    _numbered: dict[int, Numbers] = field(default_factory=dict)
    _looked_up: dict[tuple[int, int], int] = field(default_factory=dict)
    _summed: dict[tuple[int, int, int, int], int] = field(default_factory=dict)
    """Rows ``[n 1 h]`` by table and ids ``[n 1]``; gradients of a table by those of rows, ids, its size and padding."""

    def apply(self, node: Node, term: TermOf, call: Callable[[Node, TermOf, Types], Made], types: Types) -> Made | None:
        """The terms of a node's results; None where these laws do not tell."""
        if node.op is row_numbers:
            return self._numbers(node, term)
        if node.op is numbered_rows:
            return self._found(node, term)
        if node.op is numbered_sums:
            return self._sums(node, term)
        if node.op is LOOKUP:
            table, ids = node.operands[:2]
            known = self._looked_up.get((term(table), self._flat(term(ids), ids, node)))
            return None if known is None else (self.reshaped(known, node.outs[0].type, node),)
        if node.op is GRADIENT:
            rows, ids = node.operands
            key = self._gradients(rows, term(rows), ids.type.numel), self._flat(term(ids), ids, node)
            known = None if node.args[4] else self._summed.get((*key, *node.args[2:4]))
            return None if known is None else (known,)
        return super().apply(node, term, call, types)

    def _gradients(self, rows: Value, term: int, count: int) -> int:
        """The term of gradients of ``count`` rows, whatever their shape; of one number, that of ``[n 1 h]``."""
        fill = self._fills.get(self._base(term))
        type = TensorType((count, 1, rows.shape[-1]), rows.type.dtype)
        return self._base(term) if fill is None else self._filled(fill, type)

    def _numbers(self, node: Node, term: TermOf) -> Made | None:
        ids, size, padding = node.args
        base, order = self._tokens(term(ids))
        flat, types = self._flat(base, ids, node), [TensorType((ids.type.numel, 1), v.type.dtype) for v in node.outs]
        parts, numbers = self.make(("row numbers", flat, size, padding), types, node)
        assert parts is not None and numbers is not None
        self._numbered[numbers] = Numbers(parts, flat, size, padding)
        return tuple(self._in_blocks(n, order, v.type, node) for n, v in zip((parts, numbers), node.outs, strict=True))

    def _slots(self, node: Node, term: TermOf, made: Made) -> Made:
        of_table = any(each.parts == self._tokens(term(node.operands[0]))[0] for each in self._numbered.values())
        maker = maker_of(node)  # by which unchecked_rows knows that ids without a place are to be counted
        return made if of_table and (maker is None or maker.op is not row_numbers) else super()._slots(node, term, made)

    def _sent(self, numbers: Value, term: int) -> tuple[Route, Numbers] | None:
        """The route of numbers that parts have got, and what they are."""
        found = self._rows.get(self._base(term))
        known = None if found is None else self._numbered.get(self._base(found.pairs))
        if found is None or known is None or found.stage != "parts":
            return None
        route = found.route
        fits = numbers.shape == (route.d, route.p, route.e, route.room) and route.experts == route.p
        return (route, known) if fits and route.ids == known.parts else None

    def _found(self, node: Node, term: TermOf) -> Made | None:
        table, numbers = node.operands
        sent = self._sent(numbers, term(numbers))
        if sent is None or table.shape[0] != sent[1].size * sent[0].p:
            return None
        route, known = sent
        key = term(table), known.ids
        if key not in self._looked_up:
            w, ids = Value(table.type), Value(self.types[known.ids])
            type = TensorType((route.shape[0], 1, table.shape[1]), table.type.dtype)
            self._looked_up[key] = self._one(node, LOOKUP, (w, ids), type, {w: key[0], ids: key[1]})
        return (self._made(self._looked_up[key], route, "parts", node.outs[0].type, node),)

    def _sums(self, node: Node, term: TermOf) -> Made | None:
        (rows, numbers), size = node.operands, node.args[2]
        sent, found = self._sent(numbers, term(numbers)), self._rows.get(self._base(term(rows)))
        if sent is None or rows.shape[:-1] != numbers.shape or size != sent[1].size:
            return None
        route, known = sent
        filled = self._base(term(rows)) in self._fills
        if not filled and (found is None or found.stage != "parts" or found.route != route):
            return None
        of = term(rows) if found is None else found.pairs
        of, count = self._gradients(rows, of, route.shape[0]), size * route.p
        key = of, known.ids, count, known.padding
        if key not in self._summed:
            ids, grad = (
                Value(self.types[known.ids]),
                Value(TensorType((route.shape[0], 1, rows.shape[-1]), rows.type.dtype)),
            )
            args, terms = (grad, ids, *key[2:], False), {grad: self.reshaped(of, grad.type, node), ids: known.ids}
            self._summed[key] = self._one(node, GRADIENT, args, node.outs[0].type, terms)
        return (self._summed[key],)
