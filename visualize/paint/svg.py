"""A small SVG writer: shapes, text in several colours, tooltips."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from xml.sax.saxutils import escape, quoteattr

from shardfx.visualize.layout.dot import Point
from shardfx.visualize.layout.geometry import Rect

from .style import INK, MONO, SANS, Run, width

Attribute = str | float | None


def number(value: float) -> str:
    """Pixels as SVG writes them here: one decimal, none where that is 0."""
    return f"{value:.1f}".removesuffix(".0")


class Canvas:
    """Collects elements in order of drawing, and remembers how far they reach."""

    def __init__(self) -> None:
        self.parts: list[str] = []
        self.right = 0.0
        self.bottom = 0.0

    def element(self, tag: str, text: str = "", /, **attributes: Attribute) -> None:
        """An element; ``_`` in a name stands for ``-``, and None leaves an attribute out."""
        written = "".join(
            f" {_attribute(name)}={quoteattr(number(v) if isinstance(v, float) else str(v))}"
            for name, v in attributes.items()
            if v is not None
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
        self.element(
            "rect",
            x=float(rect.x),
            y=float(rect.y),
            width=float(rect.w),
            height=float(rect.h),
            rx=float(radius) if radius else None,
            **attributes,
        )

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
    ) -> float:
        """Text whose base line is at ``y``; gives how wide it is at most."""
        runs = [Run(runs, colour)] if isinstance(runs, str) else list(runs)
        wide = sum(width(run.text, size, mono=mono, bold=bold or run.bold) for run in runs)
        base = runs[0].colour if runs else colour
        inner = "".join(_span(run, base) for run in runs)
        self.element(
            "text",
            inner,
            x=float(x),
            y=float(y),
            font_size=number(size),
            class_="m" if mono else None,
            font_weight="600" if bold else None,
            fill=base,
            text_anchor=anchor if anchor != "start" else None,
            xml_space="preserve" if any("  " in t or t != t.strip() for t in (run.text for run in runs)) else None,
            **(
                {"stroke": halo, "stroke_width": "5", "paint_order": "stroke", "stroke_linejoin": "round"}
                if halo
                else {}
            ),
        )
        reach = {"start": wide, "middle": wide / 2, "end": 0}[anchor]
        self.right, self.bottom = max(self.right, x + reach), max(self.bottom, y)
        return wide


def _attribute(name: str) -> str:
    return "xml:space" if name == "xml_space" else name.rstrip("_").replace("_", "-")


def _span(run: Run, base: str) -> str:
    colour = "" if run.colour == base else f' fill="{run.colour}"'
    weight = ' font-weight="600"' if run.bold else ""
    text = escape(run.text)
    return f"<tspan{colour}{weight}>{text}</tspan>" if colour or weight else text


def spline(points: Sequence[Point]) -> str:
    """A path along the control points of a cubic spline."""
    start = f"M{number(points[0][0])} {number(points[0][1])}"
    if len(points) == 1:
        return start
    return start + "C" + " ".join(f"{number(x)} {number(y)}" for x, y in points[1:])


def document(canvas: Canvas, width: float, height: float, title: str, description: str) -> str:
    """The whole file."""
    css = (
        f"text{{font-family:{SANS};dominant-baseline:auto}}.m{{font-family:{MONO}}}"
        ".b:hover>.f{stroke:#0f172a;stroke-width:2}.w:hover .l{stroke-width:4}.k .l{opacity:.5}.k:hover .l{opacity:1}"
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{number(width)}" height="{number(height)}" '
            f'viewBox="0 0 {number(width)} {number(height)}" role="img">',
            f"<title>{escape(title)}</title>",
            f"<desc>{escape(description)}</desc>",
            f"<style>{css}</style>",
            *canvas.parts,
            "</svg>\n",
        ]
    )
