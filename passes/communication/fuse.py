"""bucket-comm: collectives of one kind, group and dtype travel together.

    %5 = comm.all_reduce(%3, axes=[dp])
    %8 = comm.all_reduce(%7, axes=[dp])       ->    %5, %8 = comm.all_reduce(%3, %7, axes=[dp])

A reduction waits for later ones until something uses it, or the bucket is full (what follows from the batch alone, such
as how many targets count, does not wait for what takes parameters), and so does a gather of what leaves; a gather of
what is there from the start (a stored parameter, or a cast of it) joins the first of its bucket. Bytes stay the same,
calls get fewer. All ranks run one program order, so that the order of collectives is the same on all, and since a
bucket stands where all its operands are made and none of its results is used, it can never make a cycle.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from shardfx.ir.graph import Graph, InputKind, Node, Phase, Strategy, Value
from shardfx.ir.names import pattern
from shardfx.ir.ops import comm
from shardfx.ir.ops.pools.pool_ops import computed_beside
from shardfx.ir.ops.table import OwnOp
from shardfx.ir.ops.traits import is_cast, uncast
from shardfx.ir.rewriter import Rewriter
from shardfx.passes.base import COMM_EXPLICIT, Context, Pass

FUSED = (comm.all_gather, comm.all_reduce, comm.reduce_scatter)
Key = tuple[OwnOp, tuple[str, ...], torch.dtype, str, str, tuple[str, ...], tuple[int, ...]]


BESIDE = "beside"
"""The group of what is sent from another pool of memory: each travels alone."""
PARTS, FINER, LEAST = 4, 16, 1e6
"""Into so many buckets at least, if they have so many bytes; and where parameters are gathered again in the backward,
of whatever size, so that few of them are whole at a time."""


@dataclass
class CommGroup:
    """Collectives that will travel together, and their bytes."""

    members: list[Node] = field(default_factory=list)
    nbytes: float = 0.0


@dataclass(frozen=True)
class BucketComm(Pass):
    """Fuse collectives of one kind, group and dtype up to ``mb`` megabytes.

    Where that would leave fewer than four buckets they are smaller (but not below 1 MB), so that the first ones travel
    while the rest is computed. Where parameters are gathered again in the backward (``zero=3``) it is sixteen of any
    size: a rank has at most two segments of gathered parameters whole, and beside them a bucket of gradients.

    ``groups`` may name sets of parameters (patterns as in hints) whose gradients and gathers travel together,
    whatever their size; what is in no set is fused by size.
    """

    name: ClassVar[str] = "bucket-comm"
    requires: ClassVar[frozenset[str]] = frozenset({COMM_EXPLICIT})

    mb: float = 25.0
    groups: Sequence[Sequence[str]] = ()

    def run(self, graph: Graph, context: Context) -> bool:
        if self.mb <= 0 and not self.groups:
            return False
        _cast_last(graph)
        _collect_last(graph)
        _step_as_they_come(graph)
        named = self._named(graph)
        rewriter = Rewriter(graph)
        for buckets, early in ((self._late(graph, named), False), (self._early(graph, named), True)):
            for bucket in buckets:
                if len(bucket.members) > 1:
                    _fuse(bucket.members, rewriter, early)
        changed = rewriter.apply()
        graph.rename()
        return changed

    def _named(self, graph: Graph) -> dict[Node, str]:
        """The explicit group of each collective that brings a gradient or fetches a parameter; and of those that move
        what follows from the batch alone: nothing that is computed from parameters keeps that waiting."""
        result = dict.fromkeys(_of_batch(graph), "batch") if self.mb > 0 else {}
        apart = dict.fromkeys(computed_beside(graph), BESIDE)
        if not self.groups:
            return result | apart
        matchers = [[pattern(text) for text in group] for group in self.groups]

        def group_of(name: str) -> str:
            for i, group in enumerate(matchers):
                if any(m.fullmatch(name) for m in group):
                    return f"group {i}"
            return ""

        names = {given.value: given.name for given in graph.inputs}
        for node in graph.nodes:
            if isinstance(node.op, OwnOp) and uncast(node.operands[0]) in names:
                result[node] = group_of(names[uncast(node.operands[0])])
        for output in graph.outputs:
            maker = uncast(output.value).node
            if output.kind.value == "gradient" and maker is not None and isinstance(maker.op, OwnOp):
                result[maker] = group_of(output.name)
        return {node: name for node, name in result.items() if name} | apart

    def _key(self, node: Node, graph: Graph, named: dict[Node, str]) -> Key | None:
        """What must be equal within a bucket; None if the node cannot be fused."""
        if named.get(node) == BESIDE or node.op not in FUSED or not _simple(node, graph):
            return None
        if any(graph.mesh[axis].loop for axis in node.kwargs["axes"]):
            return None
        group = named.get(node, "")
        if not group and self.mb <= 0:
            return None
        value = node.operands[0]
        kind = node.kwargs.get("reduce", "")
        return (
            node.op,
            tuple(node.kwargs["axes"]),
            value.type.dtype,
            kind,
            group or node.phase.value,
            _iterations(value, graph),
            node.at,
        )

    def _limits(self, graph: Graph, named: dict[Node, str]) -> dict[Key, float]:
        """The most bytes of a bucket."""
        total: dict[Key, float] = {}
        stored = {given.value for given in graph.of_kind(InputKind.PARAMETER)}
        parts, least = PARTS, LEAST
        for node in graph.nodes:
            key = self._key(node, graph, named)
            if key is not None:
                total[key] = total.get(key, 0.0) + node.op.whole_bytes(node, graph.mesh)
            if node.op is comm.all_gather and node.phase is Phase.BACKWARD and uncast(node.operands[0]) in stored:
                parts, least = FINER, 0.0
        return {key: min(self.mb * 1e6, max(nbytes / parts, least)) for key, nbytes in total.items()}

    def _late(self, graph: Graph, named: dict[Node, str]) -> list[CommGroup]:
        """Reductions, and gathers of what leaves, wait for later ones until one is used or the bucket is full."""
        open_: dict[Key, CommGroup] = {}
        waiting: dict[Value, Key] = {}
        done: list[CommGroup] = []
        limit, users = self._limits(graph, named), graph.users()

        def close(key: Key) -> None:
            bucket = open_.pop(key)
            for member in bucket.members:
                waiting.pop(member.outs[0], None)
            done.append(bucket)

        for node in graph.nodes:
            for value in node.operands:
                if value in waiting:
                    close(waiting[value])
            key = self._key(node, graph, named)
            if key is None or (node.op is comm.all_gather and users[node.outs[0]]):
                continue
            size = node.op.whole_bytes(node, graph.mesh)
            bucket = open_.get(key)
            if bucket is not None and not key[4].startswith("group") and bucket.nbytes + size > limit[key]:
                close(key)
            bucket = open_.setdefault(key, CommGroup())
            bucket.members.append(node)
            bucket.nbytes += size
            waiting[node.outs[0]] = key
        for key in list(open_):
            close(key)
        return done

    def _early(self, graph: Graph, named: dict[Node, str]) -> list[CommGroup]:
        """Gathers of what is there from the start join the first of their bucket."""
        inputs = {given.value for given in graph.inputs}
        open_: dict[Key, CommGroup] = {}
        done: list[CommGroup] = []
        limit = self._limits(graph, named)
        for node in graph.nodes:
            key = self._key(node, graph, named)
            if key is None or node.op is not comm.all_gather or uncast(node.operands[0]) not in inputs:
                continue
            size = node.op.whole_bytes(node, graph.mesh)
            bucket = open_.get(key)
            if bucket is not None and not key[4].startswith("group") and bucket.nbytes + size > limit[key]:
                done.append(open_.pop(key))
            bucket = open_.setdefault(key, CommGroup())
            bucket.members.append(node)
            bucket.nbytes += size
        return done + list(open_.values())


def _cast_last(graph: Graph) -> None:
    """Casts of what was reduced stand behind the backward where nothing of that needs them, so that reductions may wait
    for one another."""
    users = graph.users()
    casts = {
        node
        for node in graph.nodes
        if is_cast(node) and node.phase is Phase.BACKWARD and _is_reduction(node.operands[0].node)
        if all(user.phase is Phase.UPDATE for user in users[node.outs[0]])
    }
    steps = [node for node in graph.nodes if node.phase is Phase.UPDATE]
    if casts:
        before = [node for node in graph.nodes if node not in casts and node.phase is not Phase.UPDATE]
        graph.nodes = [*before, *(node for node in graph.nodes if node in casts), *steps]


def _step_as_they_come(graph: Graph) -> None:
    """Updates stand in the order in which their gradients come: what is stepped is sent while others still come, and
    what travels together in the backward does so again."""
    came: dict[Node, int] = {}
    for place, node in enumerate(graph.nodes):
        makers = [value.node for value in node.operands if value.node is not None and node.phase is Phase.UPDATE]
        came[node] = place if node.phase is Phase.BACKWARD else max((came[maker] for maker in makers), default=-1)
    steps, users = [node for node in graph.nodes if node.phase is Phase.UPDATE], graph.users()
    for node in reversed(steps):
        if came[node] < 0:  # it waits for no gradient: it is done for those that do
            came[node] = min((came[user] for value in node.outs for user in users[value]), default=-1)
    graph.nodes = [node for node in graph.nodes if node.phase is not Phase.UPDATE] + sorted(steps, key=came.__getitem__)


def _is_reduction(node: Node | None) -> bool:
    return node is not None and node.op in (comm.all_reduce, comm.reduce_scatter)


def _of_batch(graph: Graph) -> list[Node]:
    """The communication of values that no parameter or buffer goes into."""
    stored = {given.value for given in graph.inputs if given.kind in (InputKind.PARAMETER, InputKind.BUFFER)}
    found = []
    for node in graph.nodes:
        if any(value in stored for value in node.operands):
            stored.update(node.outs)
        elif isinstance(node.op, OwnOp):
            found.append(node)
    return found


def _iterations(value: Value, graph: Graph) -> tuple[str, ...]:
    """The loop axes over which each iteration has another piece or share of a value: then it travels in each."""
    spec = value.spec
    return (
        ()
        if spec is None
        else tuple(a.name for a in graph.mesh.axes if a.loop and a.name in (*spec.axes, *spec.partial_axes))
    )


def _collect_last(graph: Graph) -> None:
    """What is collected over iterations is collected just before it is used: until then sums may travel together."""
    waiting: dict[Node, int] = {}
    made: dict[Value, Node] = {}
    nodes: list[Node] = []
    for place, node in enumerate(graph.nodes):
        if node.op is comm.all_reduce and any(graph.mesh[axis].loop for axis in node.kwargs["axes"]):
            waiting[node] = place
            made.update(dict.fromkeys(node.outs, node))
            continue
        wanted, needed = set[Node](), node.operands
        while needed:
            each = made.get(needed.pop())
            if each in waiting and each not in wanted:
                wanted.add(each)
                needed += each.operands
        nodes += [*sorted(wanted, key=waiting.__getitem__), node]
        for each in wanted:
            del waiting[each]
    graph.nodes = [*nodes, *waiting]


def _simple(node: Node, graph: Graph) -> bool:
    """Whether the collective works on equal pieces of dim 0 (an all-reduce always does)."""
    if node.op is comm.all_reduce:
        return True
    whole, sharding = node.outs[0].spec, node.operands[0].spec
    if node.op is comm.reduce_scatter:
        whole, sharding = sharding, whole
    assert whole is not None and sharding is not None
    if node.kwargs.get("dim") != 0 or "view" in node.kwargs:
        return False
    size = node.outs[0].shape[0]
    return size % graph.mesh.extent(sharding.dims[0].axes) == 0 and math.prod(node.outs[0].shape) > 0


def _cast_before(first: Node, members: list[Node], rewriter: Rewriter) -> None:
    """Casts of what is there from the start are made before the first gather."""
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
    specs = []
    for result, member in zip(node.outs, members, strict=True):
        result.spec = member.outs[0].spec
        assert result.spec is not None
        specs.append(result.spec)
        rewriter.replace(member.outs[0], result)
        rewriter.erase(member)
    node.strategy = Strategy(tuple(v.spec for v in values if v.spec is not None), tuple(specs))
    node.why = f"{len(members)} collectives travel together"
    if early:
        rewriter.before(first, node)
    else:
        rewriter.after(members[-1], node)
