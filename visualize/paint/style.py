"""Colours, fonts, and how wide a text is."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from shardfx.ir.graph import Value
from shardfx.ir.mesh import Mesh
from shardfx.visualize.scene.boxes import TIMES

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


def width(text: str, size: float, *, mono: bool = False, bold: bool = False) -> float:
    """How wide a text is at most, over the fonts above and those that stand in for them."""
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


def axis_colour(mesh: Mesh, axis: str) -> str:
    """The colour of a mesh axis; from the ninth on colours come again."""
    return AXIS_COLOURS[mesh.order(axis) % len(AXIS_COLOURS)]


@dataclass(frozen=True)
class Run:
    """A stretch of text in one colour."""

    text: str
    colour: str = INK
    bold: bool = False


def placement(value: Value, mesh: Mesh) -> list[Run]:
    """``64{dp}, 512 +{tp}``, with what each axis cuts in that axis's colour."""
    if value.spec is None:
        return [Run(", ".join(map(str, value.shape)) or "scalar")]
    text = value.spec.text(value.shape)
    closing = text.rindex("]")
    text = (text[1:closing] or "scalar") + text[closing + 1 :]
    runs: list[Run] = []
    for size, axes, plain in re.findall(r"([\w+]*)\{([^}]*)\}|([^{}]+?(?=[\w+]*\{|$))", text):
        if plain:
            runs.append(Run(plain))
            continue
        names = axes.split(",")
        runs.append(Run(size, axis_colour(mesh, names[0]), True))
        runs.append(Run("{", FAINT))
        for i, name in enumerate(names):
            if i:
                runs.append(Run(",", FAINT))
            runs.append(Run(name, axis_colour(mesh, name), True))
        runs.append(Run("}", FAINT))
    return runs


def plain(runs: list[Run]) -> str:
    """The text of some runs without their style."""
    return "".join(run.text for run in runs)


DTYPES = {"float": "f", "bfloat": "bf", "int": "i", "uint": "u", "complex": "c"}


def stage_text(at: Sequence[int]) -> str:
    """``stage 2``, ``stages 0, 3``."""
    return f"stage{'s' * (len(at) > 1)} {', '.join(map(str, at))}"


def type_text(value: Value) -> str:
    """``f32[64{dp}, 512] +{tp}``, as in the text of a graph."""
    name = str(value.type.dtype).removeprefix("torch.")
    dtype = re.sub(r"^[a-z]+(?=\d)", lambda m: DTYPES.get(m[0], m[0]), name)
    if value.spec is None:
        return f"{dtype}[{', '.join(map(str, value.shape))}]"
    return value.spec.text(value.shape, dtype)
