"""What would be redundant compute over a data axis, though hints shard the batch over it: it is sharded by rows.

An op in the middle of a mixture of experts may need all tokens (a sort), and every rank has all of its result. What
comes behind is sharded again, by rows, where a product begins: of a replicated value a rank's shard costs nothing. What
remains redundant, as of a batch of 2 for three ranks, is reported (:mod:`shardfx.redundant_compute`).

    %4 = sort(%3) : [256]                       %4 = sort(%3) : [256]
    %5 = index(%2, [%4]) : [256, 48]      ->    %5 = index(%2, [%4 : [256{dp}]]) : [256{dp}, 48]
    %6 = grouped_mm(%5, ...) : [256, 96]        %6 = grouped_mm(%5, ...) : [256{dp}, 96]
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from shardfx.ir.cost.flops import flops_of
from shardfx.ir.dim_sharding import WHOLE, DimSharding
from shardfx.ir.graph import Graph, InputKind, Node, Value
from shardfx.ir.ops.alike import alike
from shardfx.ir.ops.traits import is_heavy
from shardfx.ir.rules.strategy import place
from shardfx.ir.spec import Spec

from .sharding.fixpoint import Propagation
from .sharding.seeds import BY_PASS, Seed

WORTH_SHARDING = 0.01
"""Of all FLOPs of the program, the part from which on they are sharded."""


def share_lost_work(graph: Graph, axes: Iterable[str], state: Propagation) -> bool:
    """Shard by rows, over these (data) axes, the products that are not shared between their ranks, where they can be;
    says whether it did."""
    flops = _flops_of_all(graph)
    alone = _of_parameters_alone(graph)
    changed = False
    for axis in _of_ranks(graph, axes):
        behind = _behind(graph, axis)
        lost = {node for node in flops if node in behind and axis not in _axes(state.conflicts.resolve(node, True)[0])}
        if sum(flops[node] for node in lost) <= WORTH_SHARDING * sum(flops.values()):
            continue
        for node in (node for node in flops if node in lost):
            shardings, _ = state.conflicts.resolve(node, True)
            seed = None if axis in _axes(shardings) else _by_rows(node, axis, shardings, state, alone)
            if seed is not None:
                state.seed([seed])
                state.run([seed.value])
                changed = True
    return changed


def _by_rows(
    node: Node, axis: str, shardings: Mapping[str, DimSharding], state: Propagation, alone: set[Value]
) -> Seed | None:
    """The node's result sharded over the axis too, along the first of its dims that no parameter has and that feeds
    all."""
    held = state.held
    rule, value = held.rules[node], node.outs[0]
    dims = rule.results[value.index]
    assert dims is not None
    kept = {
        f for v, tensor in zip(node.operands, rule.operands, strict=True) if v in alone for dim in tensor for f in dim
    }
    rows = (f for dim in dims for f in dim if f not in kept | rule.whole and not shardings.get(f, WHOLE).parts)
    for factor in rows:
        sharding = DimSharding((*shardings.get(factor, WHOLE).axes, axis))
        if value not in held.closed and held.feeds(sharding, rule.sizes[factor]):
            spec = Spec(place(dims, {**shardings, factor: sharding}, rule, held.mesh))
            return Seed(value, spec, f"{BY_PASS}'propagate', which shares work over {axis}", closed=False)
    return None


def _of_parameters_alone(graph: Graph) -> set[Value]:
    """Parameters, and what is made of nothing else."""
    found = {given.value for given in graph.of_kind(InputKind.PARAMETER)}
    for node in graph.nodes:
        if node.operands and all(value in found for value in node.operands):
            found.update(node.outs)
    return found


def _flops_of_all(graph: Graph) -> dict[Node, int]:
    """The operations of every node that has many."""
    priced: dict[object, int] = {}
    flops: dict[Node, int] = {}
    for node in graph.nodes:
        if is_heavy(node):
            key = alike(node)
            if key not in priced:
                priced[key] = flops_of(node)
            flops[node] = priced[key]
    return flops


def _of_ranks(graph: Graph, axes: Iterable[str]) -> Iterator[str]:
    return (axis for axis in sorted(axes) if graph.mesh.extent((axis,)) > 1)


def _axes(shardings: Mapping[str, DimSharding]) -> set[str]:
    return {axis for sharding in shardings.values() for axis in sharding.axes}


def _behind(graph: Graph, axis: str) -> set[Node]:
    """The nodes that are made of an input whose hint shards it over the axis."""
    sharding = {
        given.value
        for given in graph.inputs
        if given.value.hint is not None and given.value.type.ndim and axis in given.value.hint.dims[0].axes
    }
    found: set[Node] = set()
    for node in graph.nodes:
        if any(value in sharding for value in node.operands):
            found.add(node)
            sharding.update(node.outs)
    return found
