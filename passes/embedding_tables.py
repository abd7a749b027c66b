"""embedding-tables: a table that is only looked up in is computed with where it is stored.

A data axis that shards a parameter says how it is stored, and the table would be gathered, its dense gradient
reduce-scattered. Where a batch looks up fewer rows than the table has, each rank looks up in its own rows or columns
instead: ids and rows are sent.

    parameter %w : f32[8000{dp}, 64]                  rows                            columns: [8000, 64{dp}]
      %1 = aten.embedding(%w, %ids)    n0{dp}   ->    v{dp}: [512, 64] +{dp}          d{dp}: [512, 64{dp}]
      %9 = aten.embedding_dense_backward(%8, %ids)    v{dp}: %8 gathered              d{dp}: %8 by an all-to-all

Where a table is sharded by rows, ids may be sent to the ranks of their rows alone (:mod:`.row_exchange`), if that is
less. (Vocabulary-parallel lookups are those of Megatron-LM, Shoeybi et al., 2019; tables sharded over the ranks of a
data-parallel batch those of DLRM, Naumov et al., 2019, and TorchRec.)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from shardfx.ir.capture.canonical.embedding_bags import OF_BAGS
from shardfx.ir.capture.optimizer.sparse_rows import row_counts
from shardfx.ir.errors import Error
from shardfx.ir.graph import Graph, Input, InputKind, Node, OutputKind, Phase, Value
from shardfx.ir.ops.computing.table_ids import GRADIENT, LARGEST, LOOKUP, narrow_ids
from shardfx.ir.ops.traits import is_cast
from shardfx.ir.program.store_layout import as_made
from shardfx.ir.rewriter import Rewriter
from shardfx.ir.rules.strategy import as_placed, factor_shardings
from shardfx.ir.spec import Spec

from .base import SHARDED, Pass, PassContext
from .row_exchange import TableExchange
from .sharding.seeds import as_used, strip
from .token_blocks import add_overflow, is_filled, overflow

aten = torch.ops.aten
TABLE = ("v", "d")
"""The factors of the table's dims in the rules of both."""
SUMMED = (aten.sum.dim_IntList, GRADIENT, aten.masked_fill.Scalar, aten.mul.Tensor)
"""What sums rows by bags is made of (:mod:`shardfx.ir.capture.canonical.embedding_bags`)."""
SPREAD = (aten.expand.default, aten.unsqueeze.default, LOOKUP, aten.masked_fill.Scalar, aten.mul.Tensor)
"""What gives each row the gradient of its bag is made of."""


LADDER = (0.0, 2.0)
"""The least capacities, each for a step without room with the one before; behind them partial rows are summed."""
LOST = "ids of tables without room"


