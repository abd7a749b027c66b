"""Damage to the calls of one rank's program.

What the compiler could get wrong stands here, one kind a line of :data:`MUTATIONS`: each finds the places where its
damage can be done to one rank's ``fx`` graph and does it at the k-th, on every rank or on one only.
"""

from __future__ import annotations

import operator
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from shardfx.ir.graph import Phase
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


def double_collective(site: Site, node: fx.Node) -> None:
    again = site.after(node, ALL_REDUCE, node, *node.args[0].args[1:])  # type: ignore[union-attr]
    site.after(again, WAIT, again)


def over(axes: Callable[[Site, list[str]], Sequence[str]]) -> Damage:
    """A collective over other axes, by those that it is over."""

    def damage(site: Site, node: fx.Node) -> None:
        node.update_arg(len(node.args) - 1, site.mesh.group_name(site.rank, axes(site, axes_of(node))))

    return damage


def others(site: Site, axes: list[str]) -> list[str]:
    return [name for name in site.mesh.names if name not in axes]


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


def at_end(when: Callable[[Site], object]) -> Places:
    """The results, where there are some of a kind."""
    return lambda site: [site.end] if when(site) else []


interchangeable = at_end(lambda site: next(equal_outputs(site), None))
with_buffers = at_end(lambda site: any(name.endswith(KEPT) for _, name in site.buffers))
gradients = at_end(lambda site: site.gradients)


def lost_update(site: Site, node: fx.Node) -> None:
    """An output is the new content of a buffer or a state: return the old one."""
    results = list(node.args[0])  # type: ignore[arg-type]
    old = [n for n in site.graph.nodes if n.op == "placeholder"]
    at, name = next((i, name) for i, name in site.buffers if name.endswith(KEPT))
    results[at] = next(n for n in old if n.name == identifier(name))
    node.args = (tuple(results),)


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


SQUARES = (aten.sum.default, aten.sum.dim_IntList)


def axes_of(node: fx.Node) -> list[str]:
    """The axes over which a collective goes."""
    return str(node.args[-1]).partition("/")[2].partition("@")[0].split(".")


def sums(site: Site) -> list[fx.Node]:
    return [node for node in site.calls(ALL_REDUCE) if node.args[1] == "sum"]


def waits_for_sums(site: Site) -> list[fx.Node]:
    """A maximum of maxima is nothing new."""
    return [node for node in waits(ALL_REDUCE)(site) if node.args[0] in sums(site)]


def one_axis(site: Site) -> list[fx.Node]:
    """Sums over one of several axes: a maximum over more axes is the shift of a softmax still."""
    return [node for node in of_fewer_axes(site) if len(axes_of(node)) == 1]


def of_several_axes(site: Site) -> list[fx.Node]:
    """Sums over several axes."""
    return [node for node in sums(site) if len(axes_of(node)) > 1]


def of_fewer_axes(site: Site) -> list[fx.Node]:
    """Sums over some of the mesh's axes."""
    return [node for node in sums(site) if len(axes_of(node)) < len(site.mesh.names)]


def norms_of_slices(site: Site) -> list[fx.Node]:
    """Sums of squares of what a rank takes of what several have."""
    return [node for node in site.calls(*SQUARES) if _taken(node) is not None]


def norm_of_the_whole(site: Site, node: fx.Node) -> None:
    """Each rank adds the squares of all that it took its part of."""
    taken = _taken(node)
    assert taken is not None
    with site.graph.inserting_before(node):
        squares = site.graph.call_function(aten.pow.Tensor_Scalar, (_whole(taken), 2))
    node.update_arg(0, squares)


def _whole(taken: fx.Node) -> fx.Node:
    """What was taken of, axis by axis."""
    while taken.target is pack.take:
        (taken,) = taken.all_input_nodes
    return taken


def _taken(node: fx.Node) -> fx.Node | None:
    taken = node.args[0].args[0] if _is_square(node.args[0]) else None  # type: ignore[union-attr]
    return taken if isinstance(taken, fx.Node) and taken.target is pack.take else None


def sums_of_squares(site: Site) -> list[fx.Node]:
    """Sums of squares of which there is another one."""
    found = [node for node in site.calls(aten.sum.default) if _is_square(node.args[0])]
    return found if len(found) > 1 else []


def one_counted_twice(site: Site, node: fx.Node) -> None:
    """A sum of squares stands for another one as well."""
    other = next(each for each in sums_of_squares(site)[::-1] if each is not node)
    at = list(site.graph.nodes)
    first, second = sorted((node, other), key=at.index)
    second.replace_all_uses_with(first)


