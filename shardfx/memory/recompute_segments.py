"""Segments of a step that may be recomputed: equal ones as one kind, and the values of each.

A segment is what a module of a list does (``layers.3``), or of a module of the root where there is no list. Some of its
values are live until the backward; outputs that go on to other segments are kept in any case.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from math import inf
from typing import TypeVar

from shardfx.ir.cost.machine import Machine
from shardfx.ir.graph import Graph, Node, Phase, Value, op_name
from shardfx.ir.names import block_of
from shardfx.ir.ops.alike import alike
from shardfx.ir.ops.pools.pool_ops import moves_pool
from shardfx.ir.ops.sends import fetched, is_comm
from shardfx.ir.ops.traits import gives_alias
from shardfx.memory.rank_memory import RankMemory
from shardfx.passes import Offload

Mark = TypeVar("Mark", bound=Hashable)


def segment_of(module: str) -> str:
    """The module of a list that a module lies in, or else the module of the root; empty for the root itself."""
    return block_of(module) or module.partition(".")[0]


@dataclass
class ModelSegment:
    """The segment of a module: its nodes, and a rank's calls for them, ``ahead`` in the forward, ``back`` behind it."""

    path: str
    nodes: list[Node] = field(default_factory=list)
    ahead: list[int] = field(default_factory=list)
    back: list[int] = field(default_factory=list)

    def waits(self, call: int) -> bool:
        """Whether a call is between its forward and its backward."""
        return self.ahead[-1] < call < self.back[0]


@dataclass(eq=False)
class OpGroup:
    """The nodes of one op in one module of a segment: kept together, or recomputed together.

    ``module`` is the path within the segment, and ``seconds`` the time to recompute it. Where it is kept, ``nbytes`` of
    it are live until the backward, which needs them itself; the ``extra`` bytes are needed by ``users`` that are
    recomputed, and live where there are such. ``away`` are the seconds of offloading and fetching the bytes, where that
    is possible.
    """

    module: str
    op: str
    nbytes: int = 0
    seconds: float = 0.0
    extra: int = 0
    users: list[OpGroup] = field(default_factory=list)
    away: float = inf

    def pattern(self, path: str) -> str:
        """The group's pattern in the option ``save``, with ``path`` for the module of the segment."""
        return f"{path}{self.module}:{self.op}"


@dataclass
class SegmentKind:
    """Segments that are alike, in the order in which they run, and the groups that each of them has."""

    segments: list[ModelSegment]
    groups: list[OpGroup]


