"""embedding-tables: a table that is only looked up in is computed with where it is stored.

A data axis that shards a parameter says how it is stored, and the table would be gathered, its dense gradient
reduce-scattered. Where a batch looks up fewer rows than the table has, each rank looks up in its own rows or columns
instead: ids and rows are sent.

    parameter %w : f32[8000{dp}, 64]                  rows                            columns: [8000, 64{dp}]
      %1 = aten.embedding(%w, %ids)    n0{dp}   ->    v{dp}: [512, 64] +{dp}          d{dp}: [512, 64{dp}]
      %9 = aten.embedding_dense_backward(%8, %ids)    v{dp}: %8 gathered              d{dp}: %8 by an all-to-all

(Vocabulary-parallel lookups are those of Megatron-LM, Shoeybi et al., 2019; tables sharded over the ranks of a
data-parallel batch those of DLRM, Naumov et al., 2019, and TorchRec.)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from shardfx.ir.capture.optimizer.sparse_rows import row_counts
from shardfx.ir.graph import Graph, Input, InputKind, Node, OutputKind, Phase, Value
from shardfx.ir.ops.computing.table_ids import GRADIENT, LARGEST, LOOKUP, narrow_ids
from shardfx.ir.ops.traits import is_cast
from shardfx.ir.program.store_layout import as_made
from shardfx.ir.rewriter import Rewriter
from shardfx.ir.rules.strategy import as_placed, factor_shardings
from shardfx.ir.spec import Spec

from .base import SHARDED, Pass, PassContext
from .sharding.seeds import as_used, strip

aten = torch.ops.aten
TABLE = ("v", "d")
"""The factors of the table's dims in the rules of both."""
SUMMED = (aten.sum.dim_IntList, GRADIENT, aten.masked_fill.Scalar, aten.mul.Tensor)
"""What sums rows by bags is made of (:mod:`shardfx.ir.capture.canonical.embedding_bags`)."""
SPREAD = (aten.expand.default, aten.unsqueeze.default, LOOKUP, aten.masked_fill.Scalar, aten.mul.Tensor)
"""What gives each row the gradient of its bag is made of."""


@dataclass(frozen=True)
class EmbeddingTables(Pass):
    """Look up in embedding tables where they are stored, where that sends less than the tables."""

    name: ClassVar[str] = "embedding-tables"
    requires: ClassVar[frozenset[str]] = frozenset({SHARDED})

    def run(self, graph: Graph, context: PassContext) -> bool:
        users = graph.users()
        known = [_stored_table(graph, inp, users) for inp in graph.of_kind(InputKind.PARAMETER)]
        found = [table for table in known if table is not None and table.sends_less]
        _narrow(graph, found, context)
        for table in found:
            table.place(context)
        for text in dict.fromkeys(table.stored.hinted_by for table in found):
            names = [table.name for table in found if table.stored.hinted_by == text]
            tables = f"{names[0]} is" if len(names) == 1 else f"{len(names)} tables are"
            graph.notes.append(f"{text!r}: {tables} looked up in where stored: ids and rows are sent, no table")
        return bool(found)