def _is_square(node: object) -> bool:
    return isinstance(node, fx.Node) and node.target is aten.pow.Tensor_Scalar


def slices(site: Site) -> list[fx.Node]:
    """Slices that are not the same on all ranks."""
    return [node for node in site.calls(pack.take) if 0 < node.args[4] < _view(node)[_dim(node)]]  # type: ignore[operator]


def first_slice(site: Site, node: fx.Node) -> None:
    """All ranks take the first."""
    node.update_arg(3, 0)


def slices_of_slices(site: Site) -> list[fx.Node]:
    """Of a dim that is sharded over two axes of one size, a slice for each."""
    found: list[Any] = slices(site)
    return [n for n in found if n.args[0] in found and _ways(n) == _ways(n.args[0]) and _dim(n) == _dim(n.args[0])]


def other_order_of_axes(site: Site, node: fx.Node) -> None:
    """The shard of ``tp dp`` for that of ``dp tp``."""
    outer: Any = node.args[0]
    first, second = (each.args[3] // each.args[4] for each in (outer, node))  # type: ignore[operator]
    outer.update_arg(3, second * outer.args[4])
    node.update_arg(3, first * node.args[4])  # type: ignore[operator]


def slices_of_compounds(site: Site) -> list[fx.Node]:
    """Of a dim that is seen as sub-dims, of which the second is sharded."""
    return [node for node in slices(site) if _dim(node) == 1 and len(_view(node)) > len(node.args[5])]  # type: ignore[arg-type]


def plain_for_compound(site: Site, node: fx.Node) -> None:
    """One segment of the dim for a segment of each sub-dim."""
    x, (outer, inner, *rest), _, start, length, shape = node.args  # type: ignore[misc]
    node.args = (x, [outer * inner, *rest], 0, start * outer, length * outer, shape)  # type: ignore[operator]


def parameter_for_its_gradient(site: Site, node: fx.Node) -> None:
    results = list(node.args[0])  # type: ignore[arg-type]
    at, name = site.gradients[-1]
    results[at] = next(each for each in site.graph.nodes if each.op == "placeholder" and each.name == name)
    node.args = (tuple(results),)


def one_for_two(site: Site, node: fx.Node) -> None:
    results = list(node.args[0])  # type: ignore[arg-type]
    a, b = next(equal_outputs(site))
    results[a] = results[b]
    node.args = (tuple(results),)


def single(site: Site) -> list[fx.Node]:
    """The calls of torch's ops that give one tensor, which is used."""
    calls = [
        n for n in site.graph.nodes if isinstance(n.target, torch._ops.OpOverload) and n.target.namespace == "aten"
    ]
    return [n for n in calls if n.users and not any(user.target is operator.getitem for user in n.users)]


def unpacked(site: Site) -> list[fx.Node]:
    """What is taken of a buffer of several values."""
    takes = [n for n in site.graph.nodes if n.target is operator.getitem and n.users]
    return [n for n in takes if n.args[0].target is pack.unflatten]


def widened(site: Site, node: fx.Node) -> None:
    """The node's result, with a dim more, and without it again."""
    wider = site.after(node, torch.ops.aten.unsqueeze.default, node, 0)
    site.after(wider, torch.ops.aten.squeeze.dim, wider, 0)


def _view(node: fx.Node) -> Any:
    return node.args[1]


def _dim(node: fx.Node) -> Any:
    return node.args[2]


def _ways(node: fx.Node) -> Any:
    return _view(node)[_dim(node)] / node.args[4]  # type: ignore[operator]


def stepped_rows(site: Site) -> list[fx.Node]:
    """A rank's rows of a parameter or its gradient, which its states are of."""
    found = ((node, [user.meta.get("shardfx") for user in node.users]) for node in slices(site))
    return [node for node, users in found if all(made is not None and made.phase is Phase.UPDATE for made in users)]


def recomputed(site: Site) -> list[fx.Node]:
    """Calls that the backward recomputes, and that have another of the same op and shape to take an operand of."""
    return [node for node in site.graph.nodes if _is_again(node) and _stale(site, node) is not None]


def stale(site: Site, node: fx.Node) -> None:
    """What is recomputed is made of what belongs to another one."""
    node.update_arg(*_stale(site, node))  # type: ignore[misc]


def _is_again(node: fx.Node) -> bool:
    made = node.meta.get("shardfx")
    return node.op == "call_function" and made is not None and made.made_by == "recompute" and node.target is made.op


def _stale(site: Site, node: fx.Node) -> tuple[int, fx.Node] | None:
    """An operand's place, and the operand that an earlier one of the same planned types has there."""
    for other in filter(_is_again, site.graph.nodes):
        if other is node:
            return None
        mine, theirs = node.meta["shardfx"], other.meta["shardfx"]
        if other.target is not node.target or [v.type for v in mine.operands] != [v.type for v in theirs.operands]:
            continue
        for at, (a, b) in enumerate(zip(node.args, other.args, strict=False)):
            if isinstance(a, fx.Node) and isinstance(b, fx.Node) and a is not b:
                return at, b
    return None


# Not among them: a sum for a max. A maximum stands in a softmax only, where any other shift gives the same result.
MUTATIONS = (
    Mutation("all-reduce dropped", waits(ALL_REDUCE), drop_collective),
    Mutation("all-reduce dropped on one rank", waits(ALL_REDUCE), drop_collective, True),
    Mutation("all-reduce doubled", waits_for_sums, double_collective),
    Mutation("all-reduce over the other axis", one_axis, over(others)),
    Mutation("all-reduce over all axes", one_axis, over(lambda site, axes: site.mesh.names)),
    Mutation("all-reduce without an axis", of_several_axes, over(lambda site, axes: axes[:-1])),
    Mutation("all-reduce over an axis more", of_fewer_axes, over(lambda site, axes: [*axes, others(site, axes)[0]])),
    Mutation("norm of the whole on every rank", norms_of_slices, norm_of_the_whole),
    Mutation("one norm counted twice", sums_of_squares, one_counted_twice),
    Mutation("max for sum", sums, argument(1, lambda _: "max")),
    Mutation("avg for sum", of(ALL_REDUCE, SCATTER, when=lambda n: n.args[1] == "sum"), argument(1, lambda _: "avg")),
    Mutation(
        "other kind on one rank", of(ALL_REDUCE), argument(1, lambda kind: "max" if kind == "sum" else "sum"), True
    ),
    Mutation(
        "gather joined along another dim",
        of(pack.unpack_gathered, when=lambda n: 1 not in n.args[4]),  # type: ignore[operator]
        argument(3, lambda dim: (dim + 1) % 2),
    ),
    Mutation("scatter sharded along another dim", of(pack.pack_scattered), argument(2, lambda dim: (dim + 1) % 2)),
    Mutation("gathered shards in another order", waits(GATHER), roll),
    Mutation("scattered rows in another order", waits(SCATTER), roll),
    Mutation("factor 1/N", waits(ALL_REDUCE), followed(aten.mul.Tensor, 0.5)),
    Mutation("factor 1/N on one rank", waits(ALL_REDUCE, SCATTER), followed(aten.mul.Tensor, 0.5), True),
    Mutation("bias on every rank", biased, bias_inside),
    Mutation("bucket's shard not reduced", shards, not_reduced),
    Mutation("bucket offsets swapped", twins, swap_offsets),
    Mutation("slice at another offset", slices, take_elsewhere, True),
    Mutation("the first slice on every rank", slices, first_slice),
    Mutation("slices of axes in another order", slices_of_slices, other_order_of_axes),
    Mutation("a state of another shard stepped", stepped_rows, take_elsewhere, True),
    Mutation("a stale recompute", recomputed, stale),
    Mutation("plain slices for compound ones", slices_of_compounds, plain_for_compound),
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
    Mutation("one output for two", interchangeable, one_for_two),
    Mutation("a parameter for its gradient", gradients, parameter_for_its_gradient),
    Mutation("buffer or state not updated", with_buffers, lost_update),
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
        "shards of a split swapped",
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

HARMLESS = (
    Mutation("a copy", single, followed(aten.clone.default)),
    Mutation("an alias", single, followed(aten.alias.default)),
    Mutation("an alias of what lies in a buffer", unpacked, followed(aten.alias.default)),
    Mutation("what lies in a buffer, with a dim more and without it", unpacked, widened),
    Mutation("a detached value", single, followed(aten.detach.default)),
    Mutation("a copy on one rank", single, followed(aten.clone.default), True),
    Mutation("an add the other way round", of(aten.add.Tensor, when=both_known), swapped(0, 1)),
    Mutation("waited for twice", single, followed(WAIT)),
)
"""What changes no value."""
