"""Schedule actions of a pipelined rank: its row of the schedule, as parts of its loop over micro-batches.

    pipeline pp, mb
    row "F0.0 F0.1 B0.0 B0.1"            the rank at pp=0: the nodes of stage 0, forward as F0, backward as B0
    row "F1.0 B1.0 F1.1 B1.1"

A row with ``I`` and ``W`` splits the backward into two actions: gradients of inputs, which other stages wait for, and
gradients of weights. In one with ``B`` the first part runs first, as far as memory allows (:func:`send_early`).
Messages of another rank are received in actions of their own, in the order in which that rank sends.
What leaves the program from each iteration, and comes from a later stage, is received last, in an action ``O``.

A nested loop lies in one action: a loss in chunks has forward and backward in it, and runs with the backward.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from shardfx.ir.errors import Error
from shardfx.ir.graph import Graph, Input, Node, Output, Phase, Value
from shardfx.ir.mesh import Mesh
from shardfx.ir.ops import comm
from shardfx.ir.ops.traits import is_heavy, is_view, unviewed
from shardfx.ir.schedule.actions import Pipelined

from .loop_nest import PlannedLoop, nodes_of, varies_over
from .loop_regions import ActionOrder


def split_into_actions(loop: PlannedLoop, unit_of: Callable[[Node], str], order: Sequence[str]) -> PlannedLoop:
    """A loop split into the actions that ``unit_of`` names by node, which run in an ``order`` of words ``F0.1``; within
    an action steps keep their order. A nested loop lies in the last action of its nodes."""
    words = ActionOrder.of(order)
    place = {unit: at for at, unit in enumerate(words.units)}
    units: dict[str, list[Node | PlannedLoop]] = {unit: [] for unit in words.units}
    for step in loop.steps:
        units[max(map(unit_of, nodes_of([step])), key=place.__getitem__)].append(step)
    return replace(
        loop,
        steps=tuple(step for part in units.values() for step in part),
        units=tuple((unit, tuple(part)) for unit, part in units.items()),
        order=str(words),
    )


Steps = Sequence[Node | PlannedLoop]


def send_early(steps: Steps, late: Collection[Node], place: int, mesh: Mesh, axis: str) -> list[Node | PlannedLoop]:
    """A backward's steps, with sends that other stages wait for moved to the front; at the rank at ``place``.

        B1: %1 dx   %2 dw   %3 dx   %4 dw   send %3        ->        B1: %1 dx   %3 dx   send %3   %2 dw   %4 dw

    A pipeline that drains waits for the last backward of each stage in turn: so it waits without their products for
    weights. Those that are deferred keep their operands longer: so many are, the nearest to the send first, that the
    peak of the action is not higher. ``late`` are the nodes that nobody waits for; values that do not vary over
    ``axis`` are always live.
    """
    sends = [at for at, step in enumerate(steps) if isinstance(step, Node) and _sends(step, place)]
    if not sends:
        return list(steps)
    movable = _deferrable(steps[: sends[-1]], late)
    peak, places = _live_bytes(steps, mesh, axis), range(len(steps))

    def moved(count: int) -> list[int]:
        return _deferred(places, movable[:count], sends[-1])

    count = bisect_right(range(1, len(movable) + 1), peak(places), key=lambda each: peak(moved(each)))
    return [steps[at] for at in moved(count)]


def _sends(node: Node, place: int) -> bool:
    return node.op is comm.send and node.kwargs["origin"] == place


def _deferrable(steps: Steps, late: Collection[Node]) -> list[int]:
    """The positions of steps that may be deferred behind all of these, the last first: no other step needs them."""
    needed: set[Value] = set()
    found = []
    for at in reversed(range(len(steps))):
        step = steps[at]
        if isinstance(step, Node) and step in late and needed.isdisjoint(step.outs):
            found.append(at)
        else:
            needed.update(_operands([step]))
    return found


def _deferred(places: Sequence[int], moved: Sequence[int], behind: int) -> list[int]:
    """The positions, some of them moved to the end."""
    away = set(moved)
    stay = [at for at in places[: behind + 1] if at not in away]
    return [*stay, *sorted(moved), *places[behind + 1 :]]


def _live_bytes(steps: Steps, mesh: Mesh, axis: str) -> Callable[[Sequence[int]], int]:
    """The peak of an iteration's live bytes while steps run in the order of some positions: of the values that they
    use."""
    uses = [{unviewed(value) for value in _operands([step])} for step in steps]
    made = {v: at for at, step in enumerate(steps) for n in nodes_of([step]) if not is_view(n) for v in n.outs}
    nbytes = {value: _nbytes(value, mesh, axis) for value in set[Value]().union(*uses)}
    uses = [{value for value in each if nbytes[value]} for each in uses]

    def peak(places: Sequence[int]) -> int:
        position = {place: at for at, place in enumerate(places)}
        last = {value: at for at, place in enumerate(places) for value in uses[place]}
        changes = [0] * (len(places) + 1)
        for value, at in last.items():
            changes[position[made[value]] if value in made else 0] += nbytes[value]
            changes[at + 1] -= nbytes[value]
        return max(accumulate(changes))

    return peak


def _nbytes(value: Value, mesh: Mesh, axis: str) -> int:
    """What an iteration holds of a value: of a share of what all iterations sum nothing, for that is added where the
    sum lies."""
    if value.spec is None or axis in value.spec.partial_axes or not varies_over(axis, value):
        return 0
    return value.local_bytes(mesh)


def _operands(steps: Iterable[Node | PlannedLoop]) -> list[Value]:
    return [value for node in nodes_of(steps) for value in node.operands]


OUT = "O"
"""The action in which a rank receives what it has no part in, and gives out."""


def rank_actions(
    steps: Sequence[Node | PlannedLoop], graph: Graph, coords: Mapping[str, int]
) -> list[Node | PlannedLoop]:
    """The steps of the rank at ``coords``, in the order of its row."""
    if graph.pipeline is None:
        return list(steps)
    found: list[Node | PlannedLoop] = []
    for step in steps:
        if isinstance(step, Node):
            if runs_here(step, graph, coords):
                found.append(step)
        elif inside := rank_actions(step.steps, graph, coords):
            ends = frozenset(value for value in step.ends if graph.is_here(stages_of(value), coords))
            loop = PlannedLoop(step.axis, tuple(inside), ends)
            meet = step.axis == graph.pipeline.microbatches and any(node.op is comm.send for node in nodes_of([step]))
            place, behind = coords[graph.pipeline.axis], forward_in_backward(step.steps)
            found.append(_RankActions(graph.pipeline, graph.mesh, place, loop, behind).written() if meet else loop)
    return found


def local_ends(
    graph: Graph, inputs: Sequence[Input], outputs: Sequence[Output], coords: Mapping[str, int]
) -> tuple[list[Input], list[Output]]:
    """Those of some inputs and outputs that the rank at ``coords`` stores, and returns."""
    here = [inp for inp in inputs if graph.is_here(inp.at, coords)]
    return here, [output for output in outputs if graph.is_here(stages_of(output.value), coords)]


def runs_here(node: Node, graph: Graph, coords: Mapping[str, int]) -> bool:
    """Whether the rank at ``coords`` takes part in a node: for a send also where its value comes from."""
    return graph.is_here(node.at, coords) or (
        node.op is comm.send and any(graph.is_here(stages_of(value), coords) for value in node.operands)
    )


def stages_of(value: Value) -> tuple[int, ...]:
    """The stages in which a value is made; none: all."""
    return value.node.at if value.node is not None else ()


def forward_in_backward(steps: Sequence[Node | PlannedLoop]) -> set[tuple[Node, int]]:
    """What of the forward is done with the backward, by node and stage: it stands in iterations within an iteration
    that have backward in them as well, or needs what is made there."""
    found: set[tuple[Node, int]] = set()
    for step in steps:
        nodes = nodes_of([step])
        backward = [node for node in nodes if node.phase is Phase.BACKWARD] if isinstance(step, PlannedLoop) else []
        both = {stage for node in backward for stage in node.at}
        for node in (node for node in nodes if node.phase is Phase.FORWARD):
            for stage in node.at:
                if stage in both or any((value.node, stage) in found for value in node.operands):
                    found.add((node, stage))
    return found


def weight_gradients(steps: Sequence[Node | PlannedLoop], place: int) -> set[Node]:
    """The nodes of the backward that no other stage than ``place`` and no product waits for: the gradients of weights.

    Source: Qi et al., Zero Bubble Pipeline Parallelism, 2023.
    """
    awaited: set[Value] = set()
    found = set()
    for step in reversed(steps):
        nodes = nodes_of([step])
        backward = [node for node in nodes if node.phase is Phase.BACKWARD]
        if not backward:
            continue
        sends = any(node.op is comm.send and node.kwargs["origin"] == place for node in backward)
        both = len(backward) < len(nodes)
        waited = sends or both or any(value in awaited for node in backward for value in node.outs)
        if not waited:
            found.update(backward)
        if waited or any(is_heavy(node) for node in backward):
            awaited.update(value for node in nodes for value in node.operands)
    return found


def is_halved(pipeline: Pipelined) -> bool:
    """Whether the backward of some iteration is split in halves."""
    return any(action.kind == "I" for action in pipeline.schedule)


def row_of_actions(pipeline: Pipelined, place: int) -> list[tuple[str, int]]:
    """The actions of a row, each with its iteration; where some backwards are split in halves, a full one is both of
    them."""
    halved, found = is_halved(pipeline), list[tuple[str, int]]()
    for kind, stage, iteration in pipeline.schedule.rows[place]:
        kinds = "IW" if kind == "B" and halved else kind
        found += [(f"{each}{stage}", iteration) for each in kinds if each != "U"]
    return found


@dataclass
class _RankActions:
    """The iterations of a rank as actions: those of its row, and before them what they receive (``RF0``: what F0
    sends)."""

    pipeline: Pipelined
    mesh: Mesh
    place: int
    loop: PlannedLoop
    behind: set[tuple[Node, int]]
    """What of the forward is done in the backward, in which stages."""

    def __post_init__(self) -> None:
        nodes = self.loop.nodes()
        self.back = "I" if is_halved(self.pipeline) else "B"
        self._late = weight_gradients(self.loop.steps, self.place)
        self._received = [node for node in nodes if node.op is comm.send and node.kwargs["origin"] != self.place]
        self._units = {node: self._unit(node) for node in nodes}

    def written(self) -> PlannedLoop:
        """The loop, split into actions."""
        there = set(self._units.values())
        words = [
            *row_of_actions(self.pipeline, self.place),
            *((OUT, iteration) for iteration in self.pipeline.schedule.microbatches),
        ]
        receives = _Receives(self.pipeline)
        takers: dict[str, dict[str, None]] = {}
        for node in self._received:
            receives.expect(self._units[node], node.kwargs["origin"], self._sender(node))
            takers.setdefault(self._taker(node), {})[self._units[node]] = None
        order: list[str] = []
        for unit, iteration in words:
            for needed in takers.get(unit, ()):
                order += receives.up_to(needed, iteration)
            if unit in there:
                order.append(f"{unit}.{iteration}")
        self._check_within(order)
        made = split_into_actions(self.loop, self._units.__getitem__, order)
        if self.back == "I":
            return made
        units = tuple(
            (unit, tuple(send_early(part, self._late, self.place, self.mesh, self.loop.axis)))
            for unit, part in made.units
        )
        return replace(made, units=units, steps=tuple(step for _, part in units for step in part))

    def _check_within(self, order: Sequence[str]) -> None:
        """Check that no action needs what a nested loop makes in a later one."""
        place = {word.partition(".")[0]: at for at, word in reversed([*enumerate(order)])}
        for step in (step for step in self.loop.steps if isinstance(step, PlannedLoop)):
            inside = set(step.nodes())
            last = max(place[self._units[node]] for node in inside)
            made = {value for node in inside for value in node.outs}
            for node in self._units:
                if node not in inside and place[self._units[node]] < last and not made.isdisjoint(node.operands):
                    raise Error(
                        f"iterations of {step.axis!r} have both forward and backward in them, which a schedule parts",
                        where=f"{node.where}  {node.where.code}".rstrip(),
                        expected=f"iterations of {step.axis!r} in one part of a stage, such as chunks of the loss",
                        got=f"iterations that end in a later part, where {self._units[node]} needs what they make",
                        remedy=f"shard by {self.loop.axis!r} alone what {step.axis!r} shards, with more iterations",
                    )

    def _unit(self, node: Node) -> str:
        """The action that runs a node: of several stages of this rank, that of the first."""
        if node.op is comm.send:
            if node.kwargs["origin"] != self.place:
                return "R" + self._sender(node)
            return self._sender(node)
        here = self._here(node.at)
        return self._named(here, self._phase(node, here), node in self._late)

    def _sender(self, node: Node) -> str:
        """The action of a send."""
        (maker,) = (value.node for value in node.operands)
        assert maker is not None
        stages = [stage for stage in maker.at if self.pipeline.homes[stage] == node.kwargs["origin"]]
        return self._named(stages, self._phase(maker, stages), False)

    def _phase(self, node: Node, stages: Iterable[int]) -> Phase:
        """The phase with which a node is done in some stages."""
        return Phase.BACKWARD if any((node, stage) in self.behind for stage in stages) else node.phase

    def _taker(self, node: Node) -> str:
        """The action that needs a received value."""
        (value,) = node.operands
        assert value.node is not None
        origin, here = value.node.at[0], self._here(node.at)
        if not node.at:
            return OUT
        if node.phase is Phase.FORWARD:
            later = [stage for stage in here if stage >= origin]
            return self._named(later or here, Phase.FORWARD if later else Phase.BACKWARD, False)
        earlier = [stage for stage in here if stage <= origin]
        return self._named(earlier, Phase.BACKWARD, False) if earlier else OUT

    def _here(self, at: Iterable[int]) -> list[int]:
        homes = self.pipeline.homes
        return [stage for stage in (at or range(len(homes))) if homes[stage] == self.place]

    def _named(self, stages: Sequence[int], phase: Phase, late: bool) -> str:
        if phase is Phase.FORWARD:
            return f"F{min(stages)}"
        return f"{'W' if late and self.back == 'I' else self.back}{max(stages)}"


class _Receives:
    """A rank's receives, from each peer in the order of its sends."""

    def __init__(self, pipeline: Pipelined) -> None:
        self._pipeline = pipeline
        self._origin: dict[str, int] = {}
        self._units: dict[int, dict[str, str]] = {}
        """By place, which actions send, and in which action that is received."""
        self._queues: dict[int, list[tuple[str, int]]] = {}

    def expect(self, unit: str, origin: int, sender: str) -> None:
        """Expect a receive, in an action of this rank, of what an action of another place sends."""
        self._origin[unit] = origin
        self._units.setdefault(origin, {})[sender] = unit

    def up_to(self, unit: str, iteration: int) -> list[str]:
        """The words of what is received until that of an action of an iteration has come, as far as it has not."""
        origin = self._origin[unit]
        if origin not in self._queues:
            units, row = self._units[origin], row_of_actions(self._pipeline, origin)
            self._queues[origin] = [(units[sender], at) for sender, at in row if sender in units]
        queue = self._queues[origin]
        if (unit, iteration) not in queue:
            return []
        end = queue.index((unit, iteration)) + 1
        come, queue[:] = queue[:end], queue[end:]
        return [f"{each}.{at}" for each, at in come]
