"""Damage to one rank's program: where it can be done, and how. The kinds stand in :mod:`tests.mutants`."""

from __future__ import annotations

import operator
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from shardfx.ir.mesh import Mesh
from shardfx.ir.ops import pack
from shardfx.ir.program.lower import identifier

aten, c10d = torch.ops.aten, torch.ops._c10d_functional
ALL_REDUCE, WAIT = c10d.all_reduce.default, c10d.wait_tensor.default
GATHER, SCATTER = c10d.all_gather_into_tensor.default, c10d.reduce_scatter_tensor.default


@dataclass(frozen=True)
class Site:
    """One rank's graph, being changed."""

    graph: fx.Graph
    rank: int
    mesh: Mesh
    shapes: Mapping[str, tuple[int, ...]]
    buffers: Sequence[tuple[int, str]]
    gradients: Sequence[tuple[int, str]] = ()
    """By place among the results: the inputs that they are the gradients of."""

    def calls(self, *targets: Any) -> list[fx.Node]:
        return [n for n in self.graph.nodes if n.op == "call_function" and n.target in targets]

    @property
    def end(self) -> fx.Node:
        return next(n for n in self.graph.nodes if n.op == "output")

    def after(self, node: fx.Node, target: Any, *args: Any, users: bool = True, **kwargs: Any) -> fx.Node:
        """Insert a call behind ``node`` (or its wait); its users use the call instead."""
        with self.graph.inserting_after(node):
            made = self.graph.call_function(target, args, kwargs)
        if users:
            node.replace_all_uses_with(made, delete_user_cb=lambda user: user is not made)
        return made


Places = Callable[[Site], list[fx.Node]]
Damage = Callable[[Site, fx.Node], None]


def waits(*targets: Any) -> Places:
    """The waits for some collectives."""
    return lambda site: [n for n in site.calls(WAIT) if n.args[0].target in targets]  # type: ignore[union-attr]


def of(*targets: Any, when: Callable[[fx.Node], bool] = lambda node: True) -> Places:
    return lambda site: [n for n in site.calls(*targets) if when(n)]


def argument(at: int, change: Callable[[Any], Any]) -> Damage:
    def damage(site: Site, node: fx.Node) -> None:
        if at < len(node.args):
            node.update_arg(at, change(node.args[at]))

    return damage


def target(other: Any) -> Damage:
    def damage(site: Site, node: fx.Node) -> None:
        node.target = other

    return damage


def becomes(at: int) -> Damage:
    """The node's result is its operand instead."""

    def damage(site: Site, node: fx.Node) -> None:
        node.replace_all_uses_with(node.args[at])  # type: ignore[arg-type]

    return damage


def swapped(a: int, b: int) -> Damage:
    def damage(site: Site, node: fx.Node) -> None:
        args = list(node.args)
        args[a], args[b] = args[b], args[a]
        node.args = tuple(args)

    return damage


def followed(op: Any, *more: Any) -> Damage:
    """The node's result goes through another op."""

    def damage(site: Site, node: fx.Node) -> None:
        site.after(node, op, node, *more)

    return damage


def drop_collective(site: Site, node: fx.Node) -> None:
    started = node.args[0]
    node.replace_all_uses_with(started.args[0])  # type: ignore[union-attr, arg-type]
    site.graph.erase_node(node)
    site.graph.erase_node(started)  # type: ignore[arg-type]


def summed(site: Site) -> list[fx.Node]:
    """The waits for sums: a maximum of maxima is nothing new."""
    return [n for n in waits(ALL_REDUCE)(site) if n.args[0].args[1] == "sum"]  # type: ignore[union-attr]


def double_collective(site: Site, node: fx.Node) -> None:
    again = site.after(node, ALL_REDUCE, node, *node.args[0].args[1:])  # type: ignore[union-attr]
    site.after(again, WAIT, again)


def other_axis(site: Site, node: fx.Node) -> None:
    axes = str(node.args[-1]).partition("/")[2].partition("@")[0].split(".")
    others = [a for a in site.mesh.names if a not in axes]
    node.update_arg(len(node.args) - 1, site.mesh.group_name(site.rank, others))


def all_axes(site: Site, node: fx.Node) -> None:
    node.update_arg(len(node.args) - 1, site.mesh.group_name(site.rank, site.mesh.names))


