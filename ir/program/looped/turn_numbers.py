"""One text for all turns: the numbers that differ between them become calls of the turn's number.

    turn 0    pack.take(x, [32, 8], 0, 0, 8, [8, 8])
    turn 1    pack.take(x, [32, 8], 0, 8, 8, [8, 8])         at = time.at(turn, 0, 8)
    turn 3    pack.take(x, [32, 8], 0, 24, 8, [8, 8])   ->   pack.take(x, [32, 8], 0, at, 8, [8, 8])

The program is written as it is in the first, the second and the last of turns that are alike; what grows evenly between
them is a line. Where some have fewer rows than others, a number is a line for each run of turns that are alike:

    turn 0 to 7    4 rows from 0, 4, ... 28 on
    turn 8, 9      3 rows from 32, 35 on                     at = time.pick(turn, [(0, 0, 4), (8, 32, 3)])
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from typing import Any

from torch import fx

from shardfx.ir.errors import Error
from shardfx.ir.graph import Node
from shardfx.ir.mesh import Mesh
from shardfx.ir.ops.time import turns
from shardfx.ir.program.units.unit_order import order_of

from .alike_turns import Runs
from .in_turns import time_axes
from .within_turns import part_in_turns, regions

Written = Callable[[Mapping[str, int]], fx.Graph]
Path = tuple[Any, ...]
Line = tuple[int, Any, int]
"""From which turn on, the number in it, and by how much it grows from turn to turn."""


def of_every_turn(written: Written, mesh: Mesh, alike: Runs) -> fx.Graph:
    """The program for all turns; ``written`` gives it as it is in one turn of each axis, and those that are ``alike``
    have numbers that are lines.

    Raises:
        Error: turns differ in what they call, not in numbers alone.
    """
    made = written({})
    for axis in reversed(time_axes(mesh)):
        if mesh[axis].size > 1:
            _Merge(made, axis, written).run(alike[axis])
    return made


class _Merge:
    def __init__(self, made: fx.Graph, axis: str, written: Written) -> None:
        self.graph, self.axis, self.written = made, axis, written
        self.nodes = [node for node in made.nodes if node.target not in (turns.at, turns.pick)]
        self.known: dict[tuple[Any, ...], fx.Node] = {}

    def run(self, alike: Sequence[range]) -> None:
        lines = [line for run in alike for line in self._lines(run)]
        calls: dict[Path, tuple[Any, ...]] = {}
        for place, first in lines[0].items():
            runs = [first]
            for each in lines[1:]:
                begin, number, step = each[place]
                before, start, grown = runs[-1]
                if step != grown or self._step(place, start, number) != (begin - before) * grown:
                    runs.append(each[place])
            if len(runs) > 1:
                calls[place] = (turns.pick, tuple(runs))
            elif first[2]:
                calls[place] = (turns.at, *first[1:])
        self._put(calls)

    def _lines(self, run: range) -> list[dict[Path, Line]]:
        """The numbers of turns that are alike, as lines; of each turn alone where they are none."""
        first, second, last = (self._numbers(turn) for turn in (run[0], run[min(1, len(run) - 1)], run[-1]))
        found: dict[Path, Line] = {}
        for place, number in first.items():
            step = self._step(place, number, second[place])
            if self._step(place, number, last[place]) != step * (len(run) - 1):
                return [line for turn in run for line in self._lines(range(turn, turn + 1))]
            found[place] = run[0], number, step
        return [found]

    def _step(self, place: Path, first: Any, other: Any) -> int:
        """By how much a number is larger in another turn.

        Raises:
            Error: it is no number.
        """
        if _is_number(first) and _is_number(other) and place[-1] != "size":
            step: int = other - first
            return step
        if first != other:
            raise self._other(self.nodes[place[0]], f"{first!r}", f"{other!r}")
        return 0

    def _numbers(self, turn: int) -> dict[Path, Any]:
        """Everything that is no value among the arguments in one turn, by its place."""
        graph = self.written({self.axis: turn})
        others = [node for node in graph.nodes if node.target not in (turns.at, turns.pick)]
        if [(n.op, n.target) for n in others] != [(n.op, n.target) for n in self.nodes]:
            mine, theirs = next(
                ((a, b) for a, b in zip(self.nodes, others, strict=False) if a.target != b.target),
                (self.nodes[-1], others[-1]),
            )
            raise self._other(mine, str(mine.target), str(theirs.target))
        found: dict[Path, Any] = {}
        for place, node in enumerate(others):
            _gather(node.args, (place, "args"), found)
            _gather(node.kwargs, (place, "kwargs"), found)
            _gather(node.meta.get("shape", ()), (place, "shape"), found)
        return found

    def _other(self, node: fx.Node, expected: str, got: str) -> Error:
        planned = node.meta.get("shardfx")
        return Error(
            f"turns of {self.axis!r} call something else than the first",
            where=str(planned.where) if isinstance(planned, Node) else node.name,
            expected=expected,
            got=got,
            remedy="choose a number of turns that divides what they cut",
        )

    def _put(self, calls: Mapping[Path, tuple[Any, ...]]) -> None:
        """Write the numbers that differ as calls, just before who takes them."""
        begin, inside = None, regions(self.graph.nodes)
        by_node: dict[int, dict[Path, tuple[Any, ...]]] = {}
        for (place, *rest), call in calls.items():
            by_node.setdefault(place, {})[tuple(rest)] = call
        for place, node in enumerate(self.nodes):
            if node.target is turns.turns and node.args[0] == self.axis:
                begin, self.known = node, {}
            for path, call in by_node.get(place, {}).items():
                if path[0] == "shape":  # it is known of no turn but the first
                    node.meta.pop("shape", None)
                    continue
                assert begin is not None
                number = self._number(begin, node, call, inside[node])
                if isinstance(old := _at((node.args, node.kwargs), path), fx.Node):
                    number = self._on_top(old, number, call, node)
                if path[0] == "args":
                    node.args = _replaced(node.args, path[1:], number)
                else:
                    node.kwargs = _replaced(node.kwargs, path[1:], number)

    def _on_top(self, inner: fx.Node, number: fx.Node, call: tuple[Any, ...], before: fx.Node) -> fx.Node:
        """A number that grows with the turns of this axis, and with those of one within it; it stands before who
        takes it, for both stand there by then.

        Raises:
            Error: it does not grow evenly in both.
        """
        if call[0] is not turns.at or inner.target is not turns.at or call[1] != inner.args[1]:
            raise Error(
                f"a number of {inner.name} hangs unevenly on turns of two axes",
                expected="numbers of turns that divide what they cut",
                got=f"turns of {self.axis!r} that are not alike",
            )
        with self.graph.inserting_before(before):
            return self.graph.call_function(turns.at, (inner.args[0], number, inner.args[2]))

    def _number(self, begin: fx.Node, before: fx.Node, call: tuple[Any, ...], inside: tuple[fx.Node, ...]) -> fx.Node:
        """A number of the turn: where units share it, at the begin of turns, else just before its first use."""
        shared = bool(order_of(begin))
        key = (() if shared else inside, call[0], str(call[1:]))
        if key not in self.known:
            last = next((each for each in reversed(self.known.values())), begin)
            with self.graph.inserting_after(last) if shared else self.graph.inserting_before(before):
                self.known[key] = self.graph.call_function(call[0], (begin, *call[1:]))
        for loop in inside[inside.index(begin) + 1 :]:
            if part_in_turns(loop) == "opens":
                _say(loop, self.known[key] if shared else begin)
        return self.known[key]


def _is_number(arg: Any) -> bool:
    """Whether an argument is a number, of one rank or of each of those for which a program is written."""
    return isinstance(arg, Integral) and not isinstance(arg, bool)


def _say(loop: fx.Node, turn: fx.Node) -> None:
    """Turns use the number of the turn that they stand in."""
    for end in (loop, *(user for user in loop.users if user.target is turns.done)):
        *before, around = end.args[:3] if end is loop else end.args[:2]
        if turn not in around:  # type: ignore[operator]
            end.args = (*before, [*around, turn], *end.args[3 if end is loop else 2 :])  # type: ignore[misc]


def _gather(arg: Any, path: Path, found: dict[Path, Any]) -> None:
    if isinstance(arg, (list, tuple)):
        found[(*path, "size")] = len(arg)
        for i, each in enumerate(arg):
            _gather(each, (*path, i), found)
    elif isinstance(arg, Mapping):
        for key, each in arg.items():
            _gather(each, (*path, key), found)
    else:
        found[path] = arg.name if isinstance(arg, fx.Node) else arg


def _at(nests: tuple[Any, Any], path: Path) -> Any:
    found = nests[0] if path[0] == "args" else nests[1]
    for key in path[1:]:
        found = found[key]
    return found


def _replaced(nest: Any, path: Path, new: Any) -> Any:
    if not path:
        return new
    if isinstance(nest, Mapping):
        return {key: _replaced(each, path[1:], new) if key == path[0] else each for key, each in nest.items()}
    changed = [_replaced(each, path[1:], new) if i == path[0] else each for i, each in enumerate(nest)]
    return changed if isinstance(nest, list) else tuple(changed)
