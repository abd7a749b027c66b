"""bucket-comm: collectives of one kind, group and dtype are coalesced into buckets.

    %5 = comm.all_reduce(%3, axes=[dp])
    %8 = comm.all_reduce(%7, axes=[dp])       ->    %5, %8 = comm.all_reduce(%3, %7, axes=[dp])

A reduction waits for later ones until something uses it, or the bucket is full (what follows from the batch alone, such
as how many targets count, does not wait for what takes parameters), and so does a gather of an output; a gather of an
input (a stored parameter, or a cast of it) joins the first of its bucket. Bytes are the same, calls fewer. All ranks
run one program order, so that the order of collectives is the same on all, and since a bucket stands where all its
operands are made and none of its results is used, it can never make a cycle.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch

from shardfx.ir.graph import Graph, InputKind, Node, Phase, Strategy
from shardfx.ir.ops import comm
from shardfx.ir.ops.pools.pool_ops import computed_beside
from shardfx.ir.ops.table import OwnOp
from shardfx.ir.ops.traits import is_cast, uncast
from shardfx.ir.rewriter import Rewriter
from shardfx.passes.base import COMM_EXPLICIT, Pass, PassContext, derived

FUSED = (comm.all_gather, comm.all_reduce, comm.reduce_scatter)
PARTS, FINER, LEAST = 4, 16, 1e6
"""Into so many buckets at least, if they have so many bytes; and where parameters are gathered again in the backward,
of whatever size, so that few of them are replicated at a time."""


class BucketKey(NamedTuple):
    """What must be equal within a bucket."""

    op: OwnOp
    axes: tuple[str, ...]
    dtype: torch.dtype
    reduce: str
    group: str
    loops: tuple[str, ...]
    at: tuple[int, ...]


@dataclass(frozen=True)
class BucketComm(Pass):
    """Coalesce collectives of one kind, group and dtype up to ``mb`` megabytes.

    Where that would leave fewer than four buckets they are smaller (but not below 1 MB), so that the first ones are
    sent while the rest is computed. Where parameters are gathered again in the backward (``zero=3``) it is sixteen of
    any size: a rank has at most two buckets of gathered parameters, and beside them one of gradients.
    """

    name: ClassVar[str] = "bucket-comm"
    requires: ClassVar[frozenset[str]] = frozenset({COMM_EXPLICIT})

    mb: float = 25.0

    def run(self, graph: Graph, context: PassContext) -> bool:
        if self.mb <= 0:
            return False
        _defer_casts(graph)
        _defer_loop_sums(graph)
        _order_updates(graph)
        rewriter, keys = Rewriter(graph), self._keys(graph)
        for early in (False, True):
            for bucket in self._buckets(graph, keys, early):
                if len(bucket) > 1:
                    _fuse(bucket, rewriter, early)
        changed = rewriter.apply()
        graph.rename()
        return changed

    def _keys(self, graph: Graph) -> dict[Node, BucketKey]:
        """The bucket's key of each collective that can be coalesced: not what is sent from another pool of memory; and
        what follows from the batch alone is not delayed by what is computed from parameters."""
        mesh, found = graph.mesh, dict[Node, BucketKey]()
        stored = (inp.value for inp in graph.inputs if inp.kind in (InputKind.PARAMETER, InputKind.BUFFER))
        in_host, of_stored = computed_beside(graph), derived(graph, stored)
        for node in graph.nodes:
            if node.op not in FUSED or node in in_host or not _is_simple(node, graph):
                continue
            if any(mesh[axis].loop for axis in node.kwargs["axes"]):
                continue
            value, spec = node.operands[0], node.operands[0].spec
            over = (*spec.axes, *spec.partial_axes) if spec is not None else ()
            loops = tuple(axis.name for axis in mesh.axes if axis.loop and axis.name in over)
            axes, reduce = tuple(node.kwargs["axes"]), node.kwargs.get("reduce", "")
            group = "batch" if of_stored.isdisjoint(node.operands) else node.phase.value
            found[node] = BucketKey(node.op, axes, value.type.dtype, reduce, group, loops, node.at)
        return found

    def _limits(self, graph: Graph, keys: dict[Node, BucketKey]) -> dict[BucketKey, float]:
        """The most bytes of a bucket."""
        total: dict[BucketKey, float] = {}
        for node, key in keys.items():
            total[key] = total.get(key, 0.0) + node.op.full_bytes(node, graph.mesh)
        stored = {inp.value for inp in graph.of_kind(InputKind.PARAMETER)}
        gathers = (n for n in graph.nodes if n.op is comm.all_gather and n.phase is Phase.BACKWARD)
        parts, least = (FINER, 0.0) if any(uncast(n.operands[0]) in stored for n in gathers) else (PARTS, LEAST)
        return {key: min(self.mb * 1e6, max(nbytes / parts, least)) for key, nbytes in total.items()}

    def _buckets(self, graph: Graph, keys: dict[Node, BucketKey], early: bool) -> Iterator[list[Node]]:
        """Buckets of reductions and gathers of outputs, which wait for later ones until one of them is used or the
        bucket is full; or, ``early``, of gathers of inputs."""
        users, inputs, limits = graph.users(), {inp.value for inp in graph.inputs}, self._limits(graph, keys)
        filling: dict[BucketKey, dict[Node, int]] = {}
        for node in graph.nodes:
            for maker in (value.node for value in node.operands if value.node in keys and not early):
                if maker in filling.get(keys[maker], ()):
                    yield [*filling.pop(keys[maker])]
            gathers = node.op is comm.all_gather
            joins = gathers and uncast(node.operands[0]) in inputs if early else not (gathers and users[node.outs[0]])
            if node in keys and joins:
                key, nbytes = keys[node], node.op.full_bytes(node, graph.mesh)
                if key in filling and sum(filling[key].values()) + nbytes > limits[key]:
                    yield [*filling.pop(key)]
                filling.setdefault(key, {})[node] = nbytes
        yield from map(list, filling.values())


def _defer_casts(graph: Graph) -> None:
    """Put casts of what was reduced behind the backward where nothing of that needs them, so that reductions may wait
    for one another."""
    users, casts = graph.users(), set[Node]()
    for node in graph.nodes:
        maker = node.operands[0].node if is_cast(node) and node.phase is Phase.BACKWARD else None
        if maker is not None and maker.op in (comm.all_reduce, comm.reduce_scatter):
            casts |= {node} if all(user.phase is Phase.UPDATE for user in users[node.outs[0]]) else set()
    if casts:
        graph.nodes.sort(key=lambda node: 2 if node.phase is Phase.UPDATE else int(node in casts))


def _order_updates(graph: Graph) -> None:
    """Put updates into the order of their gradients: what is updated is sent while others are still computed, and what
    is coalesced in the backward is so again."""
    came: dict[Node, int] = {}
    for place, node in enumerate(graph.nodes):
        makers = [value.node for value in node.operands if value.node is not None and node.phase is Phase.UPDATE]
        came[node] = place if node.phase is Phase.BACKWARD else max((came[maker] for maker in makers), default=-1)
    steps, users = [node for node in graph.nodes if node.phase is Phase.UPDATE], graph.users()
    for node in reversed(steps):
        if came[node] < 0:  # it waits for no gradient: it is done for those that do
            came[node] = min((came[user] for value in node.outs for user in users[value]), default=-1)
    graph.nodes = [node for node in graph.nodes if node.phase is not Phase.UPDATE] + sorted(steps, key=came.__getitem__)


def _defer_loop_sums(graph: Graph) -> None:
    """Put what is summed over iterations just before it is used: until then sums may be coalesced."""
    waiting: dict[Node, int] = {}
    nodes: list[Node] = []
    for place, node in enumerate(graph.nodes):
        if node.op is comm.all_reduce and any(graph.mesh[axis].loop for axis in node.kwargs["axes"]):
            waiting[node] = place
            continue
        wanted, needed = set[Node](), node.operands
        while needed:
            each = needed.pop().node
            if each is not None and each in waiting and each not in wanted:
                wanted.add(each)
                needed += each.operands
        nodes += [*sorted(wanted, key=waiting.__getitem__), node]
        for each in wanted:
            del waiting[each]
    graph.nodes = [*nodes, *waiting]


def _is_simple(node: Node, graph: Graph) -> bool:
    """Whether the collective works on equal shards of dim 0 (an all-reduce always does)."""
    if node.op is comm.all_reduce:
        return True
    if node.kwargs.get("dim") != 0 or "view" in node.kwargs:
        return False
    spec = (node.outs if node.op is comm.reduce_scatter else node.operands)[0].spec
    assert spec is not None
    shape = node.outs[0].shape
    return shape[0] % graph.mesh.extent(spec.dims[0].axes) == 0 and math.prod(shape) > 0


def _cast_before(first: Node, members: list[Node], rewriter: Rewriter) -> None:
    """Make casts of inputs before the first gather."""
    for member in members[1:]:
        casts, value = list[Node](), member.operands[0]
        while value.node is not None:
            casts.append(value.node)
            value = value.node.operands[0]
        for cast in reversed(casts):
            moved = rewriter.before(first, cast.copied(lambda value: value))
            rewriter.replace(cast.outs[0], moved.outs[0])
            rewriter.erase(cast)


def _fuse(members: list[Node], rewriter: Rewriter, early: bool) -> None:
    first = members[0]
    if early:
        _cast_before(first, members, rewriter)
    values = tuple(member.operands[0] for member in members)
    kwargs = {k: v for k, v in first.kwargs.items() if k in ("axes", "dim", "reduce")}
    node = Rewriter.make(first.op, values, [v.type for v in values], like=first, kwargs=kwargs)
    for result, member in zip(node.outs, members, strict=True):
        result.spec = member.outs[0].spec
        rewriter.replace(member.outs[0], result)
        rewriter.erase(member)
    needs, gives = (tuple(v.spec for v in each if v.spec is not None) for each in (values, node.outs))
    node.strategy, node.why = Strategy(needs, gives), f"{len(members)} collectives are coalesced"
    if early:
        rewriter.before(first, node)
    else:
        rewriter.after(members[-1], node)
