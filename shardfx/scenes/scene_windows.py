"""Which windows of a scene are computed, and which rows of each are kept: all rows of the whole, each once."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from shardfx.ir.errors import Error

from .scene_rows import Rows


class Span(NamedTuple):
    """Rows ``first`` to ``first + size`` of one dim of a scene are given to the model; of what it makes of them rows
    ``kept`` are right, which are rows ``into`` of the whole result."""

    first: int
    size: int
    kept: slice
    into: slice


def spans(rows: Rows, window: int, scene: int, grid: int, dim: int) -> list[Span]:
    """The windows along one dim of a scene.

    Args:
        rows: what a window of this size gives.
        window: how many rows it has; a last one may have less, down to ``window - grid + 1``.
        scene: how many there are, which is more.
        grid: windows begin at multiples of this.
        dim: for errors.

    Raises:
        Error: of a window nothing is right that others do not give.
    """
    found, first, done = [], 0, 0
    while first + window < scene:
        base = int(first * rows.scale)
        found.append(Span(first, window, slice(done - base, rows.high), slice(done, base + rows.high)))
        done = base + rows.high
        following = int((done - rows.low) / rows.scale) // grid * grid
        if following <= first:
            raise Error(
                "the window is too small for what a place of the result is made of",
                where=f"predict_scene(window=...), dim {dim} of the scene",
                expected=f"more than {2 * int(rows.margin) + grid} rows: the margin is {int(rows.margin)} on each side",
                got=f"{window} rows",
                remedy="give larger windows, or plan for larger images",
            )
        first = following
    first = -((window - scene) // grid) * grid
    base = int(first * rows.scale)
    return [*found, Span(first, scene - first, slice(done - base, rows.whole - base), slice(done, rows.whole))]


def whole_span(scene: int) -> Span:
    """One window has all of a dim."""
    return Span(0, scene, slice(None), slice(None))


class SceneWindow(NamedTuple):
    """A window of a scene: a span of each of its last dims, and its number."""

    number: int
    spans: tuple[Span, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """How many rows it has."""
        return tuple(each.size for each in self.spans)

    @property
    def source(self) -> tuple[slice, ...]:
        """Where it lies."""
        return tuple(slice(each.first, each.first + each.size) for each in self.spans)


def all_windows(by_dim: Sequence[Sequence[Span]]) -> list[SceneWindow]:
    """The windows of a scene, row by row."""
    return [SceneWindow(number, each) for number, each in enumerate(itertools.product(*by_dim))]


def batches(windows: Sequence[SceneWindow], size: int) -> list[list[SceneWindow]]:
    """Windows of equal sizes together, so many at a time."""
    by_sizes: dict[tuple[int, ...], list[SceneWindow]] = {each.sizes: [] for each in windows}
    for each in windows:
        by_sizes[each.sizes].append(each)
    return [group[i : i + size] for group in by_sizes.values() for i in range(0, len(group), size)]
