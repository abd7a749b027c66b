"""From where on small maps are no longer sharded by space: each rank then has whole maps of some samples, or some
channels.

    4{h} of a map of 4 rows, halos of 2 more     ->     a map of 4 rows, of 8{h} samples

A rim of two rows is much of a tile of two. Nodes that work on maps no larger than some size are computed otherwise;
what they take and give is moved where placements differ.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator

from shardfx.ir.dim_sharding import DimSharding, smallest, without
from shardfx.ir.errors import Error
from shardfx.ir.graph import Graph, Node, Phase, Value
from shardfx.ir.rules.strategy import partial_operands
from shardfx.ir.spec import Spec

from .placing import Placing

SAID = {"batch": "maps are sharded by samples", "channels": "maps are sharded by channels", "nothing": "maps are whole"}
"""What the ranks of a map may share then, in words: its samples, its channels, or nothing, and all do the same."""


def left(base: Placing, where: str, axes: Collection[str]) -> tuple[Placing, str]:
    """The placements in which small maps are no longer sharded over the ``axes`` of space, and what is to be said of
    it.

    Args:
        where: the module from which on; or ``"cost"``: from where it takes least time, if that is less than to stay.
            Maps are small then of which a whole one is no more than the largest tile that a rank holds anyway.

    Raises:
        Error: no op of the module works on tiles.
    """
    graph = base.costs.graph
    maps = {node: size for node in graph.nodes if (size := _map(base, node, axes))}
    regions = _small(base, maps, axes) if where == "cost" else [_behind(graph, maps, where)]
    best, least, said = base, 0.0 if where == "cost" else math.inf, ""
    for region in regions:
        for by in SAID:
            trial = _moved(base, region, by, axes)
            if by != "nothing" and not any(set(trial.strategy(node).shardings) - _kept(base, node) for node in region):
                continue  # too few to share
            values = {value for node in trial.changed for value in (*node.operands, *node.outs)}
            more = trial.seconds(values, trial.changed) - base.seconds(values, trial.changed)
            if more < least:
                first = next((node.where.module for node in region if node.where.module), "the loss")
                best, least, said = trial, more, f"{SAID[by]}, and not sharded by space, from {first} on"
    return best, said


def _kept(placing: Placing, node: Node) -> set[tuple[str, tuple[str, ...]]]:
    return set(placing.strategy(node).shardings)


def _placed(placing: Placing, node: Node, axes: Collection[str]) -> Iterator[tuple[Value, Spec]]:
    """The tensors of a node that are sharded over axes of space, and how."""
    made = placing.strategy(node)
    for value, spec in (*zip(node.operands, made.operands, strict=True), *zip(node.outs, made.results, strict=True)):
        if set(spec.axes) & set(axes):
            yield value, spec


def _map(placing: Placing, node: Node, axes: Collection[str]) -> int:
    """The places of the largest map that a node works on which is sharded over axes of space; 0 if there is none."""
    found = 0
    for value, spec in _placed(placing, node, axes):
        sizes = [size for size, sharding in zip(value.shape, spec.dims, strict=True) if set(sharding.axes) & set(axes)]
        found = max(found, math.prod(sizes))
    return found


def _small(placing: Placing, maps: dict[Node, int], axes: Collection[str]) -> list[list[Node]]:
    """The nodes on maps up to each size of which a rank may hold a whole one."""
    mesh, held, whole = placing.costs.graph.mesh, 0.0, dict[int, float]()
    for node, size in maps.items():
        for value, spec in _placed(placing, node, axes):
            own = spec.local_numel(value.shape, mesh) * value.type.dtype.itemsize
            over = mesh.extent(axis for axis in spec.axes if axis in axes)
            held, whole[size] = max(held, own), max(whole.get(size, 0.0), own * over)
    sizes = [size for size in sorted(maps.values()) if whole[size] <= held]
    return [[node for node, size in maps.items() if size <= most] for most in dict.fromkeys(sizes)]


def _behind(graph: Graph, maps: dict[Node, int], module: str) -> list[Node]:
    """The nodes on maps no larger than those that go into a module, from there on; and the backward of them."""

    def inside(node: Node) -> bool:
        return node.where.module == module or node.where.module.startswith(f"{module}.")

    forward = [node for node in graph.nodes if node.phase is Phase.FORWARD]
    own = [node for node in forward if inside(node) and node in maps]
    if not own:
        names = dict.fromkeys(node.where.module for node in forward if node in maps and node.where.module)
        raise Error(
            "no op of this module works on tiles",
            where="Spatial(leave=...)",
            expected=f"'cost', or a module such as {', '.join(list(names)[:8])}",
            got=repr(module),
        )
    most, seen = max(maps[node] for node in own), set[Node]()
    for node in forward:
        if inside(node) or any(value.node in seen for value in node.operands):
            seen.add(node)
    lines = {node.where for node in seen if maps.get(node, most + 1) <= most}
    return [
        node
        for node, size in maps.items()
        if size <= most and (node in seen or (node.phase is not Phase.FORWARD and node.where in lines))
    ]


def _moved(base: Placing, region: Collection[Node], by: str, axes: Collection[str]) -> Placing:
    """The nodes of a region sharded otherwise than by space; where an operand was a partial sum, and is none any more,
    a
    node is computed on the sum."""
    trial, chosen = base.copy(), set(region)
    for node in base.costs.graph.nodes:
        if node in chosen:
            _sharding_otherwise(trial, node, by, axes)
        made = trial.strategy(node)
        pairs = list(zip(node.operands, made.operands, strict=True))
        gone = {axis for value, need in pairs for axis in need.partial_axes} - {
            axis for value, _ in pairs for axis in trial.spec(value).partial_axes
        }
        if gone:
            stay = {axis: group for axis, group in partial_operands(made).items() if axis not in gone}
            trial.changed[node] = trial.costs.cache.strategy(trial.rule(node), trial.shardings(node), stay)
    return trial


def _sharding_otherwise(trial: Placing, node: Node, by: str, axes: Collection[str]) -> None:
    """Take the axes of space from a node's maps, and give them to its samples or channels as far as these suffice."""
    mesh, shardings = trial.costs.graph.mesh, dict(trial.shardings(node))
    free = [axis for sharding in shardings.values() for axis in sharding.axes if axis in axes]
    for axis in free:
        shardings = {factor: without(sharding, axis, mesh) for factor, sharding in shardings.items()}
    shared = (
        _shared(trial, node, factor, shardings.get(factor, DimSharding()), free)
        for factor in _sharing(trial, node, by, axes)
    )
    options = ({**shardings, factor: sharding} for factor, sharding in shared if sharding is not None)
    made = next((made for each in (*options, shardings) if (made := trial.sharding(node, each)) is not None), None)
    if made is not None:
        trial.changed[node] = made


