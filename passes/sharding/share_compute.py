"""Sharding of redundant compute: ops that all ranks of a data axis would compute though hints shard the batch over it.

An op in the middle of a mixture of experts may need all tokens (a sort), and every rank has all of its result. What
comes behind is sharded again, by rows, where a product begins: a rank's shard of a replicated value costs nothing. What
remains redundant, as of a batch of 2 for three ranks, is reported (:mod:`shardfx.redundant_compute`).

    %4 = sort(%3) : [256]                       %4 = sort(%3) : [256]
    %5 = index(%2, [%4]) : [256, 48]      ->    %5 = index(%2, [%4 : [256{dp}]]) : [256{dp}, 48]
    %6 = grouped_mm(%5, ...) : [256, 96]        %6 = grouped_mm(%5, ...) : [256{dp}, 96]
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from shardfx.ir.cost.flops import flops_of
from shardfx.ir.dim_sharding import REPLICATED, DimSharding
from shardfx.ir.graph import Graph, InputKind, Node, Value
from shardfx.ir.ops.traits import is_heavy
from shardfx.ir.rules.strategy import place
from shardfx.ir.spec import Spec
from shardfx.passes.base import derived

from .fixpoint import Propagation
from .seeds import BY_PASS, Seed

WORTH_SHARDING = 0.01
"""Of all FLOPs of the program, the part from which on they are sharded."""


def share_compute(graph: Graph, axes: Iterable[str], propagation: Propagation) -> bool:
    """Shard by rows, over these (data) axes, products that would be redundant on their ranks, where possible; returns
    whether any was."""
    resolve = propagation.conflicts.resolve
    flops = {node: flops_of(node) for node in propagation.state.nodes if is_heavy(node)}
    parameters = derived(graph, (inp.value for inp in graph.of_kind(InputKind.PARAMETER)), every=True)
    changed = False
    for axis in (axis for axis in sorted(axes) if graph.mesh.extent((axis,)) > 1):
        hinted = ((inp.value, inp.value.hint) for inp in graph.inputs if inp.value.type.ndim)
        behind = derived(graph, (value for value, hint in hinted if hint is not None and axis in hint.dims[0].axes))
        redundant = [n for n in flops if behind & {*n.operands} and axis not in _axes(resolve(n, True)[0])]
        if sum(flops[node] for node in redundant) <= WORTH_SHARDING * sum(flops.values()):
            continue
        for node in redundant:
            shardings, _ = resolve(node, True)
            seed = None if axis in _axes(shardings) else _by_rows(node, axis, shardings, propagation, parameters)
            if seed is not None:
                propagation.seed([seed])
                propagation.run([seed.value])
                changed = True
    return changed


def _by_rows(
    node: Node, axis: str, shardings: Mapping[str, DimSharding], propagation: Propagation, parameters: set[Value]
) -> Seed | None:
    """The node's result sharded over the axis too, along its first dim that no parameter has and whose shards are not
    empty."""
    state = propagation.state
    rule, value = state.rules[node], node.outs[0]
    dims = rule.results[value.index]
    assert dims is not None
    pairs = zip(node.operands, rule.operands, strict=True)
    kept = {f for v, tensor in pairs if v in parameters for dim in tensor for f in dim}
    fixed = kept | rule.replicated
    for factor in (f for dim in dims for f in dim if f not in fixed and not shardings.get(f, REPLICATED).parts):
        sharding = DimSharding((*shardings.get(factor, REPLICATED).axes, axis))
        if value not in state.closed and state.feeds(sharding, rule.sizes[factor]):
            spec = Spec(place(dims, {**shardings, factor: sharding}, rule, state.mesh))
            return Seed(value, spec, f"{BY_PASS}'propagate', which shares work over {axis}", closed=False)
    return None


def _axes(shardings: Mapping[str, DimSharding]) -> set[str]:
    return {axis for sharding in shardings.values() for axis in sharding.axes}