@dataclass
class SegmentedStep:
    """The memory of a step that stores all activations, and the segments of it that may be recomputed.

    Args:
        memory: of a rank, predicted.
        graph: the planned graph that its program was lowered from.
    """

    memory: RankMemory
    graph: Graph
    machine: Machine
    offload: Offload | None = None
    """The options of offloading activations."""

    @cached_property
    def _forward(self) -> list[Node]:
        return [node for node in self.graph.nodes if node.phase is Phase.FORWARD]

    @cached_property
    def segments(self) -> list[ModelSegment]:
        """The segments that have a forward and a backward, in forward order."""
        found: dict[str, ModelSegment] = {}
        for node in self._forward:
            if path := segment_of(node.where.module):
                found.setdefault(path, ModelSegment(path)).nodes.append(node)
        for at, call in enumerate(self.memory.footprint.calls):
            planned = call.meta.get("shardfx")
            if not isinstance(planned, Node) or planned.phase is Phase.UPDATE:
                continue
            if (segment := found.get(segment_of(planned.where.module))) is not None:
                (segment.ahead if planned.phase is Phase.FORWARD else segment.back).append(at)
        for each in found.values():
            each.ahead, each.back = split_calls(each.ahead, each.back)
        full = [each for each in found.values() if each.ahead and each.back]
        return sorted(full, key=lambda each: each.ahead[0])

    @cached_property
    def kinds(self) -> list[SegmentKind]:
        """The kinds of segments: equal ones grouped."""
        found: dict[Hashable, list[ModelSegment]] = {}
        for each in self.segments:
            start = len(each.path)
            key = tuple([(node.where.module[start:], alike(node, placed=True)) for node in each.nodes])
            found.setdefault(key, []).append(each)
        return [SegmentKind(alike, self._groups(alike[len(alike) // 2])) for alike in found.values()]

    def _groups(self, segment: ModelSegment) -> list[OpGroup]:
        """The groups of one segment that may be recomputed: no gathers of parameters, which are bucketed with those of
        other segments, so that to gather some of them again frees nothing."""
        found: dict[tuple[str, str], OpGroup] = {}
        of: dict[Node, OpGroup] = {}
        offloaded: dict[OpGroup, list[Value]] = {}
        leaving = sources(value for value, users in self._users.items() if users - {segment.path})
        for node in segment.nodes:
            gathers = is_comm(node) and self._fetched.issuperset(node.outs)
            if not leaving.issuperset(node.outs) and not gives_alias(node.op) and not moves_pool(node) and not gathers:
                key = node.where.module[len(segment.path) :], op_name(node.op)
                of[node] = found.setdefault(key, OpGroup(*key))
        for node, group in of.items():
            group.seconds += self._seconds.get(node, 0.0)
            for value in (value for value in node.outs if value not in leaving):
                if value in self.needed:
                    group.nbytes += value.local_bytes(self.graph.mesh)
                    offloaded.setdefault(group, []).append(value)
                else:
                    group.extra += value.local_bytes(self.graph.mesh)
            for value in sources(node.operands):
                used = of.get(value.node) if value.node is not None else None
                if used is not None and used is not group and value not in self.needed:
                    used.users.append(group)
        for group, values in offloaded.items():
            group.away = self._carrying(values)
        return list(found.values())

    def _carrying(self, values: Sequence[Value]) -> float:
        """The seconds of offloading values and fetching them; infinite, where some of them are not."""
        options = self.offload
        if options is None or any(value.type.numel < options.min_numel for value in values):
            return inf
        link = self.machine.pool(options.to)
        return 2 * sum(link.seconds(1, value.local_bytes(self.graph.mesh)) for value in values)

    @cached_property
    def _users(self) -> dict[Value, set[str]]:
        """The segments whose forward uses each value; or a mark that it leaves the graph."""
        found: dict[Value, set[str]] = {output.value: {"outputs"} for output in self.graph.outputs}
        for node in self._forward:
            for value in node.operands:
                found.setdefault(value, set()).add(segment_of(node.where.module))
        return found

    @cached_property
    def needed(self) -> set[Value]:
        """The forward values that the backward uses, behind views."""
        later = (value for node in self.graph.nodes if node.phase is not Phase.FORWARD for value in node.operands)
        return {v for v in sources(later) if v.node is not None and v.node.phase is Phase.FORWARD}

    @cached_property
    def _fetched(self) -> set[Value]:
        """Parameters, and values that are only gathered from them."""
        return fetched(self.graph)

    @cached_property
    def _seconds(self) -> dict[Node, float]:
        """The predicted seconds of each node on a rank."""
        found: dict[Node, float] = {}
        for call, cost in zip(self.memory.footprint.calls, self.memory.footprint.costs, strict=True):
            planned = call.meta.get("shardfx")
            if isinstance(planned, Node):
                found[planned] = found.get(planned, 0.0) + cost.seconds(self.machine, self.graph.mesh)
        return found

    @cached_property
    def live(self) -> list[int]:
        """The live bytes at each call."""
        stored = sum(self.memory.stored.values())
        return [stored + nbytes for nbytes in self.memory.footprint.held]

    @cached_property
    def moments(self) -> dict[tuple[int, ...], int]:
        """The peak of live bytes by the number of segments of each kind that are between forward and backward.

        Where a segment is about to be recomputed, what its forward holds for a moment is there too.
        """
        found: dict[tuple[int, ...], int] = {}
        live = self.live
        for at, nbytes in enumerate(live):
            waiting = self._waiting(at)
            found[waiting] = max(found.get(waiting, 0), nbytes)
        for each in self.segments:
            ahead = live[each.ahead[0] : each.ahead[-1] + 1]
            waiting = self._waiting(each.back[0])
            found[waiting] = max(found[waiting], live[each.back[0]] + max(ahead) - ahead[-1])
        return found

    def _waiting(self, call: int) -> tuple[int, ...]:
        return tuple(sum(each.waits(call) for each in kind.segments) for kind in self.kinds)


def split_calls(ahead: Sequence[int], back: Sequence[int]) -> tuple[list[int], list[int]]:
    """The calls of a forward before the moment that best parts it from its backward, and those of the backward after.

    A few may stand elsewhere: the part of a layer in the loss is summed when all else is done.

    >>> split_calls([1, 2, 3, 90], [50, 51, 52])
    ([1, 2, 3], [50, 51, 52])
    """
    moments = [-1, *ahead]
    best = max(moments, key=lambda moment: sum(at <= moment for at in ahead) + sum(at > moment for at in back))
    return [at for at in ahead if at <= best], [at for at in back if at > best]


def sources(values: Iterable[Value]) -> set[Value]:
    """The base values of views; values themselves, if they are none."""
    open_, found = list(values), set[Value]()
    seen: set[Value] = set()
    while open_:
        value = open_.pop()
        if value in seen:
            continue
        seen.add(value)
        if value.node is not None and gives_alias(value.node.op):
            open_ += value.node.operands
        else:
            found.add(value)
    return found


def runs(kind: SegmentKind, marks: Sequence[Mark]) -> Iterator[tuple[list[ModelSegment], Mark]]:
    """Consecutive segments of equal marks, and their mark."""
    for mark, pairs in groupby(zip(kind.segments, marks, strict=True), key=lambda pair: pair[1]):
        yield [segment for segment, _ in pairs], mark