def _shared(
    trial: Placing, node: Node, factor: str, held: DimSharding, free: list[str]
) -> tuple[str, DimSharding | None]:
    """A factor, and its sharded over as many of these axes too as leave each rank something; None if that is none."""
    mesh, size, more = trial.costs.graph.mesh, trial.rule(node).sizes[factor], held.axes
    for axis in free if not held.parts else ():
        if smallest(size, (*more, axis), mesh) > 0:
            more = (*more, axis)
    return factor, DimSharding(more) if more != held.axes else None


def _sharing(trial: Placing, node: Node, by: str, axes: Collection[str]) -> Iterator[str]:
    """The factors by which a node's maps may be shared, those of results first: of the samples, which are the first
    dim, or of channels, another one that is not of space."""
    rule, now = trial.rule(node), node.strategy
    assert now is not None
    results = zip((dims for dims in rule.results if dims is not None), now.results, strict=True)
    for dims, spec in (*results, *zip(rule.operands, now.operands, strict=True)) if by != "nothing" else ():
        space = [d for d, sharding in enumerate(spec.dims) if set(sharding.axes) & set(axes)]
        for d in range(len(dims)) if space else ():
            if d not in space and (d == 0) == (by == "batch"):
                yield from (factor for factor in dims[d] if factor not in rule.whole and factor not in rule.windows)
