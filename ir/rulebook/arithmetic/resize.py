"""Interpolation and adaptive means: a row of the result is made of a few rows of the picture, which a rank needs of a
sharded picture. Where rows are made block by block (twice as many nearest rows, means of each eight) ``h`` is ``(g a)``
of the picture and ``(g b)`` of the result, and ``g`` may be sharded."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from shardfx.ir.dim_sharding import Window
from shardfx.ir.graph import Node
from shardfx.ir.ops.computing.resized import resize_tile, resize_tile_backward
from shardfx.ir.ops.computing.tiles import adaptive_windows
from shardfx.ir.rulebook.dims import argument
from shardfx.ir.rules.binding import Shape
from shardfx.ir.rules.book import RuleEntry, rule
from shardfx.ir.rules.local import Emit
from shardfx.ir.rules.sharding_rule import ShardingRule
from shardfx.ir.rules.template import has_argument

from .spatial_dims import SpatialDim, ends, spatial, tiles

aten = torch.ops.aten

REACH = {"linear": 1, "cubic": 2}
"""How many rows before and behind its place a row is made of."""
KINDS = {
    "linear": "upsample_linear1d upsample_bilinear2d upsample_trilinear3d",
    "cubic": "upsample_bicubic2d",
    "nearest": "upsample_nearest1d upsample_nearest2d upsample_nearest3d",
    "smooth linear": "_upsample_bilinear2d_aa",
    "smooth cubic": "_upsample_bicubic2d_aa",
    "exact nearest": "_upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d",
    "mean": "_adaptive_avg_pool2d _adaptive_avg_pool3d",
}
FEW = 8
"""So many means or fewer are no rows that ranks share: they are sums of what ranks have."""


FINE = 1 << 20
"""A scale that is none of sizes is taken for a fraction of no more parts than this; rows are asked for accordingly."""


@dataclass(frozen=True)
class ResizedDim(SpatialDim):
    """A dim of ``size`` rows, of which ``places`` are made. ``told`` is how far apart two of them are where a scale was
    given that is not that of the sizes: of 21 rows 10, each two rows behind the one before."""

    kind: str
    told: float | None = None

    def words(self) -> tuple[str, str]:
        return ("(g# a#!)", "(g# b#!)") if self.apart else ("h#", "p#")

    def blocks(self) -> tuple[str, int] | None:
        return ("g#", math.gcd(self.size, self.places)) if self.apart else None

    def window(self, back: bool) -> Window | None:
        if self.apart or (back and self.size == 1):  # the gradient of one row is a sum of what ranks have
            return None
        return self.up if back else self.down

    @property
    def apart(self) -> bool:
        """Whether rows are made of blocks, each of its own block, though some blocks may have more rows."""
        if self.kind not in ("mean", "nearest", "exact nearest") or self.told is not None:
            return False
        few = self.kind == "mean" and self.places <= FEW
        return few or math.gcd(self.size, self.places) in (self.size, self.places)

    @property
    def step(self) -> float:
        """How far the places of two rows of the result are apart."""
        if self.kind.startswith("aligned"):
            return (self.size - 1) / (self.places - 1) if self.places > 1 else 0.0
        return self.size / self.places if self.told is None else self.told

    @property
    def _ratio(self) -> tuple[int, int, int]:
        """The step as a fraction, and by how many rows more on both sides one asks where that is not all of it."""
        if self.told is None:
            return self.size, self.places, 0
        near = Fraction(self.told).limit_denominator(FINE)
        return near.numerator, near.denominator, int(abs(float(near) - self.told) > 1e-12 * self.told)

    @property
    def down(self) -> Window:
        """The rows of the picture that a row of the result is made of."""
        if self.kind == "mean":
            return Window(self.places, self.size, self.places, 0, self.size - 1)
        step, rows, more = self._ratio
        if self.kind.endswith("nearest"):
            half, near = self._half(step), self._near(rows)
            return Window(self.places, step, rows, half - near, half + near)
        if self.kind.startswith("smooth"):
            reach = 2 * self._smooth + 2 * more * rows - rows
            return Window(self.places, 2 * step, 2 * rows, step - reach, step + reach)
        reach = REACH[self.kind.split()[-1]] + more
        before, behind = 1 - reach, reach
        if self.kind.startswith("aligned"):
            per = self.places - 1
            if per == 0:
                return Window(self.places, 0, 1, before, behind)
            return Window(self.places, self.size - 1, per, before * per, behind * per)
        per, half = 2 * rows, step - rows
        return Window(self.places, 2 * step, per, half + before * per, half + behind * per)

    @property
    def up(self) -> Window:
        """The rows of the result that a row of the picture is a part of: of places less than ``reach`` away."""
        if self.kind == "mean":
            return Window(self.size, self.places, self.size, 0, self.places - 1)
        step, rows, more = self._ratio
        if self.kind.endswith("nearest"):
            return Window(self.size, rows, step, -self._half(rows) - step, rows + step)
        far = REACH[self.kind.split()[-1]]
        if self.kind.startswith("aligned"):
            per, times = self.size - 1, self.places - 1
            if per == 0:
                return Window(self.size, 0, 1, 0, self.places - 1)
            return Window(self.size, times, per, -far * times, far * times)
        wide = self._smooth if self.kind.startswith("smooth") else far * rows
        per, half, reach = 2 * step, rows - step, 2 * wide + 2 * more * step
        return Window(self.size, 2 * rows, per, half - reach, half + reach)

    @property
    def _smooth(self) -> int:
        """How far a row is smoothed over, as many parts of a row as places have: over more where there are fewer."""
        step, rows, _ = self._ratio
        return REACH[self.kind.split()[-1]] * max(step, rows)

    def _half(self, step: int) -> int:
        return step // 2 if self.kind.startswith("exact") else 0

    def _near(self, row: int) -> int:
        """Kernels round places: by less than a part of a row, and by less than one row of large pictures."""
        return 1 if self.size * self.places < 1 << 22 else row


def kind_of(node: Node) -> str:
    """``linear``, ``aligned cubic``: which rows, with which weights."""
    name = str(node.op)
    for kind, names in KINDS.items():
        if any(f".{each}." in name or f".{each}_backward." in name for each in names.split()):
            aligned = has_argument(node.op, "align_corners") and argument(node, "align_corners")
            return f"aligned {kind}" if aligned else kind
    raise AssertionError(name)


def resized(node: Node, x: Shape, y: Shape) -> Sequence[SpatialDim]:
    """How the last dims of an image become those of another; whole, where a scale that is not that of the sizes gives
    as many rows as there are, or nearest ones that are between two: kernels take that in ways of their own. So they do
    of smoothed corners that are aligned."""
    whole = [SpatialDim(*each) for each in zip(x, y, strict=True)]
    kind, space = kind_of(node), len(x)
    if kind.startswith("aligned smooth"):
        return whole
    scales: list[float | None] = [None] * space
    if kind != "mean":
        named = ("scales",) if space == 1 else ("scales_d", "scales_h", "scales_w")[-space:]
        scales = [argument(node, name) for name in named]
    found = []
    for a, b, scale in zip(x, y, scales, strict=True):
        exact = scale is None or kind.startswith("aligned") or scale * a == b
        if exact and (scale is None or not kind.endswith("nearest") or 1 / scale == a / b):
            found.append(ResizedDim(a, b, kind))
            continue
        assert scale is not None
        step = 1 / scale
        near = kind.endswith("nearest") and (b == 2 * a or step * 1024 % 1)
        if b == a or near or step * b > a * (1 + 1e-9):
            return whole
        found.append(ResizedDim(a, b, kind, step))
    return found


def forward(node: Node) -> ShardingRule:
    """``x[n.. h..] -> y[n.. p..]``, h as p needs it."""
    return spatial(node, resized(node, *ends(node)), "X -> Y", "0")


def backward(node: Node) -> ShardingRule:
    """``gy[n.. p..] -> gx[n.. h..]``, p as h needs it."""
    dims, beside = resized(node, *ends(node, back=True)), len(node.operands) > 1
    known = beside and any(type(each) is ResizedDim for each in dims)
    return spatial(node, dims, "Y, X -> X" if known else "Y -> X", "0|1>" if known else "0", back=True)


def forward_rows(emit: Emit, args: tuple[Any, ...], leaders: frozenset[str]) -> Any:
    """A rank's rows of the result, of the rows of the image that they are made of."""
    (held, made), (x, y) = tiles(emit), ends(emit.node)
    steps, kind = _steps(emit.node, x, y), kind_of(emit.node)
    return emit.call(resize_tile, args[0], held.at, list(x), made.at, made.lengths, steps, kind)


