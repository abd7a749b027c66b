"""Merging of halo exchanges: one wider exchange for several ops; rows of overlapping tiles are recomputed between.

    halo(x) by o-1 to o+1                        halo(x) by o-2 to o+2
    y = convolution : 64{h}                      y = convolution : 64 for 64{h} by o-1 to o+1
    halo(relu(y)) by o-1 to o+1           ->     relu(y) : 64 for 64{h} by o-1 to o+1
    z = convolution : 64{h}                      z = convolution : 64{h}

A value whose tiles overlap is another placement of it. Who needs tiles of it, or fewer rows, takes its part.
"""

from __future__ import annotations

from shardfx.ir.dim_sharding import DimSharding, project
from shardfx.ir.graph import Node, Strategy, Value
from shardfx.ir.node import draw_slot
from shardfx.ir.shards import has_rows
from shardfx.ir.spec import Spec

from .trial_placement import TrialPlacement


def merged(base: TrialPlacement, at_any_cost: bool) -> TrialPlacement:
    """The placement with merged exchanges: wherever that saves one, or where it takes less time."""
    placement = base
    for value in list(base.costs.graph.values()):
        if not placement.exchanges(value) or not _may_overlap(value, placement):
            continue
        trial, touched, nodes = _wider(placement, value)
        if not nodes:
            better = False
        elif at_any_cost:
            counts = (sum(len(each.exchanges(v)) for v in touched) for each in (trial, placement))
            better = next(counts) < next(counts)
        else:
            better = trial.seconds(touched, nodes) < placement.seconds(touched, nodes)
        placement = trial if better else placement
    return placement


def _may_overlap(value: Value, placement: TrialPlacement) -> bool:
    """Whether a value may be computed with halo rows: not if it is random, as it is drawn by tiles."""
    node, spec = value.node, placement.spec(value)
    if node is None or value.hint is not None or spec.partial or node.pin is not None or draw_slot(node) is not None:
        return False
    return not any(placement.mesh[axis].loop for axis in spec.axes)


def _wider(placement: TrialPlacement, value: Value) -> tuple[TrialPlacement, set[Value], set[Node]]:
    """Compute a value in all rows in which it is used, and so on up to operands that are exchanged anyway: the new
    placement, the values whose moves change, and the nodes that are computed otherwise; no nodes if that fails."""
    trial = placement.copy()
    place = {node: number for number, node in enumerate(placement.costs.graph.nodes)}
    touched, nodes, todo = {value}, set[Node](), [value]
    while todo:
        todo.sort(key=lambda each: -1 if each.node is None else place[each.node])
        each = todo.pop()
        node, rows = each.node, _all_rows(trial, each)
        assert node is not None
        made = _made_in(trial, node, each, rows) if rows is not None else None
        if made is None:
            if each is value:
                return placement, touched, set()
            continue
        trial.changed[node] = made
        nodes.add(node)
        touched.update(node.outs)
        for operand in dict.fromkeys(node.operands):
            touched.add(operand)
            new = trial.exchanges(operand) and not placement.exchanges(operand)
            if new and operand not in todo and _may_overlap(operand, trial):
                todo.append(operand)
    return trial, touched, nodes


def _all_rows(placement: TrialPlacement, value: Value) -> Spec | None:
    """The rows that cover all uses of a value, and its tiles; None if there are none such, or an axis shards one dim
    where it is made and another where it is used."""
    made = placement.spec(value)
    needs = [made, *placement.exchanges(value)]
    if any({*need.dims[dim].axes} - {*sharding.axes} for need in needs for dim, sharding in enumerate(made.dims)):
        return None
    dims: list[DimSharding] = []
    for dim, sharding in enumerate(made.dims):
        options = [
            made.with_dim(dim, each) for each in (sharding, *(n.dims[dim] for n in needs if n.dims[dim] != sharding))
        ]
        elsewhere = {axis for other, own in enumerate(made.dims) if other != dim for axis in own.axes}
        if any(elsewhere & set(each.dims[dim].axes) for each in options):  # no halo exchange: another dim is sharded
            return None
        for each in options:
            if all(has_rows(each, other, value.shape, placement.mesh) for other in options):
                dims.append(each.dims[dim])
                break
        else:
            return None
    return Spec(tuple(dims), made.partial)


def _made_in(placement: TrialPlacement, node: Node, value: Value, rows: Spec) -> Strategy | None:
    """The strategy of a node that computes a value in these rows; None if there is none."""
    rule, shardings = placement.rule(node), dict(placement.shardings(node))
    dims = rule.results[value.index]
    assert dims is not None
    for d, (dim, wanted, now) in enumerate(zip(dims, rows.dims, placement.spec(value).dims, strict=True)):
        if wanted == now:
            continue
        factors = project(wanted, value.shape[d], rule.dim_sizes(dim), placement.mesh)
        if factors is None:
            return None
        for factor, sharding in zip(dim, factors, strict=True):
            if sharding.axes and shardings.get(factor, DimSharding()).axes != sharding.axes:
                return None
            shardings[factor] = sharding
    made = placement.shard(node, shardings)
    return made if made is not None and made.results[node.outs.index(value)] == rows else None
