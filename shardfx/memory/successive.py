"""Longer stretches: modules that follow one another, which hold about the same each.

Where modules do little (a convolution, an activation), what goes from one to the next is most of what waits; it is made
again where several of them are one stretch (Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from shardfx.ir.graph import Node, Phase, Value
from shardfx.ir.names import within

from .stretches import Course, sources

SLACK = (1.0, 1.1, 1.25, 1.5)
"""How much more than the leanest parting others may hold."""
COUNTS = (3, 4, 6, 8, 12)
"""Into so many stretches of about the same size a forward is parted, too."""
SHARE = 1 / 8
"""A module of a list that holds more than this of all that waits is taken apart into the modules in it."""
Paths = tuple[str, ...]


def partings(course: Course) -> Iterator[tuple[Paths, ...]]:
    """The modules of each stretch, in several ways.

    While a stretch is made again it is there whole, beside what the stretches before it gave; so that the first may be
    longer than the last (:func:`_parted`). Even ones come from among all modules: a stretch may begin with what does
    not wait for the backward, where that is not made again.
    """
    forward = [node for node in course.graph.nodes if node.phase is Phase.FORWARD and node.where.module]
    units = _units(course, forward)
    pieces, single = _pieces(course, units)
    seen = set()
    for runs in (*_lean(pieces), *(_even(single, count) for count in COUNTS)):
        parts = tuple(tuple(unit for piece in run for unit in piece.units) for run in runs)
        if len(parts) > 1 and any(len(each) > 1 for each in parts) and parts not in seen:
            seen.add(parts)
            yield parts


def _lean(pieces: Sequence[Piece]) -> Iterator[list[list[Piece]]]:
    """The parting that holds least, and some that hold more and part less."""
    low, high = 0.0, float(sum(piece.held + piece.given for piece in pieces) + max(piece.beside for piece in pieces))
    least = high
    while least - low > high / 1000:
        middle = (low + least) / 2
        low, least = (low, middle) if _parted(pieces, middle) else (middle, least)
    yield from (_parted(pieces, least * slack) for slack in SLACK)


def _even(pieces: Sequence[Piece], count: int) -> list[list[Piece]]:
    """About so many runs of pieces, of which about as much waits."""
    each, so_far = max(sum(piece.held for piece in pieces), 1) / count, 0.0
    found: dict[int, list[Piece]] = {}
    for piece in pieces:
        found.setdefault(min(int((so_far + piece.held / 2) / each), count - 1), []).append(piece)
        so_far += piece.held
    return list(found.values())


@dataclass(frozen=True)
class Piece:
    """Modules that stay together; in bytes what of them waits for the backward, what they give to others, and what is
    there in their backward beside what waits."""

    units: Paths
    held: int
    given: int
    beside: int


def _parted(pieces: Sequence[Piece], limit: float) -> list[list[Piece]]:
    """The longest runs of pieces that hold no more, each beside what those before it gave; none: it cannot be."""
    found: list[list[Piece]] = [[]]
    waits = held = 0
    for piece in pieces:
        if found[-1] and waits + held + piece.held + piece.beside > limit:
            waits, held = waits + found[-1][-1].given, 0
            found.append([])
        if waits + piece.held + piece.beside > limit:
            return []
        found[-1].append(piece)
        held += piece.held
    return found


def _pieces(course: Course, units: Mapping[Node, str]) -> tuple[list[Piece], list[Piece]]:
    """Units between which what goes on waits for the backward as it is, for a stretch that begins with what does not
    has that wait, too; and all units by themselves."""
    mesh = course.graph.mesh
    held, given = (dict.fromkeys(units.values(), 0) for _ in range(2))
    goes_on: dict[Value, str] = {}
    for node, unit in units.items():
        held[unit] += _waits(course, node)
        for value in sources(node.operands):
            maker = units.get(value.node, unit) if value.node is not None else unit
            if maker != unit:
                goes_on[value] = maker
    for value, unit in goes_on.items():
        given[unit] += value.local_bytes(mesh)
    open_ = {unit for value, unit in goes_on.items() if value not in course.needed}
    found: list[list[str]] = [[]]
    for unit in held:
        found[-1].append(unit)
        if unit not in open_:
            found.append([])
    beside = _beside(course, units, held)

    def piece(each: Sequence[str]) -> Piece:
        return Piece(tuple(each), sum(held[u] for u in each), given[each[-1]], max(beside[u] for u in each))

    return [piece(each) for each in found if each], [piece([unit]) for unit in held]


def _beside(course: Course, units: Mapping[Node, str], held: Mapping[str, int]) -> dict[str, int]:
    """The most bytes in the backward of each unit, beside what waits of it and those before it."""
    waits = dict(zip(held, accumulate(held.values()), strict=True))
    of = {node.where.module: unit for node, unit in units.items()}
    found = dict.fromkeys(held, 0)
    for call, nbytes in zip(course.memory.footprint.calls, course.held, strict=True):
        planned = call.meta.get("shardfx")
        if isinstance(planned, Node) and planned.phase is Phase.BACKWARD and planned.where.module in of:
            unit = of[planned.where.module]
            found[unit] = max(found[unit], nbytes - waits[unit])
    return found


def _units(course: Course, forward: Sequence[Node]) -> dict[Node, str]:
    """The modules that are not taken apart, of each node of the forward that lies in one."""
    blocks: dict[str, int] = {}
    for node in forward:
        path = course.stretch_at(node.where.module)
        blocks[path] = blocks.get(path, 0) + _waits(course, node)
    large = {path for path, nbytes in blocks.items() if nbytes > SHARE * sum(blocks.values())}
    modules = dict.fromkeys(node.where.module for node in forward)
    outer = {module for module in modules if any(other != module and within(other, module) for other in modules)}
    found = {}
    for node in forward:
        path, module = course.stretch_at(node.where.module), node.where.module
        if path not in large or module not in outer:  # what an outer one does itself lies around the others
            found[node] = module if path in large else path
    return found


def _waits(course: Course, node: Node) -> int:
    """The bytes of a node that wait for the backward."""
    return sum(value.local_bytes(course.graph.mesh) for value in node.outs if value in course.needed)
