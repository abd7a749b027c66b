"""One wider exchange of rows for several: what lies between is made in rows that overlap, the rim on both sides.

    halo(x) by o-1 to o+1                        halo(x) by o-2 to o+2
    y = convolution : 64{h}                      y = convolution : 64 for 64{h} by o-1 to o+1
    halo(relu(y)) by o-1 to o+1           ->     relu(y) : 64 for 64{h} by o-1 to o+1
    z = convolution : 64{h}                      z = convolution : 64{h}

A value whose tiles overlap is another placement of it. Who needs tiles of it, or fewer rows, takes its part.
"""

from __future__ import annotations

from shardfx.ir.dim_sharding import DimSharding, project
from shardfx.ir.graph import Node, Strategy, Value
from shardfx.ir.ops.traits import draw_slot
from shardfx.ir.shards import has_rows
from shardfx.ir.spec import Spec

from .placing import Placing


def merged(base: Placing, at_any_price: bool) -> Placing:
    """The placements in which exchanges are merged: wherever that saves one, or where it takes less time."""
    placing = base
    for value in list(base.costs.graph.values()):
        if not placing.exchanges(value) or not _may_overlap(value, placing):
            continue
        trial, touched, nodes = _wider(placing, value)
        if not nodes:
            continue
        if at_any_price:
            better = _count(trial, touched) < _count(placing, touched)
        else:
            better = trial.seconds(touched, nodes) < placing.seconds(touched, nodes)
        if better:
            placing = trial
    return placing


def _count(placing: Placing, values: set[Value]) -> int:
    return sum(len(placing.exchanges(value)) for value in values)


def _may_overlap(value: Value, placing: Placing) -> bool:
    """Whether the maker may make a value in other rows than hints say: what is drawn is drawn by tiles."""
    node, spec = value.node, placing.spec(value)
    return (
        node is not None
        and value.hint is None
        and not spec.partial
        and node.pin is None
        and draw_slot(node) is None
        and not any(placing.costs.graph.mesh[axis].loop for axis in spec.axes)
    )


def _wider(placing: Placing, value: Value) -> tuple[Placing, set[Value], set[Node]]:
    """The value made in all rows in which it is used, and so on to where its operands are exchanged anyway: the
    placements, the values that move otherwise, and the nodes that are computed otherwise; no nodes where that fails."""
    costs, trial = placing.costs, placing.copy()
    place = {node: number for number, node in enumerate(costs.graph.nodes)}
    touched, nodes, todo = {value}, set[Node](), [value]
    while todo:
        todo.sort(key=lambda each: -1 if each.node is None else place[each.node])
        each = todo.pop()
        node, rows = each.node, _all_rows(trial, each)
        assert node is not None
        made = _made_in(trial, node, each, rows) if rows is not None else None
        if made is None:
            if each is value:
                return placing, touched, set()
            continue
        trial.changed[node] = made
        nodes.add(node)
        touched.update(node.outs)
        for operand in dict.fromkeys(node.operands):
            touched.add(operand)
            new = trial.exchanges(operand) and not placing.exchanges(operand)
            if new and operand not in todo and _may_overlap(operand, trial):
                todo.append(operand)
    return trial, touched, nodes


def _all_rows(placing: Placing, value: Value) -> Spec | None:
    """The rows that have all those in which a value is used, and its tiles; None if there are none such, or an axis
    that shards one dim where it is made shards another where it is used."""
    mesh, made = placing.costs.graph.mesh, placing.spec(value)
    needs = [made, *placing.exchanges(value)]
    if any({*need.dims[dim].axes} - {*sharding.axes} for need in needs for dim, sharding in enumerate(made.dims)):
        return None
    dims = []
    for dim, sharding in enumerate(made.dims):
        options = [sharding, *(need.dims[dim] for need in needs if need.dims[dim] != sharding)]
        elsewhere = {axis for other, held in enumerate(made.dims) if other != dim for axis in held.axes}
        if any(elsewhere & set(each.axes) for each in options):  # no exchange of rows: another dim is sharded
            return None
        widest = (
            each
            for each in options
            if all(
                has_rows(made.with_dim(dim, each), made.with_dim(dim, other), value.shape, mesh) for other in options
            )
        )
        dims.append(next(widest, None))
    return None if None in dims else Spec(tuple(dim for dim in dims if dim is not None), made.partial)


def _made_in(placing: Placing, node: Node, value: Value, rows: Spec) -> Strategy | None:
    """How a node is computed that makes a value in these rows; None if it cannot be."""
    rule, mesh = placing.rule(node), placing.costs.graph.mesh
    dims, now, shardings = rule.results[value.index], placing.spec(value), dict(placing.shardings(node))
    assert dims is not None
    for d, dim in enumerate(dims):
        if rows.dims[d] == now.dims[d]:
            continue
        pieces = project(rows.dims[d], value.shape[d], rule.dim_sizes(dim), mesh)
        if pieces is None:
            return None
        for factor, sharding in zip(dim, pieces, strict=True):
            if sharding.axes and shardings.get(factor, DimSharding()).axes != sharding.axes:
                return None
            shardings[factor] = sharding
    made = placing.sharding(node, shardings)
    return made if made is not None and made.results[node.outs.index(value)] == rows else None
