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
    most, fewest = _most_held(steps, mesh, axis), 0
    many = len(movable)
    while fewest < many:
        middle = (fewest + many + 1) // 2
        if _most_held(_moved(steps, movable[:middle], sends[-1]), mesh, axis) <= most:
            fewest = middle
        else:
            many = middle - 1
    return _moved(steps, movable[:fewest], sends[-1])


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


def _moved(steps: Steps, moved: Sequence[int], behind: int) -> list[Node | Loop]:
    """The steps, some of them behind one."""
    away = set(moved)
    stay = [step for at, step in enumerate(steps[: behind + 1]) if at not in away]
    return [*stay, *(steps[at] for at in sorted(moved)), *steps[behind + 1 :]]


def _most_held(steps: Steps, mesh: Mesh, axis: str) -> int:
    """The bytes that a turn holds at most during these steps, of what they use and make."""
    last: dict[Value, int] = {}
    for at, step in enumerate(steps):
        for value in _operands([step]):
            last[_source(value)] = at
    dying: dict[int, list[Value]] = {}
    for value, at in last.items():
        dying.setdefault(at, []).append(value)
    made = {value for node in nodes_of(steps) for value in node.outs}
    held = most = sum(_nbytes(value, mesh, axis) for value in last if value not in made)
    for at, step in enumerate(steps):
        fresh = {value for node in nodes_of([step]) if not is_view(node) for value in node.outs}
        held += sum(_nbytes(value, mesh, axis) for value in fresh if value in last)
        most = max(most, held)
        held -= sum(_nbytes(value, mesh, axis) for value in dying.get(at, ()))
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
