"""What stands above a picture: the title, what its colours and shapes mean, and totals."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from shardfx.ir.cost.traffic import OVER_TIME, by_axes, comm_name, over_time
from shardfx.ir.graph import InputKind, Phase
from shardfx.ir.mesh import Mesh
from shardfx.ir.ops.sends import is_comm
from shardfx.ir.ops.traits import is_heavy
from shardfx.ir.text.printer import size_text
from shardfx.visualize.layout.geometry import Rect
from shardfx.visualize.scene.boxes import TIMES, Kind, Picture

from .leaf_box import comm_shape
from .style import FAINT, HOST, INK, MUTED, PAPER, RULE, Run, axis_colour, width
from .svg import Canvas

GAP = 14.0
LINE = 20.0
SIDE = 16.0
ICON = 40.0
TEXT = 11.5
MEANING = {
    "all-reduce": "sums the parts; every rank gets the sum",
    "all-gather": "every rank gets the whole",
    "reduce-scatter": "sums the parts; each rank gets its share",
    "all-to-all": "cuts along another dim instead",
    "slice": "each rank keeps its share; nothing is sent",
    OVER_TIME["all_reduce"]: "added up from turn to turn; nothing is sent",
    OVER_TIME["all_gather"]: "what each turn makes, one behind the other",
    OVER_TIME["slice"]: "of what all turns know",
}

Icon = Callable[[Canvas, Rect], None]


@dataclass(frozen=True)
class LegendEntry:
    """A line of a card: a small drawing, and what it means. ``columns`` are set right-aligned behind the text."""

    runs: list[Run]
    icon: Icon | None = None
    columns: tuple[str, ...] = ()


@dataclass(frozen=True)
class Card:
    """A titled part of the legend."""

    title: str
    entries: list[LegendEntry]

    @property
    def icons(self) -> float:
        """The width of the column of drawings, in pixels; 0 where no entry has one."""
        return ICON if any(entry.icon for entry in self.entries) else 0.0

    @property
    def texts(self) -> float:
        """The width of the widest text, in pixels."""
        return max(sum(width(run.text, TEXT, bold=run.bold) for run in entry.runs) for entry in self.entries)

    @property
    def columns(self) -> list[float]:
        """The widths of the columns behind the text, in pixels."""
        rows = [entry.columns for entry in self.entries if entry.columns]
        return [max(width(cell, TEXT) for cell in column) + 18 for column in zip(*rows, strict=True)]

    @property
    def width(self) -> float:
        """In pixels, with the margins."""
        return max(self.icons + self.texts + sum(self.columns), width(self.title, TEXT, bold=True)) + 2 * SIDE

    @property
    def height(self) -> float:
        """In pixels, with the title."""
        return 40 + LINE * len(self.entries)

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
    """Draw all that stands above the lanes, ``wide`` at most where it can; gives where it ends."""
    canvas.text(left, 54, title, size=25, bold=True)
    canvas.text(left, 77, subtitle(picture), size=12.5, colour=MUTED)
    made = (mesh_card(picture.graph.mesh), totals_card(picture), comm_card(picture), signs_card(picture))
    lines: list[list[Card]] = [[]]
    for card in made:
        if card.entries:
            used = sum(other.width + GAP for other in lines[-1])
            if used and used + card.width > wide:
                lines.append([])
            lines[-1].append(card)
    y = 98.0
    for line in lines:
        x = left
        height = max((card.height for card in line), default=0.0)
        for card in line:
            card.draw(canvas, x, y, height)
            x += card.width + GAP
        y += height + GAP
    return y + 10


def subtitle(picture: Picture) -> str:
    """How much there is, and how much of it is drawn."""
    graph = picture.graph
    phases = Counter(node.phase for node in graph.nodes)
    parts = [f"{phases[phase]:,} {phase.value}" for phase in Phase if phases[phase]]
    text = f"{len(graph.nodes):,} ops ({', '.join(parts)}) in {picture.size} boxes"
    return text + (".  Point at a box or line for its source and its reason.")


def mesh_card(mesh: Mesh) -> Card:
    """The axes, with sizes and colours."""
    entries = []
    for axis in mesh.axes:
        colour = axis_colour(mesh, axis.name)
        runs = [Run(axis.name, colour, True), Run(f"   {axis.size} {'turns' if axis.time else 'ranks'}")]
        entries.append(LegendEntry(runs, _swatch(colour)))
    ranks = f"{mesh.size:,} rank" + ("s" if mesh.size > 1 else "")
    return Card(f"Mesh of {ranks}", entries)


def totals_card(picture: Picture) -> Card:
    """Communication by axis, and the parameters."""
    graph, mesh = picture.graph, picture.graph.mesh
    entries = []
    for axes, calls in by_axes(graph.nodes, mesh).items():
        runs = [run for axis in axes for run in (Run(axis, axis_colour(mesh, axis), True), Run(" "))]
        number = sum(one.turns for one in calls)
        sent = size_text(sum(one.total for one in calls))
        entries.append(LegendEntry([Run("over "), *runs], None, (f"{number:,} call" + "s" * (number > 1), sent)))
    parameters = [given.value for given in graph.of_kind(InputKind.PARAMETER)]
    if parameters:
        whole = size_text(sum(value.type.nbytes for value in parameters))
        held = size_text(sum(value.local_bytes(mesh) for value in parameters))
        entries.append(
            LegendEntry(
                [Run("parameters"), Run("  (of " + whole + ")" if held != whole else "", MUTED)], None, ("", held)
            )
        )
    return Card("Sent and held by one rank in a step", entries)


def comm_card(picture: Picture) -> Card:
    """The shapes of the communication ops that there are."""
    mesh = picture.graph.mesh
    kinds = {comm_name(node, mesh): over_time(node, mesh) for node in picture.graph.nodes if is_comm(node)}
    entries = [
        LegendEntry(
            [Run(name, INK, True), Run(f"   {MEANING.get(name, '')}", MUTED)],
            _comm_icon(name, mesh, hollow=turned or name == "slice"),
        )
        for name, turned in kinds.items()
    ]
    return Card("Communication, in the colour of its axis", entries)


def signs_card(picture: Picture) -> Card:
    """How to read the rest, where it occurs."""
    mesh = picture.graph.mesh
    boxes = list(picture.boxes())
    specs = [value.spec for value in picture.graph.values() if value.spec is not None]
    entries = []
    cut = next((axis for spec in specs for axis in spec.axes), None)
    if cut:
        colour = axis_colour(mesh, cut)
        runs = [Run("64", colour, True), Run("{", FAINT), Run(cut, colour, True), Run("}", FAINT)]
        entries.append(LegendEntry([*runs, Run(f"   a dim of 64, cut over {cut}", MUTED)], _line_icon([colour])))
    partial = next((axis for spec in specs for axis in spec.partial_axes), None)
    if partial:
        colour = axis_colour(mesh, partial)
        runs = [Run("+", colour, True), Run("{", FAINT), Run(partial, colour, True), Run("}", FAINT)]
        entries.append(
            LegendEntry([*runs, Run(f"   still a partial sum over {partial}", MUTED)], _line_icon([colour], "7 5"))
        )
    if picture.crossing:
        entries.append(LegendEntry([Run("kept for backward", MUTED)], _line_icon([MUTED], "2 4")))
    if any(box.count > 1 for box in boxes):
        entries.append(
            LegendEntry([Run(f"{TIMES} 12", INK, True), Run("   equal blocks, drawn once", MUTED)], _stack_icon)
        )
    turned = next((axis for box in boxes for axis in box.turns), None)
    if turned:
        badge = Run(f"{TIMES} {mesh[turned].size} turns", axis_colour(mesh, turned), True)
        entries.append(LegendEntry([badge, Run("   done once for each turn, drawn once", MUTED)]))
    if any(box.kind is Kind.OP and any(map(is_heavy, box.nodes)) for box in boxes):
        entries.append(LegendEntry([Run("matrix product, convolution, attention", MUTED)], _box_icon("#dbe4f0", FAINT)))
    if any(box.kind is Kind.MEMORY for box in boxes):
        entries.append(LegendEntry([Run("put away, or fetched", MUTED)], _box_icon(HOST, HOST)))
    if any(box.kind is Kind.CLOSED for box in boxes):
        entries.append(LegendEntry([Run("a module whose ops are not drawn", MUTED)], _box_icon("#eef2f7", RULE)))
    if any(box.kind is Kind.OP and len(box.nodes) > 1 for box in boxes):
        entries.append(
            LegendEntry([Run("views and transposes are part of the op beside them", MUTED)], _box_icon(PAPER, RULE))
        )
    return Card("How to read it", entries)


def _swatch(colour: str) -> Icon:
    return lambda canvas, r: canvas.rect(r, 4, fill=colour)


def _line_icon(colours: list[str], dash: str | None = None) -> Icon:
    def draw(canvas: Canvas, r: Rect) -> None:
        d = f"M{r.x:.1f} {r.middle:.1f}H{r.right:.1f}"
        canvas.path(d, fill="none", stroke=colours[0], stroke_width="2", stroke_dasharray=dash)

    return draw


def _box_icon(fill: str, stroke: str) -> Icon:
    return lambda canvas, r: canvas.rect(r, 4, fill=fill, stroke=stroke)


def _stack_icon(canvas: Canvas, r: Rect) -> None:
    for shift in (5.0, 2.5, 0.0):
        canvas.rect(Rect(r.x + shift, r.y + shift, r.w - 5, r.h - 5), 3, fill=PAPER, stroke=MUTED)


def _comm_icon(name: str, mesh: Mesh, *, hollow: bool) -> Icon:
    return lambda canvas, r: comm_shape(canvas, r, name, (), mesh, hollow=hollow)
