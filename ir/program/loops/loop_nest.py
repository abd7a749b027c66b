"""The loop nest of a planned graph: which nodes run in every iteration of which loop, in which order, on which rows.

A node whose tensors are sharded, or partial, over a loop axis runs once for each iteration; where a value becomes
complete over the axis (a sum is done, slices are concatenated) a loop ends. What must be complete *before* other loops
begin, such as the number of targets that count, is computed in a loop of its own, as late as possible; what two such
loops need is computed in both of them.

    %1 = aten.ne(%y{mb})            mb: %1, %2, %3              the count of all iterations
    %2 = aten.sum(%1) +{mb}         mb: %4, %5, ...             forward and backward
    %3 = comm.all_reduce(%2)   ->   %9                          what needs the gradients of all
    %4 = aten.mm(%x{mb}, ...)
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from shardfx.ir.dim_sharding import Part, bounds, chunk
from shardfx.ir.graph import Node, Output, Value
from shardfx.ir.mesh import Mesh
from shardfx.ir.ops.sends import EACH_ITERATION
from shardfx.ir.spec import Spec


@dataclass(frozen=True)
class PlannedLoop:
    """Steps that run once for each iteration of an axis; ``ends`` are values that leave as each iteration makes them.

    Schedule actions are ``units`` by name, which together are the ``steps``, and run in an ``order`` of words ``F0.1``.
    """

    axis: str
    steps: tuple[Node | PlannedLoop, ...]
    ends: frozenset[Value] = frozenset()
    units: tuple[tuple[str, tuple[Node | PlannedLoop, ...]], ...] = ()
    order: str = ""

    def nodes(self) -> list[Node]:
        """The nodes, those of loops inside among them."""
        return nodes_of(self.steps)

    def given(self) -> set[Value]:
        """The values that this loop and those inside give out as each iteration makes them."""
        return {*self.ends, *(value for step in self.steps if isinstance(step, PlannedLoop) for value in step.given())}


def nodes_of(steps: Iterable[Node | PlannedLoop]) -> list[Node]:
    """The nodes of steps, those of loops among them."""
    return [node for step in steps for node in (step.nodes() if isinstance(step, PlannedLoop) else [step])]


def loop_axes(mesh: Mesh) -> tuple[str, ...]:
    """The axes of iterations, outermost first."""
    return tuple(axis.name for axis in mesh.axes if axis.loop)


def loop_nest(nodes: Sequence[Node], outputs: Iterable[Output], mesh: Mesh) -> list[Node | PlannedLoop]:
    """The nodes in an order in which each may be done, those of iterations in loops."""
    return _arranged(list(nodes), {output.value for output in outputs}, loop_axes(mesh))


def varies_over(axis: str, value: Value) -> bool:
    """Whether each iteration of an axis has another shard, or another share, of a value."""
    return value.spec is not None and _over(value.spec, axis)


def _over(spec: Spec | None, axis: str) -> bool:
    return spec is not None and (axis in spec.axes or axis in spec.partial_axes)


def is_looped(node: Node, axis: str) -> bool:
    """Whether a node is done once for each iteration of an axis."""
    made = node.strategy
    specs = (*made.operands, *made.results) if made is not None else ()
    return any(varies_over(axis, value) for value in (*node.operands, *node.outs)) or any(_over(s, axis) for s in specs)


def _arranged(nodes: list[Node], wanted: Container[Value], axes: Sequence[str]) -> list[Node | PlannedLoop]:
    if not axes:
        return list(nodes)
    axis, *inner = axes
    looped = {node for node in nodes if is_looped(node, axis)}
    if not looped:
        return _arranged(nodes, wanted, inner)
    looped |= _recomputed_inside(nodes, looped, inner)
    loops = _LoopSplit(axis, nodes, looped, wanted)
    steps: list[Node | PlannedLoop] = []
    for each in loops.order():
        if isinstance(each, PlannedLoop):
            inside = _arranged(each.nodes(), each.ends, inner)
            deeper = {value for step in inside if isinstance(step, PlannedLoop) for value in step.given()}
            steps.append(PlannedLoop(axis, tuple(inside), each.ends - deeper))
        else:
            steps.append(each)
    if not inner:
        return steps
    plain: list[Node | PlannedLoop] = []
    run: list[Node] = []
    for step in steps:  # what is done once may have iterations of the other axes in it
        if isinstance(step, PlannedLoop):
            plain += [*_arranged(run, wanted, inner), step]
            run = []
        else:
            run.append(step)
    return [*plain, *_arranged(run, wanted, inner)]


def _recomputed_inside(nodes: Sequence[Node], looped: set[Node], inner: Sequence[str]) -> set[Node]:
    """What is done anew in each iteration: what says so, and what is made of it for iterations alone; and what
    iterations within these have shards of."""
    users: dict[Node, list[Node]] = {}
    for node in nodes:
        for value in node.operands:
            if value.node is not None:
                users.setdefault(value.node, []).append(node)
    behind: set[Node] = set()
    for node in nodes:
        again = node.attrs.get(EACH_ITERATION) or any(varies_over(axis, value) for axis in inner for value in node.outs)
        if node not in looped and (again or any(value.node in behind for value in node.operands)):
            behind.add(node)
    sunk: set[Node] = set()
    for node in reversed(nodes):
        if node in behind and users.get(node) and all(user in looped or user in sunk for user in users[node]):
            sunk.add(node)
    return sunk


def crossing_use(nodes: Sequence[Node], mesh: Mesh) -> tuple[Node, Node, str, str] | None:
    """A use of a slice of an iteration outside the loop around it, and its maker; with the axes around and within.
    There is no order in which that can be done."""
    axes = loop_axes(mesh)
    for at, axis in enumerate(axes[:-1]):
        inner = axes[at + 1 :]
        own = {node for node in nodes if is_looped(node, axis)}
        looped = own | _recomputed_inside(nodes, own, inner)
        for node in nodes:
            for value in node.operands:
                maker, within = value.node, next((each for each in inner if varies_over(each, value)), "")
                if maker is None or not within or varies_over(axis, value):
                    continue
                if maker in own or (maker in looped) is not (node in looped):
                    return node, maker, axis, within
    return None


class _LoopSplit:
    """The loops over one axis among some nodes, and what stands between them."""

    def __init__(self, axis: str, nodes: list[Node], looped: set[Node], wanted: Container[Value]) -> None:
        self.axis, self.nodes, self.looped = axis, nodes, looped
        self.wanted = wanted
        self.ending = {n for n in looped if is_looped(n, axis) and not any(varies_over(axis, v) for v in n.outs)}
        """Where a value becomes replicated over the loop axis."""
        self.count = self._earliest()
        self.loop_of = self._latest()

    def _earliest(self) -> int:
        """The minimum number of loops: results that one collects are available in the next."""
        there: dict[Value, int] = {}
        most = 0
        for node in self.nodes:
            loop = max((there.get(value, 0) for value in node.operands), default=0)
            if node in self.looped:
                most = max(most, loop)
            there |= dict.fromkeys(node.outs, loop + (node in self.ending))
        return most + 1

    def _latest(self) -> dict[Node, int]:
        """The loop in which each value is collected: the last possible one."""
        before: dict[Value, int] = {}
        found: dict[Node, int] = {}
        for node in reversed(self.nodes):
            needed = min((before.get(value, self.count) for value in node.outs), default=self.count)
            if node in self.ending:
                needed = found[node] = needed - 1
            elif node in self.looped:
                needed = min(needed, self.count - 1)
            for value in node.operands:
                before[value] = min(before.get(value, self.count), needed)
        return found

    def order(self) -> list[Node | PlannedLoop]:
        """All steps, in order: before each loop what it needs; behind the last one the rest."""
        made: list[Node | PlannedLoop] = []
        done: set[Node] = set()
        for number in range(self.count):
            loop = self._loop(number)
            if not loop.steps:
                continue
            made += self._before(loop.nodes(), done)
            made.append(loop)
            done |= {node for node in loop.nodes() if node in self.ending}
        made += [node for node in self.nodes if node not in self.looped and node not in done]
        return made

    def _loop(self, number: int) -> PlannedLoop:
        """One loop: what it collects, and the steps of its iterations."""
        last = number == self.count - 1
        kept = {node for node, loop in self.loop_of.items() if loop == number}
        ends: set[Value] = set()
        for node in reversed(self.nodes):
            if node not in self.looped or node in self.ending:
                continue
            leaving = {v for v in node.outs if v in self.wanted and varies_over(self.axis, v)} if last else set()
            ends |= leaving
            if leaving:
                kept.add(node)
        needed = {value for node in kept for value in node.operands}
        for node in reversed(self.nodes):
            if node in self.looped and node not in self.ending and any(value in needed for value in node.outs):
                kept.add(node)
                needed.update(node.operands)
        return PlannedLoop(self.axis, tuple(node for node in self.nodes if node in kept), frozenset(ends))

    def _before(self, nodes: Iterable[Node], done: set[Node]) -> list[Node]:
        """The steps outside loops that some nodes need, as far as they are not placed yet."""
        needed = {value for node in nodes for value in node.operands}
        found = []
        for node in reversed(self.nodes):
            if node not in self.looped and node not in done and any(value in needed for value in node.outs):
                found.append(node)
                done.add(node)
                needed.update(node.operands)
        return found[::-1]


def iteration_rows(
    spec: Spec, shape: Sequence[int], mesh: Mesh, coords: Mapping[str, int], axis: str, dim: int
) -> tuple[int, int]:
    """Start and length of an iteration's rows among those of all iterations of an axis, along a dim that it shardings,
    at ``coords`` of it and the axes around; an iteration has the rows of all iterations of the axes within."""
    sharding = spec.dims[dim]
    inner = [a for a in loop_axes(mesh) if a in sharding.axes and mesh.order(a) > mesh.order(axis)]
    if sharding.is_even(shape[dim], mesh):
        length = spec.local_shape(shape, mesh, coords)[dim] * mesh.extent(inner)
        return coords[axis] * length, length
    (part,) = (each for each in sharding.sub(shape[dim]) if axis in each.axes)
    start, iteration = 0, coords[axis]
    for run in _equal_chunks(bounds(part.size, part.axes[: part.axes.index(axis)], mesh, coords)[1], mesh[axis].size):
        of_run = mesh.along({**coords, axis: run[0]}, inner)
        length = sum(spec.local_shape(shape, mesh, at)[dim] for at in of_run)
        if iteration <= run[-1]:
            break
        start += len(run) * length
    return start + (iteration - run[0]) * length, length


@lru_cache(maxsize=4096)
def _equal_chunks(size: int, parts: int) -> tuple[range, ...]:
    """Runs of equally long chunks: few, however many chunks there are."""
    ends = [i for i in range(1, parts) if chunk(size, parts, i)[1] != chunk(size, parts, i - 1)[1]]
    return tuple(range(a, b) for a, b in pairwise([0, *ends, parts]))


def iteration_place(
    spec: Spec, shape: Sequence[int], mesh: Mesh, coords: Mapping[str, int]
) -> dict[int, tuple[int, int]]:
    """By dim that iterations shard: start and length of an iteration's part in what the rank gives for all
    iterations."""
    found = {}
    for dim, sharding in enumerate(spec.dims):
        over = [axis for axis in loop_axes(mesh) if axis in sharding.axes]
        if over:
            start = sum(iteration_rows(spec, shape, mesh, coords, axis, dim)[0] for axis in over)
            found[dim] = start, spec.local_shape(shape, mesh, coords)[dim]
    return found


Runs = dict[str, list[range]]


def uniform_runs(parts: Collection[Part], mesh: Mesh, coords: Mapping[str, int]) -> Runs:
    """By loop axis: runs of iterations in which the rank at ``coords`` has as many rows of all that is sharded. Numbers
    of such iterations are lines: sizes are the same, and offsets grow evenly."""
    return {axis: _runs(axis, [part for part in parts if axis in part.axes], mesh, coords) for axis in loop_axes(mesh)}


def looped_parts(nodes: Iterable[Node], mesh: Mesh) -> set[Part]:
    """The parts of some nodes' values that are sharded over loop axes, each once."""
    placed: set[tuple[tuple[int, ...], Spec]] = set()
    for node in nodes:
        values, made = (*node.operands, *node.outs), node.strategy
        placed.update((value.shape, value.spec) for value in values if value.spec is not None)
        if made is not None:
            placed.update((v.shape, s) for v, s in zip(node.operands, made.operands, strict=False))
            placed.update((v.shape, s) for v, s in zip(node.outs, made.results, strict=False))
    time = set(loop_axes(mesh))
    sharding = {(size, each) for shape, spec in placed for size, each in zip(shape, spec.dims, strict=True) if each}
    return {part for size, each in sharding for part in each.sub(size) if time & set(part.axes)}


def _runs(axis: str, parts: list[Part], mesh: Mesh, coords: Mapping[str, int]) -> list[range]:
    others = [each for each in loop_axes(mesh) if each != axis]

    def rows(iteration: int) -> list[int]:
        """How much the iteration has of all parts, and of what is sharded further, in all iterations of the other
        axes."""
        return [
            bounds(part.size, part.axes[:end], mesh, at)[1]
            for part in parts
            for at in mesh.along({**dict.fromkeys(others, 0), **coords, axis: iteration}, set(others) & set(part.axes))
            for end in range(part.axes.index(axis) + 1, len(part.axes) + 1)
        ]

    begins, last = [0], rows(0)
    for iteration in range(1, mesh[axis].size):
        if (here := rows(iteration)) != last:
            begins.append(iteration)
        last = here
    return [range(a, b) for a, b in zip(begins, [*begins[1:], mesh[axis].size], strict=True)]
