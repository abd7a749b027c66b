"""Induction variables: the numbers of a loop body that differ between iterations become calls of the iteration's
number.

    iteration 0    pack.take(x, [32, 8], 0, 0, 8, [8, 8])
    iteration 1    pack.take(x, [32, 8], 0, 8, 8, [8, 8])         at = loop.index(iteration, 0, 8)
    iteration 3    pack.take(x, [32, 8], 0, 24, 8, [8, 8])   ->   pack.take(x, [32, 8], 0, at, 8, [8, 8])

The program is written as it is in the first, the second and the last of iterations that are alike; what grows evenly
between them is a line. Where some have fewer rows than others, a number is a line for each run of iterations that are
alike:

    iteration 0 to 7    4 rows from 0, 4, ... 28 on
    iteration 8, 9      3 rows from 32, 35 on                     at = loop.piecewise_index(iteration, [(0, 0, 4), (8,
    32, 3)])

In nested loops a number is a line of the inner iteration, whose begin and growth are numbers of the outer one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from numbers import Integral
from operator import mul
from typing import Any

from torch import fx

from shardfx.ir.errors import Error
from shardfx.ir.graph import Node
from shardfx.ir.mesh import Mesh
from shardfx.ir.ops.alike import argument_key, type_of
from shardfx.ir.ops.loop import loop_ops

from .loop_nest import Runs, loop_axes
from .loop_regions import action_order, loop_role, regions

Written = Callable[[Mapping[str, int]], fx.Graph]
Path = tuple[Any, ...]
Number = Any
"""Of no axis, an argument as it is. Of some, lines over the first of them: from which iteration on, the number in it,
and by how much it grows from iteration to iteration; both of which are numbers of the other axes."""


def with_induction_variables(made: fx.Graph, written: Written, mesh: Mesh, alike: Runs) -> fx.Graph:
    """The program for all iterations, ``made`` of that of the first; ``written`` gives it as it is in one iteration of
    each axis.
    In iterations that are ``alike`` numbers are lines; iterations that differ in more than numbers are an Error."""
    axes = tuple(axis for axis in reversed(loop_axes(mesh)) if mesh[axis].size > 1)
    if axes:
        _Merger(made, axes, written, {axis: list(alike[axis]) for axis in axes}).run()
    return made


class _Uneven(Exception):
    """Numbers of alike iterations that are not linear in the iteration."""

    def __init__(self, axis: str, run: range) -> None:
        super().__init__(axis, run)
        self.axis, self.run = axis, run


@dataclass
class _Merger:
    graph: fx.Graph
    axes: tuple[str, ...]
    """The innermost first."""
    written: Written
    runs: Runs
    known: dict[fx.Node, dict[tuple[Any, ...], fx.Node]] = field(default_factory=dict)
    """The numbers that stand there, by the begin of their iterations."""

    def __post_init__(self) -> None:
        self.nodes = list(self.graph.nodes)
        self.inside = regions(self.nodes)
        self._of_iterations: dict[tuple[int, ...], dict[Path, Any]] = {}

    def run(self) -> None:
        while True:
            try:
                found = self._numbers(self.axes, {})
                break
            except _Uneven as uneven:  # then each of these iterations has a line of its own
                runs = self.runs[uneven.axis]
                at = runs.index(uneven.run)
                runs[at : at + 1] = [range(iteration, iteration + 1) for iteration in uneven.run]
        depth = len(self.axes)
        for place, number in found.items():
            self._put(place, _plain(number, depth), depth)

    def _numbers(self, axes: Sequence[str], iteration: Mapping[str, int]) -> dict[Path, Number]:
        """A number's values in all iterations of some axes, in one iteration of the others."""
        if not axes:
            return self._in_iteration(iteration)
        (axis, *others), depth = axes, len(axes) - 1
        lines: dict[Path, list[Any]] = {}
        for run in self.runs[axis]:
            at = (run[0], run[min(1, len(run) - 1)], run[-1])
            first, second, last = (self._numbers(others, {**iteration, axis: each}) for each in at)
            for place, number in first.items():
                step = self._step(place, number, second[place], depth)
                grown = _each(partial(mul, len(run) - 1), depth, step)
                if self._step(place, number, last[place], depth) != grown:
                    raise _Uneven(axis, run)
                lines.setdefault(place, []).append((run[0], number, step))
        return {place: tuple(each) for place, each in lines.items()}

    def _step(self, place: Path, first: Number, other: Number, depth: int) -> Number:
        """The difference of a number in another iteration."""
        if depth:
            return _each(lambda a, b: self._step(place, a, b, 0), depth, first, other)
        if _is_number(first) and _is_number(other) and place[-1] != "size":
            return other - first
        if argument_key(first, type_of) != argument_key(other, type_of):
            raise self._other(self.nodes[place[0]], f"{first!r}", f"{other!r}")
        return 0

    def _in_iteration(self, iteration: Mapping[str, int]) -> dict[Path, Any]:
        """Everything that is no value among the arguments in one iteration of each axis, by its place."""
        key = tuple(iteration[axis] for axis in self.axes)
        if key in self._of_iterations:
            return self._of_iterations[key]
        others = list(self.written(iteration).nodes) if any(key) else self.nodes
        if [(n.op, n.target) for n in others] != [(n.op, n.target) for n in self.nodes]:
            mine, theirs = next(
                ((a, b) for a, b in zip(self.nodes, others, strict=False) if a.target != b.target),
                (self.nodes[-1], others[-1]),
            )
            raise self._other(mine, str(mine.target), str(theirs.target))
        found = self._of_iterations[key] = {}
        for place, node in enumerate(others):
            _gather(node.args, (place, "args"), found)
            _gather(node.kwargs, (place, "kwargs"), found)
            _gather(node.meta.get("shape", ()), (place, "shape"), found)
        return found

    def _other(self, node: fx.Node, expected: str, got: str) -> Error:
        planned = node.meta.get("shardfx")
        return Error(
            f"iterations of {' or '.join(map(repr, self.axes))} call something else than the first",
            where=str(planned.where) if isinstance(planned, Node) else node.name,
            expected=expected,
            got=got,
            remedy="choose a number of iterations that divides what they shard",
        )

    def _put(self, place: Path, number: Number, depth: int) -> None:
        """Write an iteration-dependent number as a call, before its user."""
        if not isinstance(number, _Piecewise):
            return
        node, path = self.nodes[place[0]], place[1:]
        if path[0] == "shape":  # it is known of no iteration but the first
            node.meta.pop("shape", None)
            return
        made = self._written(number, node)
        if path[0] == "args":
            node.args = _replaced(node.args, path[1:], made)
        else:
            node.kwargs = _replaced(node.kwargs, path[1:], made)

    def _written(self, number: Number, before: fx.Node) -> Any:
        """A number as an argument of a node."""
        if not isinstance(number, _Piecewise):
            return number
        axis = self.axes[-number.depth]
        begin = next(loop for loop in self.inside[before] if loop_role(loop) == "opens" and loop.args[0] == axis)
        shared = bool(action_order(begin))
        place = begin if shared else before  # what the line of an inner iteration is made of is there when these begin
        lines = tuple((at, self._written(n, place), self._written(step, place)) for at, n, step in number.lines)
        for made in (each for line in lines for each in line[1:] if shared and isinstance(each, fx.Node)):
            _declare_use(begin, made)
        call = (loop_ops.index, *lines[0][1:]) if len(lines) == 1 else (loop_ops.piecewise_index, lines)
        return self._number(begin, before, call)

    def _number(self, begin: fx.Node, before: fx.Node, call: tuple[Any, ...]) -> fx.Node:
        """A number of the iteration: where actions share it, at the begin of iterations, else just before its first
        use."""
        shared, inside = bool(action_order(begin)), self.inside[before]
        known = self.known.setdefault(begin, {})
        key = (() if shared else inside, call[0], str(call[1:]))
        if key not in known:
            last = next((each for each in reversed(known.values())), begin)
            with self.graph.inserting_after(last) if shared else self.graph.inserting_before(before):
                known[key] = self.graph.call_function(call[0], (begin, *call[1:]))
        for loop in inside[inside.index(begin) + 1 :]:
            if loop_role(loop) == "opens":
                _declare_use(loop, known[key] if shared else begin)
        return known[key]


