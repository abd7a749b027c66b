"""The cost of one planned node, by lowering and replaying it alone.

    >>> costs = NodeCosts(graph.mesh, rules)
    >>> costs.of(node)                                        # an mm of [256{dp}, 64{tp}] and [64{tp}, 64]
    Cost(work={Work(flops=524288.0, touched=..., dtype=torch.float32, kind='mm'): 1}, sent={})
    >>> total(costs.of(node) for node in graph.nodes).seconds(Machine.load("h100-dgx"), graph.mesh)

A node is lowered alone, as it would be within its program: what is costed is what runs. Operands are taken to be dense.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shardfx.ir.graph import Graph, Input, InputKind, Node, Output, OutputKind, Value, substitute
from shardfx.ir.mesh import Mesh
from shardfx.ir.ops.alike import alike
from shardfx.ir.program.lower import lower
from shardfx.ir.rules.book import RuleBook
from shardfx.ir.spec import Spec

from .amounts import Cost
from .replay import replay


def node_cost(node: Node, mesh: Mesh, book: RuleBook) -> Cost:
    """The cost of one run of a node on rank 0, which has the largest shards. The node has a strategy (or placements on
    its values); communication may not be explicit yet."""
    specs = node.strategy.operands if node.strategy is not None else tuple(value.spec for value in node.operands)
    twins: dict[tuple[Value, Spec | None], Value] = {}
    for value, spec in zip(node.operands, specs, strict=True):
        twins.setdefault((value, spec), Value(value.type, None, 0, f"operand{len(twins)}", spec))
    needs = iter(specs)  # a value that is used twice may be needed in two placements

    def twin(value: Value) -> Value:
        return twins[value, next(needs)]

    alone = replace(node, args=substitute(node.args, twin), results=[])
    alone.kwargs = {key: substitute(arg, twin) for key, arg in node.kwargs.items()}
    given = node.strategy.results if node.strategy is not None else tuple(value.spec for value in node.outs)
    placed = dict(zip(node.outs, given, strict=True))
    alone.results = [None if v is None else Value(v.type, alone, v.index, v.name, placed[v]) for v in node.results]
    graph = Graph(
        mesh,
        [Input(InputKind.ARGUMENT, each.name, each) for each in twins.values()],
        [alone],
        [Output(OutputKind.RESULT, f"results.{i}", value) for i, value in enumerate(_complete_results(alone, mesh))],
    )
    return replay(lower(graph, 0, book, {OutputKind.RESULT})).cost


def _complete_results(node: Node, mesh: Mesh) -> list[Value]:
    """The results of a node; of one in a loop, those that are complete only after it."""
    axes = [{*v.spec.axes, *v.spec.partial_axes} if v.spec is not None else set[str]() for v in node.outs]
    iterations = {axis for each in axes for axis in each if mesh[axis].loop}
    return [value for value, its in zip(node.outs, axes, strict=True) if iterations <= its]


class NodeCosts:
    """Costs of nodes on one mesh, cached by op, types, placements and other arguments."""

    def __init__(self, mesh: Mesh, book: RuleBook) -> None:
        self._mesh, self._book = mesh, book
        self._known: dict[Any, Cost] = {}

    def of(self, node: Node) -> Cost:
        """The cost of a node (see :func:`node_cost`)."""
        placed = node.strategy or (tuple(v.spec for v in node.operands), tuple(v.spec for v in node.outs))
        key = (alike(node), placed)
        if key not in self._known:
            self._known[key] = node_cost(node, self._mesh, self._book)
        return self._known[key]

    def __len__(self) -> int:
        return len(self._known)
