"""A small SVG writer: shapes, text in several colours, tooltips."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape, quoteattr

from .style import INK, MONO, SANS, Run, width

_CSS = (
    f"text{{font-family:{SANS};dominant-baseline:auto}}.m{{font-family:{MONO}}}"
    ".b:hover>.f{stroke:#0f172a;stroke-width:2}.w:hover .l{stroke-width:4}.k .l{opacity:.5}.k:hover .l{opacity:1}"
)
Attribute = str | float | None
Point = tuple[float, float]


@dataclass(frozen=True)
class Rect:
    """A rectangle in pixels; y grows downwards, (x, y) is its upper left corner."""

    x: float
    y: float
    w: float
    h: float

    @property
    def bottom(self) -> float:
        """The y of its lower side."""
        return self.y + self.h

    @property
    def right(self) -> float:
        """The x of its right side."""
        return self.x + self.w

    @property
    def middle(self) -> float:
        """The y half-way down."""
        return self.y + self.h / 2

    @property
    def centre(self) -> float:
        """The x half-way across."""
        return self.x + self.w / 2


def number(value: float) -> str:
    """Pixels as SVG writes them here: one decimal, none where that is 0."""
    return f"{value:.1f}".removesuffix(".0")


def polygon(points: Iterable[Point]) -> str:
    """The data of a closed path along points."""
    return polyline(points) + "Z"


def polyline(points: Iterable[Point]) -> str:
    """The data of a path along points."""
    return "M" + "L".join(f"{number(x)} {number(y)}" for x, y in points)


def spline(points: Sequence[Point]) -> str:
    """The data of a path along the control points of a cubic spline."""
    start, *rest = [f"{number(x)} {number(y)}" for x, y in points]
    return f"M{start}" + ("C" + " ".join(rest) if rest else "")


class Canvas:
    """Collects elements in order of drawing, and their extent."""

    def __init__(self) -> None:
        self.parts: list[str] = []
        self.right = 0.0
        self.bottom = 0.0

    def element(self, tag: str, text: str = "", /, **attributes: Attribute) -> None:
        """An element; ``_`` in a name stands for ``-``, and None leaves an attribute out."""
        written = "".join(
            f" {'xml:space' if name == 'xml_space' else name.rstrip('_').replace('_', '-')}="
            + quoteattr(number(value) if isinstance(value, float) else str(value))
            for name, value in attributes.items()
            if value is not None
        )
        self.parts.append(f"<{tag}{written}>{text}</{tag}>" if text else f"<{tag}{written}/>")

    @contextmanager
    def group(self, css: str = "", tooltip: str = "") -> Iterator[None]:
        """Elements that belong together, with the text that appears when one points at them."""
        self.parts.append(f'<g class="{css}">' if css else "<g>")
        if tooltip:
            self.parts.append(f"<title>{escape(tooltip)}</title>")
        yield
        self.parts.append("</g>")

    def rect(self, rect: Rect, radius: float = 0, **attributes: Attribute) -> None:
        """Draw a rectangle. ``radius`` rounds its corners; attributes are SVG's, with ``_`` for ``-``."""
        self.right, self.bottom = max(self.right, rect.right), max(self.bottom, rect.bottom)
        x, y, wide, high = map(float, (rect.x, rect.y, rect.w, rect.h))
        self.element("rect", x=x, y=y, width=wide, height=high, rx=float(radius) if radius else None, **attributes)

    def path(self, d: str, **attributes: Attribute) -> None:
        """Draw a path; ``d`` is its data in SVG's own language."""
        self.element("path", d=d, **attributes)

    def text(
        self,
        x: float,
        y: float,
        runs: str | Iterable[Run],
        *,
        size: float = 12,
        mono: bool = False,
        bold: bool = False,
        colour: str = INK,
        anchor: str = "start",
        halo: str | None = None,
    ) -> None:
        """Text whose base line is at ``y``."""
        runs = [Run(runs, colour)] if isinstance(runs, str) else list(runs)
        base = runs[0].colour if runs else colour
        around = {"stroke": halo, "stroke_width": "5", "paint_order": "stroke", "stroke_linejoin": "round"}
        self.element(
            "text",
            "".join(_span(run, base) for run in runs),
            x=float(x),
            y=float(y),
            font_size=number(size),
            class_="m" if mono else None,
            font_weight="600" if bold else None,
            fill=base,
            text_anchor=anchor if anchor != "start" else None,
            xml_space="preserve" if any("  " in t or t != t.strip() for t in (run.text for run in runs)) else None,
            **(around if halo else {}),
        )
        reach = width(runs, size, mono=mono, bold=bold) * {"start": 1, "middle": 0.5, "end": 0}[anchor]
        self.right, self.bottom = max(self.right, x + reach), max(self.bottom, y)

    def swatches(self, x: float, y: float, right: float, entries: Iterable[tuple[str, str]]) -> float:
        """A legend of coloured squares with texts, in lines up to ``right``; gives the y of the last line."""
        at = x
        for colour, text in entries:
            wide = width(text, 12) + 34
            if at + wide > right:
                at, y = x, y + 20
            self.rect(Rect(at, y - 10, 12, 12), 3, fill=colour)
            self.text(at + 18, y, text, size=12)
            at += wide
        return y

    def document(self, wide: float, high: float, title: str, description: str) -> str:
        """The text of the file."""
        size = f'width="{number(wide)}" height="{number(high)}" viewBox="0 0 {number(wide)} {number(high)}"'
        head = [f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">', f"<title>{escape(title)}</title>"]
        head += [f"<desc>{escape(description)}</desc>", f"<style>{_CSS}</style>"]
        return "\n".join([*head, *self.parts, "</svg>\n"])

    def save(self, path: str | Path, wide: float, high: float, title: str, description: str) -> Path:
        """Write the file (its folder is made); gives its path."""
        return save(path, self.document(wide, high, title, description))


def save(path: str | Path, text: str) -> Path:
    """Write a file whose folder is made; gives its path."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def _span(run: Run, base: str) -> str:
    colour = "" if run.colour == base else f' fill="{run.colour}"'
    weight = ' font-weight="600"' if run.bold else ""
    text = escape(run.text)
    return f"<tspan{colour}{weight}>{text}</tspan>" if colour or weight else text


def ticks(most: float, count: int = 10) -> Iterator[float]:
    """Round numbers from 0 to ``most``, at most about ``count``."""
    unit = 10.0 ** math.floor(math.log10(most)) if most > 0 else 1.0
    step = next(unit * part for part in (0.1, 0.2, 0.5, 1.0, 2.0) if most / (unit * part) <= count)
    return (round(i * step, 12) for i in range(int(most / step + 1e-9) + 1))
