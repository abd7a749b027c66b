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
from functools import cache
from itertools import product
from numbers import Integral
from typing import Any

import numpy as np
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


@dataclass(frozen=True)
class _Lines:
    """A piecewise linear function of an axis: from which iteration on, the number in it, and by how much it grows from
    iteration to iteration; both of which are numbers of the axes around."""

    axis: str
    pieces: tuple[tuple[int, Any, Any], ...]


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
        self._looked_at = cache(self._in_iteration)

    def run(self) -> None:
        while True:
            try:
                found = {place: self._lines(values, self.axes) for place, values in self._varying().items()}
                break
            except _Uneven as uneven:  # then each of these iterations has a line of its own
                runs = self.runs[uneven.axis]
                at = runs.index(uneven.run)
                runs[at : at + 1] = [range(iteration, iteration + 1) for iteration in uneven.run]
        for place, number in found.items():
            self._put(place, number)

    def _varying(self) -> dict[Path, Any]:
        """The numbers that differ between iterations: in the first, second and last of each run, with a dim by axis."""
        looked = [[i for run in self.runs[a] for i in (run[0], run[min(1, len(run) - 1)], run[-1])] for a in self.axes]
        first, *others = map(self._looked_at, product(*looked))
        found = {}
        for place, mine in first.items():
            theirs = [each[place] for each in others]
            if all(each is mine for each in theirs):
                continue
            if not all(isinstance(each, Integral) and not isinstance(each, bool) for each in (mine, *theirs)):
                key = argument_key(mine, type_of)
                for each in theirs:
                    if argument_key(each, type_of) != key:
                        raise self._other(self.nodes[place[0]], f"{mine!r}", f"{each!r}")
                continue
            found[place] = np.empty([*map(len, looked)], dtype=object)
            found[place].flat[:] = [mine, *theirs]
        return found

    def _lines(self, values: Any, axes: Sequence[str]) -> Any:
        """A number as the fewest linear pieces over the first of some axes; itself, where it is the same in all
        iterations."""
        if not axes:
            return values
        (axis, *others), pieces = axes, list[tuple[int, Any, Any]]()
        for run, first, second, last in zip(self.runs[axis], values[::3], values[1::3], values[2::3], strict=True):
            step = second - first
            if np.any(last - first != step * (len(run) - 1)):
                raise _Uneven(axis, run)
            if pieces:
                begin, before, grown = pieces[-1]
                if not np.any(step != grown) and not np.any(first != before + grown * (run[0] - begin)):
                    continue
            pieces.append((run[0], first, step))
        (_, start, step), *more = pieces
        if not more and not np.any(step != 0):
            return self._lines(start, others)
        return _Lines(axis, tuple((at, self._lines(a, others), self._lines(b, others)) for at, a, b in pieces))

    def _in_iteration(self, iterations: tuple[int, ...]) -> dict[Path, Any]:
        """Everything that is no value among the arguments in one iteration of each axis, by its place."""
        written = self.written(dict(zip(self.axes, iterations, strict=True))) if any(iterations) else self.graph
        others = list(written.nodes)
        if [(n.op, n.target) for n in others] != [(n.op, n.target) for n in self.nodes]:
            mine, theirs = next(
                ((a, b) for a, b in zip(self.nodes, others, strict=False) if a.target != b.target),
                (self.nodes[-1], others[-1]),
            )
            raise self._other(mine, str(mine.target), str(theirs.target))
        found: dict[Path, Any] = {}
        for place, node in enumerate(others):
            _gather([node.args, node.kwargs, node.meta.get("shape", ())], (place,), found)
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

    def _put(self, place: Path, number: Any) -> None:
        """Write an iteration-dependent number as a call, before its user."""
        if not isinstance(number, _Lines):
            return
        number_of, part, *path = place
        node = self.nodes[number_of]
        if part == 2:  # the shape is known of no iteration but the first
            node.meta.pop("shape", None)
            return
        made = self._written(number, node)
        if part == 0:
            node.args = _replaced(node.args, path, made)
        else:
            node.kwargs = _replaced(node.kwargs, path, made)

    def _written(self, number: Any, before: fx.Node) -> Any:
        """A number as an argument of a node."""
        if not isinstance(number, _Lines):
            return number
        begin = next(n for n in self.inside[before] if loop_role(n) == "opens" and n.args[0] == number.axis)
        shared = bool(action_order(begin))
        place = begin if shared else before  # what the line of an inner iteration is made of is there when these begin
        lines = tuple((at, self._written(n, place), self._written(step, place)) for at, n, step in number.pieces)
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


def _declare_use(loop: fx.Node, iteration: fx.Node) -> None:
    """Declare the iteration number as an operand of the calls that use it."""
    for end in (loop, *(user for user in loop.users if user.target is loop_ops.end)):
        *before, around = end.args[:3] if end is loop else end.args[:2]
        if iteration not in around:  # type: ignore[operator]
            end.args = (*before, [*around, iteration], *end.args[3 if end is loop else 2 :])  # type: ignore[misc]


def _gather(arg: Any, path: Path, found: dict[Path, Any]) -> None:
    if isinstance(arg, (list, tuple, Mapping)):
        found[(*path, "size")] = f"{len(arg)} arguments"
        for key, each in arg.items() if isinstance(arg, Mapping) else enumerate(arg):
            _gather(each, (*path, key), found)
    else:
        found[path] = arg.name if isinstance(arg, fx.Node) else arg


def _replaced(nest: Any, path: Sequence[Any], new: Any) -> Any:
    if not path:
        return new
    items = nest.items() if isinstance(nest, Mapping) else enumerate(nest)
    changed = {key: _replaced(each, path[1:], new) if key == path[0] else each for key, each in items}
    return changed if isinstance(nest, Mapping) else type(nest)(changed.values())
