"""Colours and fonts of all pictures, the width of a text, and how values are written."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from shardfx.ir.graph import Value
from shardfx.ir.mesh import Mesh

TIMES = "\N{MULTIPLICATION SIGN}"
SANS = "Inter, 'Segoe UI', 'Helvetica Neue', Helvetica, Arial, sans-serif"
MONO = "ui-monospace, 'SF Mono', Menlo, Consolas, 'DejaVu Sans Mono', monospace"

AXIS_COLOURS = ("#2563eb", "#d9480f", "#15803d", "#9333ea", "#0e7490", "#be185d", "#92650a", "#4d7c0f")
"""One per mesh axis, in the mesh's order: dark enough to be read on white and to carry white text."""
INK = "#1e293b"
MUTED = "#64748b"
FAINT = "#94a3b8"
RULE = "#cbd5e1"
PAPER = "#ffffff"
PAGE = "#f6f8fb"
HOST = "#57534e"
"""Traffic with the host's memory."""

_NARROW = {**dict.fromkeys("ijlI|!.,:;'", 0.34), **dict.fromkeys("ftr()[]{}/- ", 0.42)}
_WIDE = {**dict.fromkeys("mwMW@%", 0.95), **dict.fromkeys(f"{TIMES}…→↓↑", 0.85)}


@dataclass(frozen=True)
class Run:
    """Consecutive text in one colour."""

    text: str
    colour: str = INK
    bold: bool = False


def width(text: str | Sequence[Run], size: float, *, mono: bool = False, bold: bool = False) -> float:
    """An upper bound of the width of a text, over the fonts above and those that stand in for them."""
    if not isinstance(text, str):
        return sum(width(run.text, size, mono=mono, bold=bold or run.bold) for run in text)
    if mono:
        return 0.61 * size * len(text)
    units = sum(_NARROW.get(c) or _WIDE.get(c) or (0.72 if c.isupper() else 0.63) for c in text)
    return units * size * (1.08 if bold else 1.0)


def shorten(text: str, most: int) -> str:
    """At most ``most`` characters, the middle left out."""
    if len(text) <= most:
        return text
    head = (most - 1) * 3 // 5
    return f"{text[:head]}…{text[len(text) - (most - 1 - head) :]}"


def colour_of(index: int) -> str:
    """The colour of an axis, rank or curve by its number; from the ninth on colours repeat."""
    return AXIS_COLOURS[index % len(AXIS_COLOURS)]


def axis_colour(mesh: Mesh, axis: str) -> str:
    """The colour of a mesh axis."""
    return colour_of(mesh.order(axis))


def braces(names: Sequence[str], mesh: Mesh) -> list[Run]:
    """``{dp,tp}``, each axis in its colour."""
    runs = [run for name in names for run in (Run(",", FAINT), Run(name, axis_colour(mesh, name), True))]
    return [Run("{", FAINT), *runs[1:], Run("}", FAINT)]


def placement(value: Value, mesh: Mesh) -> list[Run]:
    """``64{dp}, 512 +{tp}``, with each sharded size in the colour of its first axis."""
    if value.spec is None:
        return [Run(", ".join(map(str, value.shape)) or "scalar")]
    text = value.spec.text(value.shape)
    closing = text.rindex("]")
    text = (text[1:closing] or "scalar") + text[closing + 1 :]
    runs: list[Run] = []
    for size, axes, rest in re.findall(r"([\w+]*)\{([^}]*)\}|([^{}]+?(?=[\w+]*\{|$))", text):
        names = axes.split(",")
        runs += [Run(rest)] if rest else [Run(size, axis_colour(mesh, names[0]), True), *braces(names, mesh)]
    return runs


def type_text(value: Value) -> str:
    """``f32[64{dp}, 512] +{tp}``, as in the text of a graph."""
    short = {"float": "f", "bfloat": "bf", "int": "i", "uint": "u", "complex": "c"}
    name = str(value.type.dtype).removeprefix("torch.")
    dtype = re.sub(r"^[a-z]+(?=\d)", lambda m: short.get(m[0], m[0]), name)
    if value.spec is None:
        return f"{dtype}[{', '.join(map(str, value.shape))}]"
    return value.spec.text(value.shape, dtype)
