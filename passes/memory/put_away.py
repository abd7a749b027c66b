"""How a value is put away and fetched again: what waits between forward and backward, and what is stored elsewhere."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardfx.ir.graph import Graph, Input, InputKind, Node, Output, Phase, Value
from shardfx.ir.ops.comm import send
from shardfx.ir.ops.pools.pool_ops import moves_pool, to_device, to_disk, to_host
from shardfx.ir.ops.traits import gives_alias
from shardfx.ir.rewriter import Rewriter

from .made_again import Repeats
from .update_order import Update, updates_of


@dataclass(frozen=True)
class Pool:
    """Another pool of memory: ``host``, or ``disk`` with the ``folder`` of its files; and how early it is asked."""

    kind: str
    folder: str
    ahead: int

    @property
    def name(self) -> str:
        """As inputs say it."""
        return f"{self.kind}:{self.folder}" if self.folder else self.kind

    def put(self, rewriter: Rewriter, value: Value) -> Node:
        """The node that puts a value away."""
        if self.kind == "host":
            return rewriter.comm(to_host, value, why="put away")
        folder: dict[str, Any] = {"folder": self.folder} if self.folder else {}
        return rewriter.comm(to_disk, value, why="put away", **folder)

    def fetch(self, rewriter: Rewriter, away: Value, user: Node, place: int) -> Value:
        """What is fetched for its first user, before the node at ``place``."""
        back = rewriter.comm(to_device, away, like=user, why=f"fetched for {user.name}")
        if away.node is not None:
            back.where = away.node.where
            if user.op is send or not user.at:  # else another stage of the same rank may need it first
                back.at = away.node.at
        else:  # what several stages hold, each fetches
            back.at = next(given.at for given in rewriter.graph.inputs if given.value is away)
        rewriter.before(rewriter.graph.nodes[place], back)
        return back.outs[0]


@dataclass
class Course:
    """When the values of a graph are used: in the forward last, and behind it first.

    ``shown`` has for what only shows a value of the forward (a view, a part) that value.
    """

    graph: Graph
    shown: dict[Value, Value] = field(default_factory=dict)
    last: dict[Value, int] = field(default_factory=dict)
    needed: dict[Value, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        nodes = self.graph.nodes
        self.places = {node: i for i, node in enumerate(nodes)}
        self.begin = next((i for i, node in enumerate(nodes) if node.phase is not Phase.FORWARD), len(nodes))
        self.update = [i for i, node in enumerate(nodes) if node.phase is Phase.UPDATE]
        self.other = [i for i, node in enumerate(nodes) if node.phase is not Phase.UPDATE]
        for i, node in enumerate(nodes):
            forward = node.phase is Phase.FORWARD
            if forward and gives_alias(node.op) and len(node.operands) == 1:
                self.shown.update(dict.fromkeys(node.outs, self.source(node.operands[0])))
            for value in map(self.source, node.operands):
                if forward:
                    self.last[value] = i
                else:
                    self.needed.setdefault(value, i)

    def source(self, value: Value) -> Value:
        """What a value shows; itself, if it shows none."""
        return self.shown.get(value, value)

    def of_stored(self) -> set[Value]:
        """Parameters, and what is made of nothing else: gathered, cast."""
        found = {given.value for given in self.graph.of_kind(InputKind.PARAMETER)}
        for node in self.graph.nodes:
            if node.phase is Phase.FORWARD and node.operands and all(self.source(v) in found for v in node.operands):
                found.update(node.outs)
        return found

    def ahead(self, user: Node, count: int) -> int:
        """The place so many nodes before a user; those of the update, which stand among others, count in it alone."""
        places = self.update if user.phase is Phase.UPDATE else self.other
        return places[max(bisect_left(places, self.places[user]) - count, 0)]

    def end_of(self, value: Value) -> int:
        """The place of what uses a value of the forward last, there."""
        assert value.node is not None
        return self.last.get(value, self.places[value.node])


def put_away_waiting(graph: Graph, pool: Pool, takes: Callable[[Value], bool]) -> int:
    """Put away what waits between forward and backward, as far as ``takes`` says; gives how many values that were."""
    course = Course(graph)
    stays = course.of_stored() | {course.source(output.value) for output in graph.outputs}

    def waits(value: Value, first: int) -> bool:
        node = value.node
        if node is None or node.phase is not Phase.FORWARD or value in stays or moves_pool(node) or not takes(value):
            return False
        return course.ahead(graph.nodes[first], pool.ahead) > max(course.end_of(value) + 1, course.begin)

    away = {value for value, first in course.needed.items() if waits(value, first)}
    fetched: dict[Value, Value] = {}

    def instead(rewriter: Rewriter, value: Value, anchor: Node) -> Value:
        if value in away and value not in fetched:
            put = pool.put(rewriter, value)
            rewriter.after(graph.nodes[course.end_of(value)], put)
            place = max(course.ahead(anchor, pool.ahead), course.begin)
            fetched[value] = pool.fetch(rewriter, put.outs[0], anchor, place)
        return fetched.get(value, value)

    Repeats(graph, lambda value: course.source(value) is not value and course.source(value) in away, instead).run()
    return len(away)


def store_beside(graph: Graph, pool: Pool, stored: Sequence[Input]) -> None:
    """Let inputs lie in another pool: each is fetched for every phase that takes it, and its new content put there."""
    rewriter, course, users = Rewriter(graph), Course(graph), graph.users()
    outputs: dict[str, list[Output]] = {}
    for output in graph.outputs:
        if output.kind.is_given_away:
            outputs.setdefault(output.name, []).append(output)
    whole: dict[Value, Input] = {}
    """What is fetched for the forward."""
    updates = updates_of(graph, [given for given in stored if given.kind is InputKind.STATE])
    starts = _starts(updates, course, pool.ahead)
    ends = {given.name: update.nodes[-1] for update in updates for given in update.states}
    for given in (*starts, *(given for given in stored if given not in starts)):
        given.pool = pool.name
        by_phase = {phase: [n for n in users[given.value] if n.phase is phase] for phase in Phase}
        if by_phase[Phase.FORWARD]:  # the backward takes that as well, and views of it, until it is given its own
            by_phase[Phase.FORWARD] += by_phase.pop(Phase.BACKWARD)
        for phase, mine in by_phase.items():
            if mine:
                place = course.ahead(mine[0], pool.ahead)
                if phase is Phase.UPDATE and given in starts:
                    place = min(starts[given], course.places[mine[0]])
                value = pool.fetch(rewriter, given.value, mine[0], place)
                rewriter.replace(given.value, value, users=mine)
                if phase is Phase.FORWARD:
                    whole[value] = given
        for output in outputs.get(given.name, ()):
            if output.value.node is not None:
                away = pool.put(rewriter, output.value)
                made = output.value.node
                rewriter.after(max(made, ends.get(given.name, made), key=course.places.__getitem__), away)
                rewriter.replace(output.value, away.outs[0], users=[output])
    rewriter.apply()
    graph.rename()
    _fetch_again(graph, pool, whole)


def _starts(updates: Sequence[Update], course: Course, ahead: int) -> dict[Input, int]:
    """Where states are fetched for their updates, in that order: as early as may be, so that no more bytes of them are
    there at a time than of the two largest updates."""
    room, first, there = 2 * max((update.nbytes for update in updates), default=0), 0, 0
    found: dict[Input, int] = {}
    for update in updates:
        there += update.nbytes
        while there > room:
            there -= updates[first].nbytes
            first += 1
        earliest = course.places[updates[first].nodes[0]]
        place = max(min(earliest, course.places[update.nodes[0]] - ahead), course.begin)
        found.update(dict.fromkeys(update.states, place))
    return found


def _fetch_again(graph: Graph, pool: Pool, whole: Mapping[Value, Input]) -> None:
    """What was fetched for the forward goes there, and is fetched once more for the backward."""
    course = Course(graph)
    fetched: dict[Value, Value] = {}

    def instead(rewriter: Rewriter, value: Value, anchor: Node) -> Value:
        if value in whole and value not in fetched:
            place = max(course.ahead(anchor, pool.ahead), course.begin)
            fetched[value] = pool.fetch(rewriter, whole[value].value, anchor, place)
        return fetched.get(value, value)

    Repeats(graph, lambda value: course.source(value) is not value and course.source(value) in whole, instead).run()
