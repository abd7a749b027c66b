"""Graphviz' dot: positions of boxes and the lines between them, for one level of a picture.

It runs in this process through pygraphviz, or as the program ``dot`` where that is installed instead. Small levels
get its curved lines; from :data:`LARGE` boxes on it is told to hurry.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from shardfx.ir.errors import Error

LARGE = 60
HURRY = "splines=line nslimit=2 nslimit1=2 mclimit=.3"
Point = tuple[float, float]


@dataclass(eq=False)
class DotBox:
    """A box to be placed. ``ins`` and ``outs`` are places on its upper and lower side where lines may end."""

    width: float
    height: float
    ins: Sequence[float] = ()
    outs: Sequence[float] = ()
    rank: str = ""
    """``source`` or ``sink``: on the upper or lower border of the level."""
    x: float = 0.0
    y: float = 0.0


@dataclass(eq=False)
class DotEdge:
    """A line to be drawn, from a place on the lower side of one item to a place on the upper side of another."""

    tail: DotBox
    head: DotBox
    tail_port: int | None = None
    head_port: int | None = None
    points: list[Point] = field(default_factory=list)
    """The control points of a cubic spline."""


def place(items: Sequence[DotBox], links: Sequence[DotEdge], *, gap: float = 22.0, rank_gap: float = 26.0) -> None:
    """Set the position (upper left corner, y downwards) of every item and the points of every link."""
    names = {item: f"n{i}" for i, item in enumerate(items)}
    found = json.loads(_run(_source(items, links, names, gap, rank_gap)))
    top = float(found["bb"].split(",")[3])
    by_name = {node["name"]: node for node in found.get("objects", ())}
    for item in items:
        x, y = map(float, by_name[names[item]]["pos"].split(","))
        item.x, item.y = x - item.width / 2, top - y - item.height / 2
    for edge in found.get("edges", ()):
        points = [tuple(map(float, p.split(","))) for p in edge["pos"].split() if p[0] not in "es"]
        link = links[int(edge["class"])]
        link.points = [(x, top - y) for x, y in points]
        _snap(link)


def _snap(link: DotEdge) -> None:
    """Let the ends of a line be exactly where they were asked to be: dot rounds."""
    for end, near, item, port, ports in (
        (0, 1, link.tail, link.tail_port, link.tail.outs),
        (-1, -2, link.head, link.head_port, link.head.ins),
    ):
        x = item.x + (item.width / 2 if port is None else ports[port])
        y = item.y + (item.height if end == 0 else 0)
        dx = x - link.points[end][0]
        link.points[end] = (x, y)
        link.points[near] = (link.points[near][0] + dx, link.points[near][1])


def _source(
    items: Sequence[DotBox], links: Sequence[DotEdge], names: Mapping[DotBox, str], gap: float, rank_gap: float
) -> str:
    speed = HURRY if len(items) > LARGE else "splines=true"
    lines = [
        f"digraph {{ graph [nodesep={gap / 72:.3f} ranksep={rank_gap / 72:.3f} {speed}]",
        'node [shape=box fixedsize=true label=""] edge [dir=none]',
    ]
    for item in items:
        if item.ins or item.outs:
            lines.append(f"{names[item]} [shape=plain fixedsize=false label=<{_table(item)}>]")
        else:
            lines.append(f"{names[item]} [width={item.width / 72:.4f} height={item.height / 72:.4f}]")
    for rank in ("source", "sink"):
        if members := [names[item] for item in items if item.rank == rank]:
            lines.append(f"{{rank={rank} {' '.join(members)}}}")
    for i, link in enumerate(links):
        tail = "" if link.tail_port is None else f":o{link.tail_port}"
        head = "" if link.head_port is None else f":i{link.head_port}"
        lines.append(f"{names[link.tail]}{tail}:s -> {names[link.head]}{head}:n [class={i}]")
    return "\n".join([*lines, "}"])


def _table(item: DotBox) -> str:
    """A table of the item's size whose first and last row have a cell of one point for every port."""
    whole = round(item.width)

    def row(places: Sequence[float], prefix: str) -> str:
        order = sorted(range(len(places)), key=lambda i: places[i])
        cells, at = [], 0
        for i in order:
            x = min(max(round(places[i]), at + 1), whole - 1)
            cells.append(_cell(x - at, 1))
            cells.append(_cell(1, 1, f'PORT="{prefix}{i}"'))
            at = x + 1
        cells.append(_cell(max(whole - at, 1), 1))
        return f"<TR><TD>{_TABLE}<TR>{''.join(cells)}</TR></TABLE></TD></TR>"

    middle = f"<TR>{_cell(whole, max(round(item.height) - 2, 1))}</TR>"
    return f"{_TABLE}{row(item.ins, 'i')}{middle}{row(item.outs, 'o')}</TABLE>"


_TABLE = '<TABLE BORDER="0" CELLBORDER="0" CELLSPACING="0" CELLPADDING="0">'


def _cell(width: int, height: int, port: str = "") -> str:
    return f'<TD FIXEDSIZE="TRUE" WIDTH="{width}" HEIGHT="{height}" {port}></TD>'


def _run(source: str) -> str:
    try:
        import pygraphviz
    except ImportError:
        program = shutil.which("dot")
        if program is None:
            raise Error(
                "pictures need Graphviz",
                expected="the package pygraphviz, or the program dot on the PATH",
                got="neither",
                remedy="pip install pygraphviz",
            ) from None
        return subprocess.run([program, "-Tjson0"], input=source, capture_output=True, text=True, check=True).stdout
    drawn: bytes = pygraphviz.AGraph(string=source).draw(format="json0", prog="dot")
    return drawn.decode()
