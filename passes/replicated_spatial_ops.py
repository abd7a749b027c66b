"""Ops that need replicated what is sharded over space: a warning, or, where the user is strict, an error.

args.0: dp, -, h, w     aten.sort needs k replicated: each rank gathers the image, and sorts all of it
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping

from shardfx.ir.errors import Error, ShardfxWarning
from shardfx.ir.graph import Graph, InputKind, Node, Value, op_name
from shardfx.ir.rules.sharding_rule import ShardingRule, rule_text

from .base import RuleCache, derived


def space_axes(graph: Graph) -> set[str]:
    """The axes of ranks that shard height, width, ... of an argument, by the hints: a dim behind batch and channels."""
    return {
        axis
        for inp in graph.of_kind(InputKind.ARGUMENT)
        if inp.value.hint is not None and inp.value.type.dtype.is_floating_point
        for sharding in inp.value.hint.dims[2:]
        for axis in sharding.axes
        if graph.mesh.extent((axis,)) > 1
    }


def replicated_factors(
    node: Node, rule: ShardingRule, axes: Collection[str], images: Collection[Value]
) -> Mapping[str, str]:
    """The factors that a node needs replicated though an operand is sharded there over some axes: each with its axes.

    So it does of what a single row is made of, through a window or in a block; and of one of two dims that are sharded
    over the same ranks, where each of one is joined with each of the other (``x @ x.T``, attention by hand), if it is
    among the ``images``: numbers of places are joined for nothing.
    """
    made, found = node.strategy, {}
    assert made is not None
    for value, need, dims in zip(node.operands, made.operands, rule.operands, strict=True):
        for dim, sharding in enumerate(value.spec.dims if value.spec is not None else ()):
            lost = {axis for axis in sharding.axes if axis in axes and axis not in need.axes + need.partial_axes}
            full = [factor for factor in dims[dim] if factor in rule.replicated or factor in rule.windows]
            own = [factors for factors in rule.result_factors if not factors.isdisjoint(dims[dim])]
            others = {factor for factor, axes in made.shardings if not lost.isdisjoint(axes)}
            joined = value in images and any(not (factors - {*dims[dim]}).isdisjoint(others) for factors in own)
            if lost and (full or joined):
                found[" ".join(full or dims[dim])] = ", ".join(axis for axis in sharding.axes if axis in lost)
    return found


def report_replicated_space(graph: Graph, cache: RuleCache, strict: bool) -> None:
    """Say of each line of the model that it gathers what the hints shard over space; its backward does so as well.

    Raises:
        Error: ``strict``, and there is one.
    """
    axes, said = space_axes(graph), set()
    images = derived(graph, (inp.value for inp in graph.of_kind(InputKind.ARGUMENT))) if axes else ()
    for node in graph.nodes if axes else ():
        rule = cache.rule(node)
        found = replicated_factors(node, rule, axes, images)
        if not found or node.where in said:
            continue
        said.add(node.where)
        name, factors, over = op_name(node.op), " and ".join(found), ", ".join(dict.fromkeys(found.values()))
        where = f"{node.where}  {node.where.code}"
        if strict:
            raise Error(
                f"{name} needs space replicated that is sharded over {over}",
                where=where,
                expected=f"ops that tiles will do for (strict=True); this one is {rule_text(rule)}",
                got=f"a sharding of {factors}",
                remedy="use an op with windows (a max-pool of fixed size, say), or pass strict=False to gather it",
            )
        text = f"{name} ({node.where} {node.where.code}) needs {factors} replicated: shards over {over} are gathered"
        graph.notes.append(text)
        warnings.warn(text, ShardfxWarning, stacklevel=2)