@dataclass(frozen=True)
class _Piecewise:
    """Piecewise linear functions of the iteration of the axis at that depth (1: outermost), as few as will do."""

    depth: int
    lines: tuple[tuple[int, Any, Any], ...]


def _plain(number: Number, depth: int) -> Any:
    """A number as the fewest linear pieces; itself, where it is the same in all iterations."""
    if not depth:
        return number
    found: list[tuple[int, Number, Number]] = []
    for begin, start, step in number:
        if found:
            before, first, grown = found[-1]
            if step == grown and start == _moved(first, grown, begin - before, depth - 1):
                continue
        found.append((begin, start, step))
    lines = tuple((begin, _plain(start, depth - 1), _plain(step, depth - 1)) for begin, start, step in found)
    (_, start, step), *more = lines
    return start if not more and not isinstance(step, _Piecewise) and step == 0 else _Piecewise(depth, lines)


def _each(function: Callable[..., Any], depth: int, *numbers: Number) -> Number:
    """A function of numbers of as many axes, line by line."""
    if not depth:
        return function(*numbers)
    return tuple(
        (lines[0][0], *(_each(function, depth - 1, *(line[i] for line in lines)) for i in (1, 2)))
        for lines in zip(*numbers, strict=True)
    )


def _moved(number: Number, step: Number, count: int, depth: int) -> Number:
    """A number plus so many steps; anything else is constant."""
    return _each(lambda each, by: each + by * count if _is_number(each) else each, depth, number, step)


def _is_number(arg: Any) -> bool:
    """Whether an argument is a number, of one rank or of each of those for which a program is written."""
    return isinstance(arg, Integral) and not isinstance(arg, bool)


def _declare_use(loop: fx.Node, iteration: fx.Node) -> None:
    """Declare the iteration number as an operand of the calls that use it."""
    for end in (loop, *(user for user in loop.users if user.target is loop_ops.end)):
        *before, around = end.args[:3] if end is loop else end.args[:2]
        if iteration not in around:  # type: ignore[operator]
            end.args = (*before, [*around, iteration], *end.args[3 if end is loop else 2 :])  # type: ignore[misc]


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


def _replaced(nest: Any, path: Path, new: Any) -> Any:
    if not path:
        return new
    items = nest.items() if isinstance(nest, Mapping) else enumerate(nest)
    changed = {key: _replaced(each, path[1:], new) if key == path[0] else each for key, each in items}
    return changed if isinstance(nest, Mapping) else type(nest)(changed.values())