def one_axis(site: Site) -> list[fx.Node]:
    """Sums over one of several axes: a maximum over more axes is the shift of a softmax still."""
    sums = [n for n in site.calls(ALL_REDUCE) if n.args[1] == "sum"]
    return [n for n in sums if len(site.mesh.names) > 1 and "." not in str(n.args[-1]).split("/")[1]]


def biased(site: Site) -> list[fx.Node]:
    """Adds of a parameter to what has just been reduced."""
    return [
        n
        for n in site.calls(aten.add.Tensor)
        if isinstance(n.args[1], fx.Node)
        and n.args[1].op == "placeholder"
        and n.args[0].target is WAIT  # type: ignore[union-attr]
        and n.args[0].args[0].target is ALL_REDUCE  # type: ignore[union-attr]
    ]


def bias_inside(site: Site, node: fx.Node) -> None:
    reduce = node.args[0].args[0]  # type: ignore[union-attr]
    with site.graph.inserting_before(reduce):  # type: ignore[arg-type]
        added = site.graph.call_function(aten.add.Tensor, (reduce.args[0], node.args[1]))  # type: ignore[union-attr]
    reduce.update_arg(0, added)  # type: ignore[union-attr]
    node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]


def shards(site: Site) -> list[fx.Node]:
    """What comes out of buckets."""
    return [n for n in site.calls(operator.getitem) if n.args[0].target is pack.unflatten]  # type: ignore[union-attr]


def not_reduced(site: Site, node: fx.Node) -> None:
    wait = node.args[0].args[0]  # type: ignore[union-attr]
    bucket = wait.args[0].args[0]  # type: ignore[union-attr]
    if wait.args[0].target is ALL_REDUCE:  # type: ignore[union-attr]
        node.replace_all_uses_with(bucket.args[0][node.args[1]])  # type: ignore[union-attr, index]


def twins(site: Site) -> list[fx.Node]:
    """Shards of a bucket with a later one of the same shape."""
    return [n for n in shards(site) if _twin(n) is not None]


def _twin(node: fx.Node) -> int | None:
    shapes = node.args[0].args[1]  # type: ignore[union-attr]
    mine = node.args[1]
    return next((i for i in range(mine + 1, len(shapes)) if shapes[i] == shapes[mine]), None)  # type: ignore


def swap_offsets(site: Site, node: fx.Node) -> None:
    node.update_arg(1, _twin(node))


def take_elsewhere(site: Site, node: fx.Node) -> None:
    """The slice begins at the other end."""
    _, view, dim, start, length, _ = node.args
    node.update_arg(3, view[dim] - length if start == 0 else 0)  # type: ignore[index, operator]


def same_shape(site: Site) -> list[fx.Node]:
    """Pairs of results of ``mm`` with equal operands' shapes are hard to tell: take additions of two computed
    values."""
    return [
        n
        for n in site.calls(aten.add.Tensor)
        if all(isinstance(a, fx.Node) and a.op == "call_function" for a in n.args)
    ]


def swap_outputs(site: Site, node: fx.Node) -> None:
    results = list(node.args[0])  # type: ignore[arg-type]
    a, b = next(equal_outputs(site))
    results[a], results[b] = results[b], results[a]
    node.args = (tuple(results),)


def equal_outputs(site: Site) -> Iterator[tuple[int, int]]:
    results = site.end.args[0]
    shapes = [_shard_shape(n) for n in results]  # type: ignore[union-attr]
    for a in range(len(shapes)):
        for b in range(a + 1, len(shapes)):
            if shapes[a] is not None and shapes[a] == shapes[b] and results[a] is not results[b]:  # type: ignore[index]
                yield a, b


def _shard_shape(node: Any) -> Any:
    bucket = isinstance(node, fx.Node) and node.target is operator.getitem and node.args[0].target is pack.unflatten  # type: ignore
    return node.args[0].args[1][node.args[1]] if bucket else None


def interchangeable(site: Site) -> list[fx.Node]:
    return [site.end] if next(equal_outputs(site), None) else []