def backward_rows(emit: Emit, args: tuple[Any, ...], leaders: frozenset[str]) -> Any:
    """A rank's rows of the image's gradient, of the rows of the result that they are a part of."""
    (held, made), (x, y) = tiles(emit), ends(emit.node, back=True)
    beside = args[1:2] if len(emit.node.operands) > 1 else ()
    options = (made.at, list(x), made.lengths, held.at, _steps(emit.node, x, y), kind_of(emit.node))
    return emit.call(resize_tile_backward, args[0], *options, *beside)


def _steps(node: Node, x: Shape, y: Shape) -> list[float]:
    return [each.step for each in resized(node, x, y) if isinstance(each, ResizedDim)]


def mean(x: Tensor, size: Sequence[int]) -> Tensor:
    """Adaptive means as sums for each dim, of which each rank may have a part. They are no products with a matrix: what
    lies beside a window may be inf, and zero times that is NaN."""
    for dim, places in enumerate(size, -len(size)):
        inside, lengths = windows_of(x.shape[dim], places, x.device)
        held = x.transpose(dim, -1).unsqueeze(-2)
        x = (torch.where(inside, held, 0.0).sum(-1) / lengths).transpose(dim, -1)
    return x


def mean_backward(space: int) -> Callable[[Tensor, Tensor], Tensor]:
    """The gradient of :func:`mean`, of so many dims."""

    def expand(grad: Tensor, x: Tensor) -> Tensor:
        for dim in range(-space, 0):
            inside, lengths = windows_of(x.shape[dim], grad.shape[dim], grad.device)
            held = (grad.transpose(dim, -1) / lengths).unsqueeze(-1)
            grad = torch.where(inside, held, 0.0).sum(-2).transpose(dim, -1)
        return grad

    return expand


def windows_of(size: int, places: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Which rows are in each window, ``[places, size]``, and how many."""
    row, place = torch.arange(size, device=device), torch.arange(places, device=device).unsqueeze(1)
    start, end = adaptive_windows(size, places, place)
    return (row >= start) & (row < end), (end - start).squeeze(1)


def entries(name: str, kind: str) -> Iterator[RuleEntry]:
    """The rules of one op and of its backward."""
    space = next(n for n in (1, 2, 3) if f"{n}d" in name)
    follow, averages = {"output_size": f"(g b p)*{space}"}, kind == "mean"
    op, back = getattr(aten, name).default, getattr(aten, f"{name}_backward").default
    yield rule(op, forward, sized=follow, rows=forward_rows, expand=mean if averages else False)
    if averages:
        yield rule(back, backward, rows=backward_rows, expand=mean_backward(space))
    else:
        yield rule(back, backward, sized=follow, shape_arg=2, rows=backward_rows)


RULES: tuple[RuleEntry, ...] = (
    *(entry for kind, names in KINDS.items() for name in names.split() for entry in entries(name, kind)),
)
