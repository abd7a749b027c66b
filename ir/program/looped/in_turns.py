"""Which nodes of a planned graph a rank does in turns, and in which order.

A node whose tensors are cut, or partial, over an axis of time is done once for each turn; where a value becomes whole
over the axis (a sum is complete, parts stand together) turns end. What must be whole *before* other turns begin, such
as the number of targets that count, is collected in turns of its own, as late as it may be; what two such loops need
is done in both of them.

    %1 = aten.ne(%y{mb})            mb: %1, %2, %3              the count of all turns
    %2 = aten.sum(%1) +{mb}         mb: %4, %5, ...             forward and backward
    %3 = comm.all_reduce(%2)   ->   %9                          what needs the gradients of all
    %4 = aten.mm(%x{mb}, ...)
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass

from shardfx.ir.graph import Node, Output, Value
from shardfx.ir.mesh import Mesh
from shardfx.ir.ops.sends import EACH_TURN
from shardfx.ir.spec import Spec


@dataclass(frozen=True)
class Loop:
    """Steps that are done once for each turn of an axis; ``ends`` are values that are given out as each turn makes
    them.

    Where turns are done in parts, ``units`` are these by name, which together are the ``steps``, and ``order`` says
    which unit is done of which turn, one word ``F0.1`` behind the other.
    """

    axis: str
    steps: tuple[Node | Loop, ...]
    ends: frozenset[Value] = frozenset()
    units: tuple[tuple[str, tuple[Node | Loop, ...]], ...] = ()
    order: str = ""

    def nodes(self) -> list[Node]:
        """The nodes, those of loops inside among them."""
        return nodes_of(self.steps)

    def given(self) -> set[Value]:
        """The values that this loop and those inside give out as each turn makes them."""
        return {*self.ends, *(value for step in self.steps if isinstance(step, Loop) for value in step.given())}


def nodes_of(steps: Iterable[Node | Loop]) -> list[Node]:
    """The nodes of steps, those of loops among them."""
    return [node for step in steps for node in (step.nodes() if isinstance(step, Loop) else [step])]


def time_axes(mesh: Mesh) -> tuple[str, ...]:
    """The axes of turns, outermost first."""
    return tuple(axis.name for axis in mesh.axes if axis.time)


def in_turns(nodes: Sequence[Node], outputs: Iterable[Output], mesh: Mesh) -> list[Node | Loop]:
    """The nodes in an order in which each may be done, those of turns in loops."""
    return _arranged(list(nodes), {output.value for output in outputs}, time_axes(mesh))


def hangs_on(axis: str, value: Value) -> bool:
    """Whether each turn of an axis has another piece, or another share, of a value."""
    return value.spec is not None and _over(value.spec, axis)


def _over(spec: Spec | None, axis: str) -> bool:
    return spec is not None and (axis in spec.axes or axis in spec.partial_axes)


def is_turned(node: Node, axis: str) -> bool:
    """Whether a node is done once for each turn of an axis."""
    made = node.strategy
    specs = (*made.operands, *made.results) if made is not None else ()
    return any(hangs_on(axis, value) for value in (*node.operands, *node.outs)) or any(_over(s, axis) for s in specs)


def _arranged(nodes: list[Node], wanted: Container[Value], axes: Sequence[str]) -> list[Node | Loop]:
    if not axes:
        return list(nodes)
    axis, *inner = axes
    turned = {node for node in nodes if is_turned(node, axis)}
    if not turned:
        return _arranged(nodes, wanted, inner)
    turned |= _sunk(nodes, turned, inner)
    loops = _Loops(axis, nodes, turned, wanted)
    steps: list[Node | Loop] = []
    for each in loops.order():
        if isinstance(each, Loop):
            inside = _arranged(each.nodes(), each.ends, inner)
            deeper = {value for step in inside if isinstance(step, Loop) for value in step.given()}
            steps.append(Loop(axis, tuple(inside), each.ends - deeper))
        else:
            steps.append(each)
    if not inner:
        return steps
    plain: list[Node | Loop] = []
    run: list[Node] = []
    for step in steps:  # what is done once may have turns of the other axes in it
        if isinstance(step, Loop):
            plain += [*_arranged(run, wanted, inner), step]
            run = []
        else:
            run.append(step)
    return [*plain, *_arranged(run, wanted, inner)]


def _sunk(nodes: Sequence[Node], turned: set[Node], inner: Sequence[str]) -> set[Node]:
    """What is done anew in each turn: what says so, and what is made of it for turns alone; and what turns within these
    have pieces of."""
    users: dict[Node, list[Node]] = {}
    for node in nodes:
        for value in node.operands:
            if value.node is not None:
                users.setdefault(value.node, []).append(node)
    behind: set[Node] = set()
    for node in nodes:
        again = node.attrs.get(EACH_TURN) or any(hangs_on(axis, value) for axis in inner for value in node.outs)
        if node not in turned and (again or any(value.node in behind for value in node.operands)):
            behind.add(node)
    sunk: set[Node] = set()
    for node in reversed(nodes):
        if node in behind and users.get(node) and all(user in turned or user in sunk for user in users[node]):
            sunk.add(node)
    return sunk


def crossing(nodes: Sequence[Node], mesh: Mesh) -> tuple[Node, Node, str, str] | None:
    """Who uses a piece of a turn on the other side of where turns around it begin or end, and who makes it; with the
    axes around and within. There is no order in which that can be done."""
    axes = time_axes(mesh)
    for at, axis in enumerate(axes[:-1]):
        inner = axes[at + 1 :]
        own = {node for node in nodes if is_turned(node, axis)}
        turned = own | _sunk(nodes, own, inner)
        for node in nodes:
            for value in node.operands:
                maker, within = value.node, next((each for each in inner if hangs_on(each, value)), "")
                if maker is None or not within or hangs_on(axis, value):
                    continue
                if maker in own or (maker in turned) is not (node in turned):
                    return node, maker, axis, within
    return None


class _Loops:
    """The loops over one axis among some nodes, and what stands between them."""

    def __init__(self, axis: str, nodes: list[Node], turned: set[Node], wanted: Container[Value]) -> None:
        self.axis, self.nodes, self.turned = axis, nodes, turned
        self.wanted = wanted
        self.ending = {n for n in turned if is_turned(n, axis) and not any(hangs_on(axis, v) for v in n.outs)}
        """Where a value becomes whole over the axis."""
        self.count = self._earliest()
        self.loop_of = self._latest()

    def _earliest(self) -> int:
        """How many loops there must be: what is collected in one is there in the next."""
        there: dict[Value, int] = {}
        most = 0
        for node in self.nodes:
            loop = max((there.get(value, 0) for value in node.operands), default=0)
            if node in self.turned:
                most = max(most, loop)
            there |= dict.fromkeys(node.outs, loop + (node in self.ending))
        return most + 1

    def _latest(self) -> dict[Node, int]:
        """In which loop each value is collected: in the last that may be."""
        before: dict[Value, int] = {}
        found: dict[Node, int] = {}
        for node in reversed(self.nodes):
            needed = min((before.get(value, self.count) for value in node.outs), default=self.count)
            if node in self.ending:
                needed = found[node] = needed - 1
            elif node in self.turned:
                needed = min(needed, self.count - 1)
            for value in node.operands:
                before[value] = min(before.get(value, self.count), needed)
        return found

    def order(self) -> list[Node | Loop]:
        """All of it, in order: before each loop what it needs; behind the last one the rest."""
        made: list[Node | Loop] = []
        done: set[Node] = set()
        for number in range(self.count):
            loop = self._loop(number)
            if not loop.steps:
                continue
            made += self._before(loop.nodes(), done)
            made.append(loop)
            done |= {node for node in loop.nodes() if node in self.ending}
        made += [node for node in self.nodes if node not in self.turned and node not in done]
        return made

    def _loop(self, number: int) -> Loop:
        """What one loop collects, and all that it is made of in turns."""
        last = number == self.count - 1
        kept = {node for node, loop in self.loop_of.items() if loop == number}
        ends: set[Value] = set()
        for node in reversed(self.nodes):
            if node not in self.turned or node in self.ending:
                continue
            given = {v for v in node.outs if v in self.wanted and hangs_on(self.axis, v)} if last else set()
            ends |= given
            if given:
                kept.add(node)
        needed = {value for node in kept for value in node.operands}
        for node in reversed(self.nodes):
            if node in self.turned and node not in self.ending and any(value in needed for value in node.outs):
                kept.add(node)
                needed.update(node.operands)
        return Loop(self.axis, tuple(node for node in self.nodes if node in kept), frozenset(ends))

    def _before(self, nodes: Iterable[Node], done: set[Node]) -> list[Node]:
        """What is done once, and needed by some nodes: as far as it is not done yet."""
        needed = {value for node in nodes for value in node.operands}
        found = []
        for node in reversed(self.nodes):
            if node not in self.turned and node not in done and any(value in needed for value in node.outs):
                found.append(node)
                done.add(node)
                needed.update(node.operands)
        return found[::-1]