def lost_update(site: Site, node: fx.Node) -> None:
    """An output is the new content of a buffer or a state: return the old one."""
    results = list(node.args[0])  # type: ignore[arg-type]
    old = [n for n in site.graph.nodes if n.op == "placeholder"]
    at, name = next((i, name) for i, name in site.buffers if name.endswith(KEPT))
    results[at] = next(n for n in old if n.name == identifier(name))
    node.args = (tuple(results),)


def with_buffers(site: Site) -> list[fx.Node]:
    return [site.end] if any(name.endswith(KEPT) for _, name in site.buffers) else []


KEPT = ("running_mean", "exp_avg")


def cast(site: Site, node: fx.Node) -> None:
    low = site.after(node, aten._to_copy.default, node, dtype=torch.float32)
    site.after(low, aten._to_copy.default, low, dtype=torch.float64)


def square(site: Site) -> list[fx.Node]:
    """Transposes of parameters that another parameter of the same name elsewhere, or a square shape, could stand
    for."""
    return [
        n
        for n in site.calls(aten.t.default)
        if n.args[0].op == "placeholder" and _shape(site, n.args[0])[:1] * 2 == _shape(site, n.args[0])
    ]  # type: ignore


def _shape(site: Site, node: fx.Node) -> tuple[int, ...]:
    return site.shapes.get(node.name, ())


def parameters_with_twin(site: Site) -> list[fx.Node]:
    return [
        n
        for n in site.graph.nodes
        if n.op == "placeholder" and n.users and _other(site, n) is not None and "weight" in n.name
    ]


def _other(site: Site, node: fx.Node) -> fx.Node | None:
    others = [n for n in site.graph.nodes if n.op == "placeholder" and n is not node and "weight" in n.name]
    return next((n for n in others if _shape(site, n) == _shape(site, node) and len(_shape(site, n)) > 1), None)


def other_parameter(site: Site, node: fx.Node) -> None:
    """One use of a parameter reads another one: what a stale copy would be."""
    other = _other(site, node)
    assert other is not None
    next(iter(node.users)).replace_input_with(node, other)


def roll(site: Site, node: fx.Node) -> None:
    site.after(node, aten.roll.default, node, [1], [0])


def tied(site: Site) -> list[fx.Node]:
    """Sums of a tied weight's two gradients: adds that are reduced and returned."""
    found = []
    for result in site.end.args[0]:  # type: ignore[union-attr]
        node: Any = result
        while node.target in (WAIT, ALL_REDUCE):
            node = node.args[0]
        if node.target is aten.add.Tensor:
            found.append(node)
    return found


def drawn_elsewhere(site: Site, node: fx.Node) -> None:
    box = list(node.args[4])  # type: ignore[arg-type]
    box[0] += 1
    node.update_arg(4, box)


def number(at: int) -> Callable[[fx.Node], bool]:
    return lambda node: (
        len(node.args) > at and isinstance(node.args[at], (int, float)) and not isinstance(node.args[at], bool)
    )


def both_known(node: fx.Node) -> bool:
    return all(isinstance(a, fx.Node) for a in node.args[:2])


def any_call(site: Site) -> list[fx.Node]:
    """Every call that has a number or a tensor among its arguments."""
    return [n for n in site.graph.nodes if n.op == "call_function" and _spots(n)]


def _spots(node: fx.Node) -> list[int]:
    return [
        i for i, a in enumerate(node.args) if isinstance(a, (int, float, fx.Node, list)) and not isinstance(a, bool)
    ]


def blind(site: Site, node: fx.Node) -> None:
    """Some argument becomes another: a number is off by one, a list too, a tensor is one made a little earlier."""
    rng = random.Random(node.name)
    at = rng.choice(_spots(node))
    old = node.args[at]
    if isinstance(old, fx.Node):
        earlier = [n for n in site.graph.nodes if n is not old]
        earlier = [n for n in earlier[: earlier.index(node)] if n.op != "output"]
        node.update_arg(at, rng.choice(earlier[-12:] or [old]))
    elif isinstance(old, (list, tuple)) and old and all(isinstance(a, int) for a in old):
        i = rng.randrange(len(old))
        node.update_arg(at, [*old[:i], old[i] + rng.choice((-1, 1)), *old[i + 1 :]])  # type: ignore[operator]
    elif isinstance(old, (int, float)):
        node.update_arg(at, old + rng.choice((-1, 1)))
