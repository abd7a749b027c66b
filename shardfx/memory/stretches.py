"""What may be kept or made again: the stretches of a step's forward, those alike as one, and the values of each.

A stretch is what a module of a list does (``layers.3``), or of a module of the root where there is no list; or several
modules that follow one another (:mod:`.successive`). Of what it makes some waits for the backward; what goes on to
other stretches stays in any case.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import inf

from shardfx.ir.cost.machine import Machine
from shardfx.ir.graph import Graph, Node, Phase, Value, op_name
from shardfx.ir.names import block_of, prefixes, within
from shardfx.ir.ops.alike import alike
from shardfx.ir.ops.pools.pool_ops import moves_pool
from shardfx.ir.ops.sends import fetched, is_comm
from shardfx.ir.ops.traits import gives_alias
from shardfx.passes import Offload
from shardfx.passes.memory.regions import joined

from .rank_memory import RankMemory


def stretch_of(module: str) -> str:
    """The module of a list that a module lies in, or else the module of the root; empty for the root itself."""
    return block_of(module) or next(iter(prefixes(module)), "")


@dataclass
class Stretch:
    """The nodes of one stretch, and when a rank calls them: ``ahead`` in the forward, ``back`` in the backward.

    ``paths`` are its modules.
    """

    paths: tuple[str, ...]
    nodes: list[Node] = field(default_factory=list)
    ahead: list[int] = field(default_factory=list)
    back: list[int] = field(default_factory=list)

    def place(self, module: str) -> tuple[int, str]:
        """Of a module the one of the stretch that it lies in, and the rest of its path; -1: none, and the whole."""
        at = next((at for at, path in enumerate(self.paths) if within(module, path)), -1)
        return at, module[len(self.paths[at]) :] if at >= 0 else module

    def waits(self, call: int) -> bool:
        """Whether its forward is done at a call, and its backward has not begun."""
        return self.ahead[-1] < call < self.back[0]


@dataclass(eq=False)
class Group:
    """The nodes of one op in one module of a stretch: kept together, or made again together.

    ``at`` and ``module`` are the :meth:`Stretch.place` of it.
    ``seconds`` is what making it again takes. Where it is kept, ``nbytes`` of it wait for the backward, which needs
    them itself; the ``extra`` bytes are needed by ``users`` that are made again, and wait where there are such.
    ``away`` are the seconds that putting the bytes away and fetching them take, where that may be.
    """

    at: int
    module: str
    op: str
    nbytes: int = 0
    seconds: float = 0.0
    extra: int = 0
    users: list[Group] = field(default_factory=list)
    away: float = inf

    def pattern(self, paths: Sequence[str]) -> str:
        """Its name in the option ``keep``, with ``paths`` for the modules of the stretch."""
        return f"{paths[self.at] if self.at >= 0 else ''}{self.module}:{self.op}"


@dataclass
class Kind:
    """Stretches that are alike, in the order in which they run, and the groups that each of them has."""

    stretches: list[Stretch]
    groups: list[Group]


@dataclass
class Course:
    """The memory of a step in which all is kept, and what of it may be made again.

    Args:
        memory: of a rank, foreseen.
        graph: the planned graph that its program was lowered from.
    """

    memory: RankMemory
    graph: Graph
    machine: Machine
    offload: Offload | None = None
    """How activations may be put away."""
    parts: tuple[tuple[str, ...], ...] = ()
    """The modules of each stretch, where they are not those of lists, each by itself."""

    def stretch_at(self, module: str) -> str:
        """The first module of the stretch that a module lies in; empty where it lies in none."""
        if not self.parts:
            return stretch_of(module)
        return next((self._into[path] for path in prefixes(module) if path in self._into), "")

    @cached_property
    def _into(self) -> dict[str, str]:
        return {path: paths[0] for paths in self.parts for path in paths}

    @cached_property
    def _names(self) -> dict[Node, str]:
        """The stretch of each node of the forward that lies in one, by the first of its modules."""
        forward = [node for node in self.graph.nodes if node.phase is Phase.FORWARD]
        if not self.parts:
            return {node: path for node in forward if (path := stretch_of(node.where.module))}
        of = {node: path for node in forward for path in prefixes(node.where.module) if path in self._into}
        return joined(self.graph, of, self._into)

    @cached_property
    def stretches(self) -> list[Stretch]:
        """Those that have a forward and a backward, the first first."""
        of_parts = {paths[0]: paths for paths in self.parts}
        found: dict[str, Stretch] = {}
        for node, path in self._names.items():
            found.setdefault(path, Stretch(of_parts.get(path, (path,)))).nodes.append(node)
        for at, call in enumerate(self.memory.footprint.calls):
            planned = call.meta.get("shardfx")
            if not isinstance(planned, Node) or planned.phase is Phase.UPDATE:
                continue
            module, ahead = planned.where.module, planned.phase is Phase.FORWARD
            stretch = found.get((ahead and self._names.get(planned)) or self.stretch_at(module))
            if stretch is not None:
                (stretch.ahead if ahead else stretch.back).append(at)
        for each in found.values():
            each.ahead, each.back = parted(each.ahead, each.back)
        whole = [each for each in found.values() if each.ahead and each.back]
        return sorted(whole, key=lambda each: each.ahead[0])

    @cached_property
    def kinds(self) -> list[Kind]:
        """The stretches, those alike together."""
        found: dict[Hashable, list[Stretch]] = {}
        for each in self.stretches:
            key = tuple([(each.place(node.where.module), alike(node, placed=True)) for node in each.nodes])
            found.setdefault(key, []).append(each)
        return [Kind(alike, self._groups(alike[len(alike) // 2])) for alike in found.values()]

    def _groups(self, stretch: Stretch) -> list[Group]:
        """The groups of one stretch that may be made again: no gathers of parameters, which travel with those of other
        stretches, so that to gather some of them again frees nothing."""
        found: dict[tuple[int, str, str], Group] = {}
        of: dict[Node, Group] = {}
        made: dict[Node, list[Value]] = {}
        carried: dict[Group, list[Value]] = {}
        leaving = sources(value for value, users in self._users.items() if users - {stretch.paths[0]})
        for node in stretch.nodes:
            made[node] = [value for value in node.outs if value not in leaving]
            gathers = is_comm(node) and self._fetched.issuperset(node.outs)
            if made[node] and not gives_alias(node.op) and not moves_pool(node) and not gathers:
                key = *stretch.place(node.where.module), op_name(node.op)
                of[node] = found.setdefault(key, Group(*key))
        for node, group in of.items():
            group.seconds += self._seconds.get(node, 0.0)
            for value in made[node]:
                if value in self.needed:
                    group.nbytes += value.local_bytes(self.graph.mesh)
                    carried.setdefault(group, []).append(value)
                else:
                    group.extra += value.local_bytes(self.graph.mesh)
            for value in sources(node.operands):
                used = of.get(value.node) if value.node is not None else None
                if used is not None and used is not group and value not in self.needed:
                    used.users.append(group)
        for group, values in carried.items():
            group.away = self._carrying(values)
        return list(found.values())

    def _carrying(self, values: Sequence[Value]) -> float:
        """The seconds of putting values away and fetching them; infinite, where some of them are not."""
        options = self.offload
        if options is None or any(value.type.numel < options.min_numel for value in values):
            return inf
        link = self.machine.pool(options.to)
        return 2 * sum(link.seconds(1, value.local_bytes(self.graph.mesh)) for value in values)

    @cached_property
    def _users(self) -> dict[Value, set[str]]:
        """Of each value the stretches whose forward uses it; or that it leaves the graph."""
        found: dict[Value, set[str]] = {output.value: {"outputs"} for output in self.graph.outputs}
        for node in self.graph.nodes:
            for value in node.operands if node.phase is Phase.FORWARD else ():
                found.setdefault(value, set()).add(self._names.get(node, ""))
        return found

    @cached_property
    def needed(self) -> set[Value]:
        """What the backward uses of the forward, behind views."""
        later = (value for node in self.graph.nodes if node.phase is not Phase.FORWARD for value in node.operands)
        return {v for v in sources(later) if v.node is not None and v.node.phase is Phase.FORWARD}

    @cached_property
    def _fetched(self) -> set[Value]:
        """Parameters, and what is only gathered of them."""
        return fetched(self.graph)

    @cached_property
    def _seconds(self) -> dict[Node, float]:
        """What a rank takes for each node."""
        found: dict[Node, float] = {}
        for call, cost in zip(self.memory.footprint.calls, self.memory.footprint.costs, strict=True):
            planned = call.meta.get("shardfx")
            if isinstance(planned, Node):
                found[planned] = found.get(planned, 0.0) + cost.seconds(self.machine, self.graph.mesh)
        return found

    @cached_property
    def given(self) -> int:
        """The bytes that are there all the time."""
        return sum(held.nbytes for held in self.memory.given)

    @cached_property
    def held(self) -> list[int]:
        """The bytes that are there at each call."""
        footprint = self.memory.footprint
        return [self.given + a + b for a, b in zip(footprint.live, footprint.inside, strict=True)]

    def moments(self) -> dict[tuple[int, ...], int]:
        """The most bytes that are held, by how many stretches of each kind wait for their backward then.

        Where a stretch is about to be made again, what its forward holds for a moment is there too.
        """
        found: dict[tuple[int, ...], int] = {}
        held = self.held
        for at, nbytes in enumerate(held):
            waiting = self._waiting(at)
            found[waiting] = max(found.get(waiting, 0), nbytes)
        for each in self.stretches:
            ahead = held[each.ahead[0] : each.ahead[-1] + 1]
            waiting = self._waiting(each.back[0])
            found[waiting] = max(found[waiting], held[each.back[0]] + max(ahead) - ahead[-1])
        return found

    def _waiting(self, call: int) -> tuple[int, ...]:
        return tuple(sum(each.waits(call) for each in kind.stretches) for kind in self.kinds)


def parted(ahead: Sequence[int], back: Sequence[int]) -> tuple[list[int], list[int]]:
    """The calls of a forward before the moment that parts it best from its backward, and those of the backward behind.

    A few may stand elsewhere: the part of a layer in the loss is summed when all else is done.

    >>> parted([1, 2, 3, 90], [50, 51, 52])
    ([1, 2, 3], [50, 51, 52])
    """
    moments = [-1, *ahead]
    best = max(moments, key=lambda moment: sum(at <= moment for at in ahead) + sum(at > moment for at in back))
    return [at for at in ahead if at <= best], [at for at in back if at > best]


def sources(values: Iterable[Value]) -> set[Value]:
    """What values are views of; themselves, if they are none."""
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


def runs(marks: Sequence[Hashable]) -> Iterator[tuple[int, int]]:
    """The starts and lengths of the stretches of equal marks."""
    start = 0
    for i in range(1, len(marks) + 1):
        if i == len(marks) or marks[i] != marks[start]:
            yield start, i - start
            start = i
