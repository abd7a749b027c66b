"""Small maps sharded by samples or channels instead of space.

    4{h} of a map of 4 rows, halos of 2 more     ->     a map of 4 rows, of 8{h} samples

A halo of two rows is much of a tile of two. Nodes that work on maps no larger than some size are computed otherwise;
what they take and give is moved where placements differ.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator

from shardfx.ir.dim_sharding import DimSharding, smallest, without
from shardfx.ir.errors import Error
from shardfx.ir.graph import Graph, Node, Phase, Value
from shardfx.ir.names import within
from shardfx.ir.rules.strategy import partial_operands
from shardfx.ir.spec import Spec

from .trial_placement import TrialPlacement

SAID = {"batch": "sharded by samples", "channels": "sharded by channels", "nothing": "replicated"}
"""The alternative shardings of small maps, in words."""


def left(base: TrialPlacement, where: str, axes: Collection[str]) -> tuple[TrialPlacement, str]:
    """The placement in which small maps are no longer sharded over the ``axes`` of space, and what is to be said of it.

    Args:
        where: the module from which on; or ``"cost"``: from where it takes least time, if that is less than to stay.
            Maps are small then of which a full one is no more than the largest tile that a rank has anyway.

    Raises:
        Error: no op of the module works on tiles.
    """
    graph = base.costs.graph
    maps = {node: size for node in graph.nodes if (size := _map_size(base, node, axes))}
    regions = _small(base, maps, axes) if where == "cost" else [_behind(graph, maps, where)]
    best, least, said = base, 0.0 if where == "cost" else math.inf, ""
    for region in regions:
        for by in SAID:
            trial = _moved(base, region, by, axes)
            if by != "nothing" and all({*trial.strategy(n).shardings} <= {*base.strategy(n).shardings} for n in region):
                continue  # too few to share
            values = {value for node in trial.changed for value in (*node.operands, *node.outs)}
            more = trial.seconds(values, trial.changed) - base.seconds(values, trial.changed)
            if more < least:
                first = next((node.where.module for node in region if node.where.module), "the loss")
                best, least, said = trial, more, f"maps are {SAID[by]}, and not sharded by space, from {first} on"
    return best, said


def _tiles(placement: TrialPlacement, node: Node, axes: Collection[str]) -> Iterator[tuple[Value, Spec]]:
    """The tensors of a node that are sharded over spatial axes, with their specs."""
    made = placement.strategy(node)
    for value, spec in (*zip(node.operands, made.operands, strict=True), *zip(node.outs, made.results, strict=True)):
        if set(spec.axes) & set(axes):
            yield value, spec


def _map_size(placement: TrialPlacement, node: Node, axes: Collection[str]) -> int:
    """The size of the largest spatially sharded map of a node; 0 if there is none."""
    sizes = [0]
    for value, spec in _tiles(placement, node, axes):
        dims = zip(value.shape, spec.dims, strict=True)
        sizes.append(math.prod(size for size, sharding in dims if set(sharding.axes) & set(axes)))
    return max(sizes)


def _small(placement: TrialPlacement, maps: dict[Node, int], axes: Collection[str]) -> list[list[Node]]:
    """The nodes on maps up to each size of which a rank may store the full map."""
    mesh, largest, full = placement.mesh, 0.0, dict[int, float]()
    for node, size in maps.items():
        for value, spec in _tiles(placement, node, axes):
            own = spec.local_numel(value.shape, mesh) * value.type.dtype.itemsize
            over = mesh.extent(axis for axis in spec.axes if axis in axes)
            largest, full[size] = max(largest, own), max(full.get(size, 0.0), own * over)
    sizes = dict.fromkeys(size for size in sorted(maps.values()) if full[size] <= largest)
    return [[node for node, size in maps.items() if size <= most] for most in sizes]


def _behind(graph: Graph, maps: dict[Node, int], module: str) -> list[Node]:
    """The nodes on maps no larger than those that enter a module, from there on; and their backward."""
    forward = [node for node in graph.nodes if node.phase is Phase.FORWARD]
    own = [node for node in forward if within(node.where.module, module) and node in maps]
    if not own:
        names = dict.fromkeys(node.where.module for node in forward if node in maps and node.where.module)
        expected = f"'cost', or a module such as {', '.join(list(names)[:8])}"
        what, where = "no op of this module works on tiles", "Spatial(leave=...)"
        raise Error(what, where=where, expected=expected, got=repr(module))
    most, seen = max(maps[node] for node in own), set[Node]()
    for node in forward:
        if within(node.where.module, module) or any(value.node in seen for value in node.operands):
            seen.add(node)
    lines = {node.where for node in seen if maps.get(node, most + 1) <= most}
    small = (node for node, size in maps.items() if size <= most)
    return [node for node in small if node in seen or (node.phase is not Phase.FORWARD and node.where in lines)]


def _moved(base: TrialPlacement, region: Collection[Node], by: str, axes: Collection[str]) -> TrialPlacement:
    """The nodes of a region sharded otherwise than by space; where an operand was a partial sum, and is none any more,
    a node is computed on the sum."""
    trial, chosen = base.copy(), set(region)
    for node in base.costs.graph.nodes:
        if node in chosen:
            _shard_otherwise(trial, node, by, axes)
        made = trial.strategy(node)
        needed = {axis for need in made.operands for axis in need.partial_axes}
        gone = needed - {axis for value in node.operands for axis in trial.spec(value).partial_axes}
        if gone:
            kept = {axis: group for axis, group in partial_operands(made).items() if axis not in gone}
            trial.changed[node] = trial.costs.context.cache.strategy(trial.rule(node), trial.shardings(node), kept)
    return trial


def _shard_otherwise(trial: TrialPlacement, node: Node, by: str, axes: Collection[str]) -> None:
    """Remove the spatial axes from a node's maps, and shard its samples or channels over them as far as possible."""
    shardings, rule = dict(trial.shardings(node)), trial.rule(node)
    free = [axis for sharding in shardings.values() for axis in sharding.axes if axis in axes]
    for axis in free:
        shardings = {factor: without(sharding, axis, trial.mesh) for factor, sharding in shardings.items()}
    options = []
    for factor in _sharing(trial, node, axes, by) if by != "nothing" else ():
        now = shardings.get(factor, DimSharding())
        more = now.axes
        for axis in free if not now.parts else ():
            if smallest(rule.sizes[factor], (*more, axis), trial.mesh) > 0:  # each rank gets something
                more = (*more, axis)
        if more != now.axes:
            options.append({**shardings, factor: DimSharding(more)})
    made = next((made for each in (*options, shardings) if (made := trial.shard(node, each)) is not None), None)
    if made is not None:
        trial.changed[node] = made


def _sharing(trial: TrialPlacement, node: Node, axes: Collection[str], by: str) -> Iterator[str]:
    """The factors by which a node's maps may be shared, those of results first: of the samples, which are the first
    dim, or of channels, another one that is not of space."""
    rule, now = trial.rule(node), node.strategy
    assert now is not None
    results = zip((dims for dims in rule.results if dims is not None), now.results, strict=True)
    for dims, spec in (*results, *zip(rule.operands, now.operands, strict=True)):
        space = [d for d, sharding in enumerate(spec.dims) if set(sharding.axes) & set(axes)]
        for d in range(len(dims)) if space else ():
            if d not in space and (d == 0) == (by == "batch"):
                yield from (f for f in dims[d] if f not in rule.replicated and f not in rule.windows)