@dataclass(frozen=True)
class EmbeddingTables(Pass):
    """Look up in embedding tables where they are stored, where that sends less than the tables.

    Args:
        capacity: the room for ids from one rank to another, in times the mean (for few ids it is more), where ids are
            sent to the ranks of their rows. No id is dropped: a step that has more runs again with more room. 0: ids
            are sent to all ranks, and partial rows are summed.
    """

    name: ClassVar[str] = "embedding-tables"
    requires: ClassVar[frozenset[str]] = frozenset({SHARDED})

    capacity: float = 1.25
    room: int = field(
        default=0, metadata={"help": "how often a step found too little room: 1 twice the mean, 2 sums of partial rows"}
    )

    def __post_init__(self) -> None:
        if (
            isinstance(self.capacity, bool)
            or not isinstance(self.capacity, (int, float))
            or not (0 <= self.capacity < math.inf)
        ):
            expected = "times the mean number of ids, as 1.25; 0 sends ids to all ranks"
            raise Error(
                "no capacity for ids", where="EmbeddingTables(capacity=...)", expected=expected, got=self.capacity
            )

    def run(self, graph: Graph, context: PassContext) -> bool:
        users = graph.users()
        known = [_stored_table(graph, inp, users) for inp in graph.of_kind(InputKind.PARAMETER)]
        found = [table for table in known if table is not None and table.sends_less]
        capacity = max(LADDER[self.room], self.capacity) if self.capacity and self.room < len(LADDER) else 0
        exchanged = [table for table in found if capacity and table.exchanges(graph, context, capacity)]
        _narrow(graph, [table for table in found if table not in exchanged], context)
        for table in found:
            if table in exchanged:
                table.exchange(graph, context, capacity)
            else:
                table.place(context)
        for text in dict.fromkeys(table.stored.hinted_by for table in found):
            names = [table.name for table in found if table.stored.hinted_by == text]
            tables = f"{names[0]} is" if len(names) == 1 else f"{len(names)} tables are"
            made = (as_made(o.value) for o in graph.outputs if o.kind is OutputKind.GRADIENT and o.name in names)
            summed = sorted({axis for value in made if value.spec for axis, _ in value.spec.partial})
            sent = f"and dense gradients over {', '.join(summed)}" if summed else "no table"
            graph.notes.append(f"{text!r}: {tables} looked up in where stored: ids and rows are sent, {sent}")
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
        lookups = [node for node in self.forward if node.op is LOOKUP]
        sent = sum(self._rows_sent(node) + node.operands[1].type.nbytes for node in lookups)
        return sent < self.stored.type.nbytes

    def exchanges(self, graph: Graph, context: PassContext, capacity: float) -> list[TableExchange]:
        """The exchanges of ids and rows, where they send less than ids to all ranks and sums of partial rows do."""
        made, to_all = list[TableExchange](), 0.0
        nodes = [node for node in (*self.forward, *self.backward) if node.op in (LOOKUP, GRADIENT)]
        for ids in dict.fromkeys(node.operands[1] for node in nodes):
            by_ids = [node for node in nodes if node.operands[1] is ids]
            each = TableExchange(graph, context, self.stored, by_ids, capacity)
            if not each.fits:
                return []
            made.append(each)
            of_ids = ids.type.numel * (4 if self.stored.shape[0] < LARGEST else ids.type.dtype.itemsize)
            to_all += (of_ids + sum(map(self._rows_sent, by_ids))) * (each.p - 1) / (each.p * each.d)
        return made if sum(each.sent for each in made) < to_all else []

    def exchange(self, graph: Graph, context: PassContext, capacity: float) -> None:
        """Send ids to the ranks of their rows, and rows back; count those without room."""
        place, lost = Rewriter(graph, context.rules).place, overflow(graph)
        for node in (node for node in self.forward if node.op is not LOOKUP):
            place(node)
        for each in self.exchanges(graph, context, capacity):
            lost = each.convert(lost)
        add_overflow(graph, LOST, lost)
        for node in (node for node in self.backward if node.op is not GRADIENT):
            place(node)
        graph.rename()

    def _rows_sent(self, node: Node) -> int:
        """The bytes that ranks add up of a lookup, or gather of a gradient, where they have ids of all ranks."""
        if node.op is LOOKUP:
            return [node, *self._summed(node.outs[0])][-1].outs[0].type.nbytes
        value, spread = node.operands[0], self._spread(node)
        return 0 if is_filled(value) else (spread[0].operands[0] if spread else value).type.nbytes

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
        chain = list[Node]()
        while rows.hint is None and len(self.users[rows]) == 1:
            (node,) = self.users[rows]
            if node.op not in SUMMED or node.phase is not Phase.FORWARD or node.operands[0] is not rows:
                break
            chain.append(node)
            (rows,) = node.outs
        return _to_smallest(chain, [node.operands[0] for node in chain], [node.outs[0] for node in chain])

    def _spread(self, node: Node) -> list[Node]:
        """The nodes that make gradients of rows of a smaller value: those of bags."""
        chain, value = list[Node](), node.operands[0]
        while value.node is not None and value.node.op in SPREAD and self.users[value] == [node]:
            node, value = value.node, value.node.operands[0]
            chain.append(node)
        return _to_smallest(chain, [node.outs[0] for node in chain], [node.operands[0] for node in chain])[::-1]


def _to_smallest(chain: list[Node], before: Sequence[Value], after: Sequence[Value]) -> list[Node]:
    """The first nodes of a chain, up to the smallest value of which no earlier one is as small."""
    sizes = [value.type.numel for value in (*before[:1], *after)]
    return chain[: sizes.index(min(sizes))] if sizes else []


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
    if any(node.op in OF_BAGS for node in users[value]):
        graph.notes.append(f"{inp.name} is gathered: bags of mode='max', or with scale_grad_by_freq, are one kernel")
    made = [as_made(each.value) for each in graph.outputs if each.kind is OutputKind.GRADIENT and each.name == inp.name]
    forward, backward = list(_uses(value, users)), list(_makers(made))
    uses = all(is_cast(node) or (node.op is LOOKUP and node.pin is None) for node in forward)
    makes = all(is_cast(node) or node.op in (GRADIENT, aten.add.Tensor) for node in backward)
    looked_up = uses and any(node.op is LOOKUP for node in forward)
    if not looked_up or not makes or any(each.parts for each in spec.dims):
        return None
    return _StoredTable(inp.name, value, tuple(forward), (*backward, *row_counts(graph, inp.name)), users)


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
