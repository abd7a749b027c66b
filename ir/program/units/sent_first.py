"""In the backward of a stage, what others wait for is done and sent before what nobody waits for.

    B1: %1 dx   %2 dw   %3 dx   %4 dw   send %3        ->        B1: %1 dx   %3 dx   send %3   %2 dw   %4 dw

A pipeline that runs empty waits for the last backward of each stage in turn: so it waits without their products for
weights. Those that are put off keep their operands longer. So many of them are, the nearest to the send first, that
the unit holds no more than before at most.

Source: Qi et al., Zero Bubble Pipeline Parallelism, 2023, has the two parts as actions of a schedule.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from shardfx.ir.graph import Node, Value
from shardfx.ir.mesh import Mesh
from shardfx.ir.ops import comm
from shardfx.ir.ops.traits import is_view
from shardfx.ir.program.looped.in_turns import Loop, hangs_on, nodes_of

Steps = Sequence[Node | Loop]


def sent_first(steps: Steps, late: Collection[Node], place: int, mesh: Mesh, axis: str) -> list[Node | Loop]:
    """The steps of a unit in such an order.

    Args:
        late: the nodes that nobody waits for.
        place: the coordinate of the rank along the axis of stages.
        axis: of the turns. What does not hang on it is there all the time.
    """
    sends = [at for at, step in enumerate(steps) if isinstance(step, Node) and _sends(step, place)]
    if not sends:
        return list(steps)
    movable = _movable(steps[: sends[-1]], late)
    held = _Held(steps, mesh, axis)
    places = range(len(steps))
    most, fewest = held.most(places), 0
    many = len(movable)
    while fewest < many:
        middle = (fewest + many + 1) // 2
        if held.most(_moved(places, movable[:middle], sends[-1])) <= most:
            fewest = middle
        else:
            many = middle - 1
    return [steps[at] for at in _moved(places, movable[:fewest], sends[-1])]


def _sends(node: Node, place: int) -> bool:
    return node.op is comm.send and node.kwargs["origin"] == place


def _movable(steps: Steps, late: Collection[Node]) -> list[int]:
    """The places of what may be done behind all of these steps, the last of them first: nothing that stays needs it."""
    needed: set[Value] = set()
    found = []
    for at in reversed(range(len(steps))):
        step = steps[at]
        if isinstance(step, Node) and step in late and needed.isdisjoint(step.outs):
            found.append(at)
        else:
            needed.update(_operands([step]))
    return found


def _moved(places: Sequence[int], moved: Sequence[int], behind: int) -> list[int]:
    """The places, some of them behind one."""
    away = set(moved)
    stay = [at for at in places[: behind + 1] if at not in away]
    return [*stay, *sorted(moved), *places[behind + 1 :]]


class _Held:
    """What a turn holds during steps, of what they use and make."""

    def __init__(self, steps: Steps, mesh: Mesh, axis: str) -> None:
        uses = [{_source(value) for value in _operands([step])} for step in steps]
        made = {value for node in nodes_of(steps) for value in node.outs}
        nbytes = {value: _nbytes(value, mesh, axis) for value in set[Value]().union(*uses)}
        self._nbytes = nbytes
        self._uses = [{value for value in each if nbytes[value]} for each in uses]
        self._before = sum(size for value, size in nbytes.items() if value not in made)
        self._fresh: list[int] = []
        """By step the bytes that it makes."""
        for step in steps:
            fresh = {value for node in nodes_of([step]) if not is_view(node) for value in node.outs}
            self._fresh.append(sum(nbytes.get(value, 0) for value in fresh))

    def most(self, places: Sequence[int]) -> int:
        """The bytes that are there at most while the steps are done in the order of some places."""
        dying, seen = [0] * len(places), set[Value]()
        for at in reversed(range(len(places))):
            for value in self._uses[places[at]] - seen:
                seen.add(value)
                dying[at] += self._nbytes[value]
        held = most = self._before
        for at, place in enumerate(places):
            held += self._fresh[place]
            most = max(most, held)
            held -= dying[at]
        return most


def _nbytes(value: Value, mesh: Mesh, axis: str) -> int:
    """What a turn holds of a value: of a share of what all turns sum nothing, for that is added where the sum lies."""
    if value.spec is None or axis in value.spec.partial_axes or not hangs_on(axis, value):
        return 0
    return value.local_bytes(mesh)


def _operands(steps: Iterable[Node | Loop]) -> list[Value]:
    return [value for node in nodes_of(steps) for value in node.operands]


def _source(value: Value) -> Value:
    """What a value is a view of."""
    while value.node is not None and is_view(value.node):
        value = value.node.operands[0]
    return value
