"""table-rows: an embedding table that is only looked up in is stored in host memory; a step brings the rows it needs.

    parameter %w : f32[50000, 64]                    parameter %w : f32[50000, 64] in host
    forward:                                         forward:
                                                       %1 = memory.to_host(%ids)
      %1 = aten.embedding(%w, %ids)                    %2 = aten.embedding(%w, %1)                done on the host
                                              ->       %3 = memory.to_device(%2)                  the rows
    backward:                                        backward:
                                                       %8 = memory.to_host(%7)
      %8 = aten.embedding_dense_backward(%7, %ids)     %9 = aten.embedding_dense_backward(%8, %1)
    outputs:                                         outputs:
      gradient w = %8                                  gradient w = %9

So are its gradient, its states and their update there, and what else is as large; numbers that go into them are sent
there, and what follows from them (a norm) is fetched. What ranks reduce of it is reduced in host memory. (Rajbhandari
et al., ZeRO-Infinity, 2021, put states there; lookups are done where the table is stored as in Naumov et al., DLRM,
2019.)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from shardfx.ir.capture.optimizer.sparse_rows import row_counts
from shardfx.ir.errors import Error
from shardfx.ir.graph import Graph, Input, InputKind, Node, OutputKind, Phase, Value, op_name
from shardfx.ir.ops.pools.pool_ops import to_device, to_host
from shardfx.ir.ops.pools.transfer import HOST
from shardfx.ir.ops.table import OwnOp
from shardfx.ir.ops.traits import is_cast, is_view
from shardfx.ir.rewriter import Rewriter
from shardfx.passes.base import COMM_EXPLICIT, Pass, PassContext

from .module_patterns import matching_modules

aten = torch.ops.aten
LOOKUPS = (aten.embedding.default, aten._embedding_bag.default, aten._embedding_bag_forward_only.default)
"""Ops that look up rows of their first operand."""
BACK = (aten.embedding_dense_backward.default, aten._embedding_bag_backward.default)
"""Ops that compute the gradient of a table from the gradients of its rows."""
WHERE = "Hints(offload=('rows',))"


@dataclass(frozen=True)
class TableRows(Pass):
    """Store embedding tables in host memory, with their states, and bring the rows that are looked up.

    Args:
        modules: tables that are looked up in these modules (patterns of paths, as in ``Hints(recompute=...)``).
        min_numel: tables of fewer elements are not offloaded.

    Raises:
        Error: a pattern matches nothing; a table is used otherwise, too, as one that is tied to the head is.

    Example::

        Hints(offload=("rows",), optimizer=...)
        Hints(offload=(sx.Offload("rows", modules="tok_emb"),))
    """

    name: ClassVar[str] = "table-rows"
    requires: ClassVar[frozenset[str]] = frozenset({COMM_EXPLICIT})
    repeats: ClassVar[bool] = True

    modules: str | Sequence[str] = "**"
    min_numel: int = 2**14

    def run(self, graph: Graph, context: PassContext) -> bool:
        tables = list(self._tables(graph))
        loops = [axis.name for axis in graph.mesh.axes if axis.loop]
        if tables and loops:
            raise Error(
                "gradients of micro-batches are added up on the device, those of a table in host memory are not",
                where=WHERE,
                expected="a plan whose batch is done at once",
                got=f"iterations over {', '.join(loops)}",
                remedy="leave out Hints(grad_accumulation=...) and Hints(pipeline=...), or offload 'parameters'",
            )
        if not tables:
            graph.notes.append(f"no rows are offloaded: of {self.min_numel} elements and more no table is looked up in")
        for table in tables:
            _Table(graph, table).offload()
        return bool(tables)

    def _tables(self, graph: Graph) -> Iterator[Input]:
        """The parameters that are looked up by rows."""
        named = matching_modules(graph, self.modules, where=WHERE, root=True)
        looked_up = {_source(node.operands[0]) for node in named if node.op in LOOKUPS}
        for inp in graph.of_kind(InputKind.PARAMETER):
            if inp.value in looked_up and inp.value.type.numel >= self.min_numel and not inp.pool:
                yield inp


def _source(value: Value) -> Value:
    """The source of a value, before casts, gathers and views."""
    while value.node is not None and _only_moves(value.node):
        value = value.node.operands[value.index if len(value.node.operands) > 1 else 0]
    return value


def _only_moves(node: Node) -> bool:
    return isinstance(node.op, OwnOp) or is_cast(node) or is_view(node)


@dataclass
class _Table:
    """An offloaded table and the ops on it, from its lookup to the update."""

    graph: Graph
    table: Input
    in_host: dict[Node, None] = field(default_factory=dict)
    """The nodes that run in host memory."""

    def offload(self) -> None:
        """Store the table, and values of its size, in host memory."""
        states = [s for s in self.graph.of_kind(InputKind.STATE) if s.name.rpartition(".")[0] == self.table.name]
        stored = [self.table, *(each for each in states if each.value.type.shape == self.table.value.type.shape)]
        self._follow(stored)
        for inp in stored:
            inp.pool = HOST
        self._transfer({inp.name for inp in stored})
        self.graph.rename()

    def _follow(self, stored: Iterable[Input]) -> None:
        """Find the nodes that use the table, its gradient, or values of that size derived from them."""
        large, gradient = {inp.value for inp in stored}, self._gradient()
        for node in self.graph.nodes:
            if node not in gradient and large.isdisjoint(node.operands):
                continue
            if node.phase is not Phase.UPDATE and node not in gradient:
                taken = [value for value in node.operands if value in large]
                if not _only_moves(node) and not (node.op in LOOKUPS and taken == [node.operands[0]]):
                    raise self._more_than_rows(node)
            self.in_host[node] = None
            if node.op not in LOOKUPS:
                large.update(value for value in node.outs if value.type.numel >= self.table.value.type.numel)

    def _gradient(self) -> set[Node]:
        """The nodes that compute the table's gradient from gradients of rows, or count rows, and those that use it."""
        found: set[Node] = set()
        todo = [o.value for o in self.graph.outputs if o.kind is OutputKind.GRADIENT and o.name == self.table.name]
        while todo:
            node = todo.pop().node
            if node is None or node in found:
                continue
            found.add(node)
            before = [v for v in node.operands if v.type.shape == self.table.value.type.shape]
            if node.op not in BACK and not before:
                raise self._more_than_rows(node)
            todo += before if node.op not in BACK else []
        return found.union(row_counts(self.graph, self.table.name))

    def _more_than_rows(self, node: Node) -> Error:
        return Error(
            f"{self.table.name} is not only looked up in, so that rows of it are not all that a step takes",
            where=f"{op_name(node.op)}  {node.where}",
            expected="a table that nn.Embedding or nn.EmbeddingBag alone use, not one that is tied to a head",
            got=f"{op_name(node.op)} of it, or of its gradient",
            remedy="name other tables, sx.Offload('rows', modules=...), or offload all of it: 'parameters'",
        )

    def _transfer(self, names: set[str]) -> None:
        """Insert copies to the host of values needed there, and fetches of values used elsewhere."""
        rewriter, in_host = Rewriter(self.graph), self.in_host
        away = {inp.value for inp in self.graph.inputs if inp.pool}
        away.update(value for node in in_host for value in node.outs)
        copies: dict[Value, Value] = {}

        def copy(value: Value, user: Node | None = None) -> Value:
            """The copy of a value, before its first user on the host; or fetched from there, behind its producer."""
            if value not in copies:
                near = user or value.node
                assert near is not None
                node = rewriter.comm(to_host if user else to_device, value, like=near, why=f"for {self.table.name}")
                copies[value] = (rewriter.before if user else rewriter.after)(near, node).outs[0]
            return copies[value]

        for node in self.graph.nodes:
            for value in dict.fromkeys(node.operands):
                if node in in_host and value not in away:
                    rewriter.replace(value, copy(value, node), users=[node])
                elif node not in in_host and value.node in in_host:
                    rewriter.replace(value, copy(value), users=[node])
        for output in self.graph.outputs:
            if output.value.node in in_host and not (output.kind.is_given_away and output.name in names):
                rewriter.replace(output.value, copy(output.value), users=[output])
        rewriter.apply()
