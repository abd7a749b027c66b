"""Ways to damage correct programs: what a verifier must notice.

A :class:`Mutation` finds the places where its damage can be done to one rank's ``fx`` graph and does it at the k-th, on
every rank or on one only. What the compiler could get wrong stands here, one kind a line of :data:`MUTATIONS`.
"""

from __future__ import annotations

import operator
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

import shardfx as sx
from shardfx.ir.mesh import Mesh
from shardfx.runtime import layout

aten = torch.ops.aten
c10d = torch.ops._c10d_functional
ALL_REDUCE, WAIT = c10d.all_reduce.default, c10d.wait_tensor.default
GATHER, SCATTER = c10d.all_gather_into_tensor.default, c10d.reduce_scatter_tensor.default


@dataclass(frozen=True)
class Site:
    """One rank's graph, being changed."""

    graph: fx.Graph
    rank: int
    mesh: Mesh

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


@dataclass(frozen=True)
class Mutation:
    """``damage`` done at one of the ``places``: on every rank, or (``alone``) on the last one only."""

    name: str
    places: Places
    damage: Damage
    alone: bool = False


def waits(*targets: Any) -> Places:
    """The waits for some collectives."""
    return lambda site: [n for n in site.calls(WAIT) if n.args[0].target in targets]  # type: ignore[union-attr]


def of(*targets: Any, when: Callable[[fx.Node], bool] = lambda node: True) -> Places:
    return lambda site: [n for n in site.calls(*targets) if when(n)]


def argument(at: int, change: Callable[[Any], Any]) -> Damage:
    def damage(site: Site, node: fx.Node) -> None:
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
    return [n for n in site.calls(ALL_REDUCE) if len(site.mesh.names) > 1 and "." not in str(n.args[-1]).split("/")[1]]


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


def pieces(site: Site) -> list[fx.Node]:
    """What comes out of buckets."""
    return [n for n in site.calls(operator.getitem) if n.args[0].target is layout.unflatten]  # type: ignore[union-attr]


def not_reduced(site: Site, node: fx.Node) -> None:
    wait = node.args[0].args[0]  # type: ignore[union-attr]
    bucket = wait.args[0].args[0]  # type: ignore[union-attr]
    if wait.args[0].target is ALL_REDUCE:  # type: ignore[union-attr]
        node.replace_all_uses_with(bucket.args[0][node.args[1]])  # type: ignore[union-attr, index]


def twins(site: Site) -> list[fx.Node]:
    """Pieces of a bucket with a later one of the same shape."""
    return [n for n in pieces(site) if _twin(n) is not None]


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


def returned(kind: str) -> Places:
    """The output node, if the program returns things of this kind: gradients lie behind loss, buffers at the end."""

    def places(site: Site) -> list[fx.Node]:
        return [site.end] if kind in getattr(site.graph, "kinds", ()) else []

    return places


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
    a, b = next(_equal_outputs(site))
    results[a], results[b] = results[b], results[a]
    node.args = (tuple(results),)


def _equal_outputs(site: Site) -> Iterator[tuple[int, int]]:
    results = site.end.args[0]
    shapes = [_piece_shape(n) for n in results]  # type: ignore[union-attr]
    for a in range(len(shapes)):
        for b in range(a + 1, len(shapes)):
            if shapes[a] is not None and shapes[a] == shapes[b] and results[a] is not results[b]:  # type: ignore[index]
                yield a, b


def _piece_shape(node: Any) -> Any:
    bucket = isinstance(node, fx.Node) and node.target is operator.getitem and node.args[0].target is layout.unflatten  # type: ignore
    return node.args[0].args[1][node.args[1]] if bucket else None


def interchangeable(site: Site) -> list[fx.Node]:
    return [site.end] if next(_equal_outputs(site), None) else []


def lost_update(site: Site, node: fx.Node) -> None:
    """The last output is a buffer's new content: return the old one."""
    results = list(node.args[0])  # type: ignore[arg-type]
    old = [n for n in site.graph.nodes if n.op == "placeholder" and "running_mean" in n.name]
    names = site.graph.buffers  # type: ignore[attr-defined]
    at = next(i for i, name in names if "running_mean" in name)
    results[at] = next(n for n in old if n.name == dict(names)[at].replace(".", "_"))
    node.args = (tuple(results),)