@dataclass(frozen=True)
class _StoredTable:
    """A parameter whose stored placement has data axes, and the ops on it, up to its gradient."""

    name: str
    stored: Value
    forward: tuple[Node, ...]
    backward: tuple[Node, ...]
    users: Mapping[Value, Sequence[Node]]

    @property
    def sends_less(self) -> bool:
        """Whether the ids and the rows that are looked up, summed by bags, have fewer bytes than the table."""
        sent = 0
        for node in (node for node in self.forward if node.op is LOOKUP):
            summed = [*self._summed(node.outs[0]), node][-1]
            sent += summed.outs[0].type.nbytes + node.operands[1].type.nbytes
        return sent < self.stored.type.nbytes

    def place(self, context: PassContext) -> None:
        """Give the lookups and their gradients the strategy by which the table stays where it is stored."""
        spec, mesh = self.stored.spec, context.planner.mesh
        assert spec is not None
        own, axes = dict(zip(TABLE, spec.dims, strict=True)), set(spec.axes)

        def moved(node: Node, seen: Mapping[Value, Spec]) -> None:
            """Place a node as its operands are, without the axes of the table where nothing is seen of them."""

            def of(value: Value) -> Spec:
                assert value.spec is not None
                return seen.get(value) or as_used(value.spec, axes, value, mesh)

            node.strategy = as_placed(context.cache.rule(node), node, mesh, of)
            node.outs[0].spec = node.strategy.results[0]

        for node in (*self.forward, *self.backward):
            if node.op is GRADIENT:
                value, spread = node.operands[0], self._spread(node)
                first = spread[0].operands[0] if spread else value
                assert first.spec is not None
                rows, last = as_used(first.spec, axes, first, mesh), first.type.ndim - 1
                seen = {first: rows.with_dim(last, spec.dims[1]) if first.shape[last] > 1 else rows}
                for each in spread:
                    moved(each, seen)
                    seen = {value: value.spec for value in each.outs if value.spec is not None}
            if node.op in (LOOKUP, GRADIENT):
                rule = context.cache.rule(node)
                others = factor_shardings(rule, node, mesh)
                others = {f: strip(sharding, axes, rule.sizes[f], mesh) for f, sharding in others.items()}
                shardings = {f: each for f, each in {**others, **own}.items() if each.axes and rule.sizes[f] > 1}
                node.strategy = context.cache.strategy(rule, shardings)
            else:
                node.strategy = as_placed(context.cache.rule(node), node, mesh)
            node.outs[0].spec = node.strategy.results[0]
            if node.op is LOOKUP:
                for each in self._summed(node.outs[0]):
                    first = each.operands[0]
                    assert first.spec is not None
                    moved(each, {first: first.spec})

    def _summed(self, rows: Value) -> list[Node]:
        """The nodes that follow a lookup up to the smallest value that is made of its rows alone: the sums of bags."""
        chain, best, least = list[Node](), 0, rows.type.numel
        while rows.hint is None and len(self.users[rows]) == 1:
            (node,) = self.users[rows]
            if node.op not in SUMMED or node.phase is not Phase.FORWARD or node.operands[0] is not rows:
                break
            chain.append(node)
            (rows,) = node.outs
            if rows.type.numel < least:
                best, least = len(chain), rows.type.numel
        return chain[:best]

    def _spread(self, node: Node) -> list[Node]:
        """The nodes that make gradients of rows of a smaller value: those of bags."""
        chain, best, least = list[Node](), 0, node.operands[0].type.numel
        value = node.operands[0]
        while value.node is not None and value.node.op in SPREAD and self.users[value] == [node]:
            node = value.node
            chain.append(node)
            value = node.operands[0]
            if value.type.numel < least:
                best, least = len(chain), value.type.numel
        return chain[:best][::-1]


def _narrow(graph: Graph, tables: Sequence[_StoredTable], context: PassContext) -> None:
    """Send ids in 32 bits: those that are gathered."""
    rewriter, users = Rewriter(graph, context.rules), dict[Value, list[Node]]()
    sizes: dict[Value, int] = {}
    for table in tables:
        for node in (node for node in (*table.forward, *table.backward) if node.op in (LOOKUP, GRADIENT)):
            ids, spec = node.operands[1], table.stored.spec
            gathered = ids.spec is not None and spec is not None and {*ids.spec.axes} & {*spec.axes}
            if ids.type.dtype is torch.int64 and gathered and table.stored.shape[0] < LARGEST:
                users.setdefault(ids, []).append(node)
                sizes[ids] = max(sizes.get(ids, 0), table.stored.shape[0])
    for ids, size in sizes.items():
        made = rewriter.call(narrow_ids, ids, size, like=users[ids][0], why="ids are sent in 32 bits")
        first = min(users[ids], key=graph.nodes.index)
        rewriter.replace(ids, rewriter.before(first, made).outs[0], users=users[ids])
    if rewriter.apply():
        graph.rename()


def _stored_table(graph: Graph, inp: Input, users: Mapping[Value, Sequence[Node]]) -> _StoredTable | None:
    """The table that a parameter is; None where it is none, is used otherwise, or stored over no data axis."""
    value = inp.value
    hint, spec = value.hint, value.spec
    if value.type.ndim != 2 or hint is None or spec is None or set(spec.axes) <= set(hint.axes):
        return None
    made = [as_made(each.value) for each in graph.outputs if each.kind is OutputKind.GRADIENT and each.name == inp.name]
    forward, backward = list(_uses(value, users)), list(_makers(made))
    uses = all(is_cast(node) or (node.op is LOOKUP and node.pin is None) for node in forward)
    makes = all(is_cast(node) or node.op in (GRADIENT, aten.add.Tensor) for node in backward)
    looked_up = uses and any(node.op is LOOKUP for node in forward)
    plain = not any(each.parts for each in spec.dims)
    fits = looked_up and makes and plain
    return (
        _StoredTable(inp.name, value, tuple(forward), (*backward, *row_counts(graph, inp.name)), users)
        if fits
        else None
    )


def _uses(value: Value, users: Mapping[Value, Sequence[Node]]) -> Iterator[Node]:
    """The nodes that use a table before the update, and those that use casts of it."""
    for node in users[value]:
        if node.phase is not Phase.UPDATE:
            yield node
            if is_cast(node):
                yield from _uses(node.outs[0], users)


def _makers(values: Iterable[Value]) -> Iterator[Node]:
    """The nodes that make a gradient of gradients of rows, in order; of what is made otherwise, the last one."""
    for node in (value.node for value in values):
        if node is not None:
            if is_cast(node) or node.op is aten.add.Tensor:
                yield from _makers(node.operands)
            yield node
