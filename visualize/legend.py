"""The header of a picture: the title, the meaning of its colours and shapes, and totals."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from shardfx.ir.cost.traffic import LOOP_COMM, by_axes, comm_name, over_loop
from shardfx.ir.graph import InputKind, Phase
from shardfx.ir.mesh import Mesh
from shardfx.ir.ops.sends import is_comm
from shardfx.ir.ops.traits import is_heavy
from shardfx.ir.text.printer import size_text

from .boxes import BoxKind, Picture
from .leaf_boxes import comm_shape
from .style import FAINT, HOST, INK, MUTED, PAPER, RULE, TIMES, Run, axis_colour, braces, width
from .svg import Canvas, Rect

GAP = 14.0
LINE = 20.0
SIDE = 16.0
ICON = 40.0
TEXT = 11.5
MEANING = {
    "all-reduce": "sums the parts; every rank gets the sum",
    "all-gather": "every rank gets all shards",
    "reduce-scatter": "sums the parts; each rank gets its shard",
    "all-to-all": "shards another dim instead",
    "halo": "each rank gets the rows around its own",
    "ring": "each rank gets the block of another one, so many places before or behind",
    "slice": "each rank keeps its shard; nothing is sent",
    LOOP_COMM["all_reduce"]: "accumulated over iterations; nothing is sent",
    LOOP_COMM["all_gather"]: "the results of all iterations, concatenated",
    LOOP_COMM["slice"]: "the part of one iteration",
}

Icon = Callable[[Canvas, Rect], None]


class LegendEntry(NamedTuple):
    """A line of a card: a small drawing, and its meaning. ``columns`` are set right-aligned behind the text."""

    runs: list[Run]
    icon: Icon | None = None
    columns: tuple[str, ...] = ()


class LegendCard:
    """A titled part of the legend."""

    def __init__(self, title: str, entries: list[LegendEntry]) -> None:
        self.title, self.entries = title, entries
        self.icons = ICON if any(entry.icon for entry in entries) else 0.0
        self.texts = max((width(entry.runs, TEXT) for entry in entries), default=0.0)
        cells = zip(*(entry.columns for entry in entries if entry.columns), strict=True)
        self.columns = [max(width(cell, TEXT) for cell in column) + 18 for column in cells]
        self.width = max(self.icons + self.texts + sum(self.columns), width(title, TEXT, bold=True)) + 2 * SIDE
        self.height = 40 + LINE * len(entries)

    def draw(self, canvas: Canvas, x: float, y: float, height: float) -> None:
        """Draw it with its upper left corner at (x, y). ``height`` is that of the tallest card beside it."""
        canvas.rect(Rect(x, y, self.width, height), 10, fill=PAPER, stroke="#e2e8f0")
        canvas.text(x + SIDE, y + 22, self.title, size=TEXT, bold=True, colour=MUTED)
        for i, entry in enumerate(self.entries):
            base = y + 46 + LINE * i
            if entry.icon:
                entry.icon(canvas, Rect(x + SIDE, base - 11, 28, 14))
            canvas.text(x + SIDE + self.icons, base, entry.runs, size=TEXT)
            right = x + SIDE + self.icons + self.texts
            for cell, wide in zip(entry.columns, self.columns, strict=False):
                right += wide
                canvas.text(right, base, cell, size=TEXT, anchor="end")


def draw_header(canvas: Canvas, picture: Picture, title: str, left: float, wide: float) -> float:
    """Draw title and legend above the lanes, ``wide`` at most where it can; gives where they end."""
    graph = picture.graph
    phases = Counter(node.phase for node in graph.nodes)
    parts = ", ".join(f"{phases[phase]:,} {phase.value}" for phase in Phase if phases[phase])
    said = f"{len(graph.nodes):,} ops ({parts}) in {picture.size} boxes."
    said += "  Point at a box or line for its source and its reason."
    canvas.text(left, 54, title, size=25, bold=True)
    canvas.text(left, 77, said, size=12.5, colour=MUTED)
    lines: list[list[LegendCard]] = [[]]
    for card in (_mesh_card(graph.mesh), _totals_card(picture), _comm_card(picture), _signs_card(picture)):
        if card.entries:
            used = sum(other.width + GAP for other in lines[-1])
            if used and used + card.width > wide:
                lines.append([])
            lines[-1].append(card)
    y = 98.0
    for line in lines:
        x, height = left, max((card.height for card in line), default=0.0)
        for card in line:
            card.draw(canvas, x, y, height)
            x += card.width + GAP
        y += height + GAP
    return y + 10


def _mesh_card(mesh: Mesh) -> LegendCard:
    """The axes, with sizes and colours."""
    entries = []
    for axis, colour in ((axis, axis_colour(mesh, axis.name)) for axis in mesh.axes):
        runs = [Run(axis.name, colour, True), Run(f"   {axis.size} {'iterations' if axis.loop else 'ranks'}")]
        entries.append(LegendEntry(runs, _box_icon(colour)))
    return LegendCard(f"Mesh of {mesh.size:,} rank" + "s" * (mesh.size > 1), entries)


def _totals_card(picture: Picture) -> LegendCard:
    """Communication by axis, and the parameters."""
    graph, mesh = picture.graph, picture.graph.mesh
    entries = []
    for axes, calls in by_axes(graph.nodes, mesh).items():
        runs = [run for axis in axes for run in (Run(axis, axis_colour(mesh, axis), True), Run(" "))]
        number = sum(one.iterations for one in calls)
        sent = size_text(sum(one.total for one in calls))
        entries.append(LegendEntry([Run("over "), *runs], None, (f"{number:,} call" + "s" * (number > 1), sent)))
    parameters = [inp.value for inp in graph.of_kind(InputKind.PARAMETER)]
    if parameters:
        full = size_text(sum(value.type.nbytes for value in parameters))
        local = size_text(sum(value.local_bytes(mesh) for value in parameters))
        runs = [Run("parameters"), Run(f"  (of {full})" if local != full else "", MUTED)]
        entries.append(LegendEntry(runs, None, ("", local)))
    return LegendCard("Sent and stored by one rank in a step", entries)


def _comm_card(picture: Picture) -> LegendCard:
    """The shapes of the communication ops in the graph."""
    mesh = picture.graph.mesh
    kinds = {comm_name(node, mesh): over_loop(node, mesh) for node in picture.graph.nodes if is_comm(node)}
    entries = []
    for name, looped in kinds.items():
        runs = [Run(name, INK, True), Run(f"   {MEANING.get(name, '')}", MUTED)]
        entries.append(LegendEntry(runs, _comm_icon(name, hollow=looped or name == "slice")))
    return LegendCard("Communication, in the colour of its axis", entries)


def _signs_card(picture: Picture) -> LegendCard:
    """The meaning of other signs in the picture."""
    mesh, boxes = picture.graph.mesh, list(picture.boxes())
    specs = [value.spec for value in picture.graph.values() if value.spec is not None]
    sharded = next((axis for spec in specs for axis in spec.axes), None)
    partial = next((axis for spec in specs for axis in spec.partial_axes), None)
    looped = next((axis for box in boxes for axis in box.loop_axes), None)
    heavy = any(box.kind is BoxKind.OP and any(map(is_heavy, box.nodes)) for box in boxes)
    hosts = any(box.kind is BoxKind.OP and len(box.nodes) > 1 for box in boxes)
    kinds = {box.kind for box in boxes}
    entries = []

    def add(shown: object, text: str, icon: Icon | None, *sign: Run) -> None:
        if shown:
            entries.append(LegendEntry([*sign, Run("   " * bool(sign) + text, MUTED)], icon))

    for axis, size, text, dash in (
        (sharded, "64", "a dim of 64, sharded over", None),
        (partial, "+", "still a partial sum over", "7 5"),
    ):
        if axis:
            colour = axis_colour(mesh, axis)
            add(True, f"{text} {axis}", _line_icon(colour, dash), Run(size, colour, True), *braces([axis], mesh))
    add(picture.crossing, "kept for backward", _line_icon(MUTED, "2 4"))
    stacked = any(box.count > 1 for box in boxes)
    add(stacked, "equal blocks, drawn once", _stack_icon, Run(f"{TIMES} 12", INK, True))
    if looped:
        badge = Run(f"{TIMES} {mesh[looped].size} iterations", axis_colour(mesh, looped), True)
        add(True, "the body of a loop, drawn once", None, badge)
    add(heavy, "matrix product, convolution, attention", _box_icon("#dbe4f0", FAINT))
    add(BoxKind.MEMORY in kinds, "offload to the host, or fetch", _box_icon(HOST, HOST))
    add(BoxKind.CLOSED in kinds, "a module whose ops are not drawn", _box_icon("#eef2f7", RULE))
    add(hosts, "views and transposes are part of the op beside them", _box_icon(PAPER, RULE))
    return LegendCard("How to read it", entries)


def _line_icon(colour: str, dash: str | None) -> Icon:
    attributes = {"fill": "none", "stroke": colour, "stroke_width": "2", "stroke_dasharray": dash}
    return lambda canvas, r: canvas.path(f"M{r.x:.1f} {r.middle:.1f}H{r.right:.1f}", **attributes)


def _box_icon(fill: str, stroke: str | None = None) -> Icon:
    return lambda canvas, r: canvas.rect(r, 4, fill=fill, stroke=stroke)


def _stack_icon(canvas: Canvas, r: Rect) -> None:
    for shift in (5.0, 2.5, 0.0):
        canvas.rect(Rect(r.x + shift, r.y + shift, r.w - 5, r.h - 5), 3, fill=PAPER, stroke=MUTED)


def _comm_icon(name: str, *, hollow: bool) -> Icon:
    return lambda canvas, r: comm_shape(canvas, r, name, (), hollow=hollow)