def with_buffers(site: Site) -> list[fx.Node]:
    return [site.end] if any("running_mean" in name for _, name in getattr(site.graph, "buffers", ())) else []


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
    return site.graph.shapes[node.name]  # type: ignore[attr-defined, no-any-return]


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


MUTATIONS = (
    Mutation("all-reduce dropped", waits(ALL_REDUCE), drop_collective),
    Mutation("all-reduce dropped on one rank", waits(ALL_REDUCE), drop_collective, True),
    Mutation("all-reduce doubled", waits(ALL_REDUCE), double_collective),
    Mutation("all-reduce over the other axis", one_axis, other_axis),
    Mutation("all-reduce over all axes", one_axis, all_axes),
    Mutation("max for sum", of(ALL_REDUCE, when=lambda n: n.args[1] == "sum"), argument(1, lambda _: "max")),
    Mutation("avg for sum", of(ALL_REDUCE, SCATTER, when=lambda n: n.args[1] == "sum"), argument(1, lambda _: "avg")),
    Mutation("sum for max", of(ALL_REDUCE, when=lambda n: n.args[1] == "max"), argument(1, lambda _: "sum")),
    Mutation(
        "other kind on one rank", of(ALL_REDUCE), argument(1, lambda kind: "max" if kind == "sum" else "sum"), True
    ),
    Mutation("gather joined along another dim", of(layout.unpack_gathered), argument(3, lambda dim: (dim + 1) % 2)),
    Mutation("scatter cut along another dim", of(layout.pack_scattered), argument(2, lambda dim: (dim + 1) % 2)),
    Mutation("gathered pieces in another order", waits(GATHER), roll),
    Mutation("scattered rows in another order", waits(SCATTER), roll),
    Mutation("factor 1/N", waits(ALL_REDUCE), followed(aten.mul.Tensor, 0.5)),
    Mutation("factor 1/N on one rank", waits(ALL_REDUCE, SCATTER), followed(aten.mul.Tensor, 0.5), True),
    Mutation("bias on every rank", biased, bias_inside),
    Mutation("bucket's piece not reduced", pieces, not_reduced),
    Mutation("bucket offsets swapped", twins, swap_offsets),
    Mutation(
        "slice at another offset",
        of(layout.take, when=lambda n: n.args[1][n.args[2]] != n.args[4]),
        take_elsewhere,
        True,
    ),  # type: ignore
    Mutation("another parameter read", parameters_with_twin, other_parameter),
    Mutation("another parameter read on one rank", parameters_with_twin, other_parameter, True),
    Mutation("dropout with another p", of(torch.ops.shardfx.dropout.default), argument(1, lambda p: p / 2)),
    Mutation("dropout drawn for another box", of(torch.ops.shardfx.dropout.default), drawn_elsewhere, True),
    Mutation("eps changed", of(aten.native_layer_norm.default), argument(4, lambda eps: eps * 100)),
    Mutation("relu's gradient at another threshold", of(aten.threshold_backward.default), argument(2, lambda _: 0.5)),
    Mutation(
        "a number changed",
        of(aten.mul.Tensor, aten.div.Tensor, aten.add.Tensor, when=number(1)),
        argument(1, lambda x: x * 2),
    ),
    Mutation("exponent changed", of(aten.pow.Tensor_Scalar), argument(1, lambda x: x + 1)),
    Mutation("weight not transposed", square, becomes(0)),
    Mutation("term of an add missing", same_shape, becomes(0)),
    Mutation("other term of an add missing", same_shape, becomes(1)),
    Mutation("gradient of a tied weight counted once", tied, becomes(0)),
    Mutation("operands of a sub swapped", of(aten.sub.Tensor, when=both_known), swapped(0, 1)),
    Mutation("operands of a div swapped", of(aten.div.Tensor, when=both_known), swapped(0, 1)),
    Mutation("mask's upper bound", of(aten.ge.Scalar), argument(1, lambda n: n // 2), True),
    Mutation("mask's lower bound", of(aten.lt.Scalar), argument(1, lambda n: n + 8)),
    Mutation("mask forgotten", of(aten.masked_fill.Scalar), becomes(0)),
    Mutation(
        "index not shifted",
        of(aten.clamp.default, when=lambda n: n.args[0].target is aten.sub.Tensor),
        lambda s, n: n.update_arg(0, n.args[0].args[0]),
        True,
    ),  # type: ignore
    Mutation("outputs swapped", interchangeable, swap_outputs),
    Mutation("buffer not updated", with_buffers, lost_update),
    Mutation("cast down and up", of(aten.mm.default, aten.addmm.default, aten.convolution.default), cast),
    Mutation(
        "another activation", of(aten.relu.default, aten.gelu.default, aten.silu.default), target(aten.abs.default)
    ),
    Mutation("sin for cos", of(aten.cos.default, aten.exp.default, aten.rsqrt.default), target(aten.sin.default)),
    Mutation("sign lost", of(aten.neg.default), becomes(0)),
    Mutation(
        "attention not causal",
        of(aten._scaled_dot_product_flash_attention_for_cpu.default),
        argument(4, lambda causal: not causal),
    ),
    Mutation(
        "pieces of a split swapped",
        of(operator.getitem, when=lambda n: n.args[0].target is aten.split_with_sizes.default),
        argument(1, lambda i: (i + 1) % 3),
    ),  # type: ignore
    Mutation("one add for another", of(aten.add.Tensor, when=both_known), target(aten.sub.Tensor)),
    Mutation(
        "sum over another dim",
        of(aten.sum.dim_IntList, when=lambda n: n.args[1] == [0]),
        lambda s, n: n.update_arg(1, [-1]),
    ),
    Mutation(
        "stride of a range",
        of(aten.arange.default, aten.arange.start_step),
        lambda s, n: s.after(n, aten.flip.default, n, [0]),
    ),
    Mutation("a constant changed", of(aten.full.default), argument(1, lambda x: x + 1)),
    Mutation(
        "threshold's activation is another",
        of(aten.threshold_backward.default, when=lambda n: n.args[1] is not n.args[0]),
        lambda s, n: n.update_arg(1, n.args[0]),
    ),
)


def mutants(
    pm: sx.ParallelModule, mutation: Mutation, count: int, seed: int = 0
) -> Iterator[tuple[str, Mapping[int, fx.GraphModule]]]:
    """Up to ``count`` damaged sets of programs, each with the node at which it was damaged; none where it cannot be."""
    own = {rank: pm.rank_module(rank) for rank in range(pm.mesh.size)}
    last = pm.mesh.size - 1
    places = len(mutation.places(_site(pm, own[last])[1]))
    chosen = random.Random(f"{seed} {mutation.name}").sample(range(places), min(count, places))
    for k in sorted(chosen):
        damaged: dict[int, fx.GraphModule] = {}
        name = ""
        for rank in [last] if mutation.alone else own:
            module, site = _site(pm, own[rank], rank)
            found = mutation.places(site)
            if k >= len(found):
                continue
            name = found[k].name
            before = str(site.graph)
            mutation.damage(site, found[k])
            if str(site.graph) == before:
                continue
            site.graph.lint()
            damaged[rank] = module
        if damaged:
            yield name, damaged


def _site(pm: sx.ParallelModule, module: fx.GraphModule, rank: int = 0) -> tuple[fx.GraphModule, Site]:
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    made = fx.GraphModule(module, graph)
    coords = pm.mesh.coords(rank)
    by_name = {g.name: g.value for g in pm.after.inputs}
    identifiers = {name.replace(".", "_"): v for name, v in by_name.items()}
    shapes = {
        n.name: v.spec.local_shape(v.shape, pm.mesh, coords)
        for n in made.graph.nodes
        if n.op == "placeholder" and (v := identifiers.get(n.name)) is not None and v.spec is not None
    }
    made.graph.shapes = shapes
    made.graph.buffers = [(i, o.name) for i, o in enumerate(pm._program(0, None).outputs) if o.kind.value == "buffer"]
    return made, Site(made.graph, rank, pm.mesh)
