"""Which turns of an axis are alike: consecutive ones that hold as many rows of everything."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from shardfx.ir.cut import Part, bounds
from shardfx.ir.graph import Node
from shardfx.ir.mesh import Mesh
from shardfx.ir.spec import Spec

from .in_turns import time_axes

Runs = dict[str, list[range]]


def alike_turns(parts: Collection[Part], mesh: Mesh, coords: Mapping[str, int]) -> Runs:
    """By axis of time: runs of turns in which a rank holds as many rows of all that is cut.

    Numbers of such turns are lines: sizes are the same, and places grow evenly. ``coords`` are those of the rank.
    """
    return {axis: _runs(axis, [part for part in parts if axis in part.axes], mesh, coords) for axis in time_axes(mesh)}


def parts_in_turns(nodes: Iterable[Node], mesh: Mesh) -> set[Part]:
    """Of the values of some nodes all that is cut over time, each once."""
    held: set[tuple[tuple[int, ...], Spec]] = set()
    for node in nodes:
        values, made = (*node.operands, *node.outs), node.strategy
        held.update((value.shape, value.spec) for value in values if value.spec is not None)
        if made is not None:
            held.update((v.shape, s) for v, s in zip(node.operands, made.operands, strict=False))
            held.update((v.shape, s) for v, s in zip(node.outs, made.results, strict=False))
    time = set(time_axes(mesh))
    cut = {(size, each) for shape, spec in held for size, each in zip(shape, spec.dims, strict=True) if each}
    return {part for size, each in cut for part in each.sub(size) if time & set(part.axes)}


def _runs(axis: str, parts: list[Part], mesh: Mesh, coords: Mapping[str, int]) -> list[range]:
    others = [each for each in time_axes(mesh) if each != axis]

    def rows(turn: int) -> list[int]:
        """How much the turn has of all parts, and of what is cut further, in all turns of the other axes."""
        return [
            bounds(part.size, part.axes[:end], mesh, at)[1]
            for part in parts
            for at in mesh.along({**dict.fromkeys(others, 0), **coords, axis: turn}, set(others) & set(part.axes))
            for end in range(part.axes.index(axis) + 1, len(part.axes) + 1)
        ]

    begins, last = [0], rows(0)
    for turn in range(1, mesh[axis].size):
        if (here := rows(turn)) != last:
            begins.append(turn)
        last = here
    return [range(a, b) for a, b in zip(begins, [*begins[1:], mesh[axis].size], strict=True)]
