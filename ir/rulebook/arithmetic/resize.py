"""Interpolation: a row of the result is made of a few rows of the picture, which a rank needs of a cut picture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from shardfx.ir.cut import Window
from shardfx.ir.graph import Node
from shardfx.ir.ops.computing.resized import resize_tile, resize_tile_backward
from shardfx.ir.rulebook.dims import argument, ops
from shardfx.ir.rules.binding import Shape
from shardfx.ir.rules.book import RuleEntry, rule
from shardfx.ir.rules.local import Emit
from shardfx.ir.rules.schema import has_argument
from shardfx.ir.rules.sharding_rule import ShardingRule
from shardfx.ir.rules.template import template
from shardfx.ir.rules.windows import seeing

from .pool import tile

REACH = {"linear": 1, "cubic": 2}
"""How many rows before and behind its place a row is made of."""
SIZES = {
    1: "upsample_linear1d",
    2: "upsample_bilinear2d upsample_bicubic2d",
    3: "upsample_trilinear3d",
}
ANTIALIASED = "_upsample_bilinear2d_aa _upsample_bicubic2d_aa"


class Resized(NamedTuple):
    """One dim of ``size`` rows, of which ``places`` are made, ``reach`` of them before and behind each place."""

    size: int
    places: int
    reach: int
    aligned: bool

    @property
    def step(self) -> float:
        """How far the places of two rows of the result are apart."""
        if self.aligned:
            return (self.size - 1) / (self.places - 1) if self.places > 1 else 0.0
        return self.size / self.places

    @property
    def down(self) -> Window:
        """The rows of the picture that a row of the result is made of."""
        before, behind = 1 - self.reach, self.reach
        if self.aligned:
            per = self.places - 1
            if per == 0:
                return Window(self.places, 0, 1, before, behind)
            return Window(self.places, self.size - 1, per, before * per, behind * per)
        per, half = 2 * self.places, self.size - self.places
        return Window(self.places, 2 * self.size, per, half + before * per, half + behind * per)

    @property
    def up(self) -> Window:
        """The rows of the result that a row of the picture is a part of: of places less than ``reach`` away."""
        far = self.reach
        if self.aligned:
            per, step = self.size - 1, self.places - 1
            if per == 0:
                return Window(self.size, 0, 1, 0, self.places - 1)
            return Window(self.size, step, per, -far * step, far * step)
        per, half = 2 * self.size, self.places - self.size
        return Window(self.size, 2 * self.places, per, half - far * 2 * self.places, half + far * 2 * self.places)


def kind_of(node: Node) -> str:
    """``linear``, ``aligned cubic``: which rows, with which weights."""
    aligned = has_argument(node.op, "align_corners") and argument(node, "align_corners")
    return ("aligned " if aligned else "") + ("cubic" if "cubic" in str(node.op) else "linear")


def resized(node: Node, x: Shape, y: Shape) -> list[Resized] | None:
    """How the last dims of a picture become those of another; None where the scale is not that of the sizes."""
    kind, space = kind_of(node), len(x)
    named = ("scales",) if space == 1 else ("scales_d", "scales_h", "scales_w")[-space:]
    scales = [argument(node, name) for name in named]
    aligned = kind.startswith("aligned")
    if not aligned and any(s is not None and s * a != b for a, b, s in zip(x, y, scales, strict=True)):
        return None
    return [Resized(a, b, REACH[kind.split()[-1]], aligned) for a, b in zip(x, y, strict=True)]


def forward(node: Node) -> ShardingRule:
    """``x[n.. h..] -> y[n.. p..]``, h as p needs it."""
    space = node.operands[0].type.ndim - 2
    found = resized(node, node.operands[0].shape[2:], node.outs[0].shape[2:])
    mark = "!" if found is None else ""
    made = template(f"n.. h*{space}{mark} -> n.. p*{space}{mark}", "0")(node)
    return seeing(made, {f"h{i}": (f"p{i}", each.down) for i, each in enumerate(found or ())})


def backward(node: Node) -> ShardingRule:
    """``gy[n.. p..] -> gx[n.. h..]``, p as h needs it."""
    space = node.operands[0].type.ndim - 2
    found = resized(node, node.outs[0].shape[2:], node.operands[0].shape[2:])
    mark = "!" if found is None else ""
    made = template(f"n.. p*{space}{mark} -> n.. h*{space}{mark}", "0")(node)
    return seeing(made, {f"p{i}": (f"h{i}", each.up) for i, each in enumerate(found or ())})


def forward_rows(emit: Emit, args: tuple[Any, ...], leaders: frozenset[str]) -> Any:
    """A rank's rows of the result, of the rows of the picture that they are made of."""
    x, y = emit.node.operands[0], emit.node.outs[0]
    space = x.type.ndim - 2
    held, made = tile(emit.operand_bounds, 0, x, space), tile(emit.result_bounds, 0, y, space)
    size, steps = list(x.shape[2:]), _steps(emit.node, x.shape[2:], y.shape[2:])
    return emit.call(resize_tile, args[0], held.at, size, made.at, made.lengths, steps, kind_of(emit.node))


def backward_rows(emit: Emit, args: tuple[Any, ...], leaders: frozenset[str]) -> Any:
    """A rank's rows of the picture's gradient, of the rows of the result that they are a part of."""
    y, x = emit.node.operands[0], emit.node.outs[0]
    space = x.type.ndim - 2
    held, made = tile(emit.operand_bounds, 0, y, space), tile(emit.result_bounds, 0, x, space)
    size, steps = list(x.shape[2:]), _steps(emit.node, x.shape[2:], y.shape[2:])
    return emit.call(resize_tile_backward, args[0], made.at, size, made.lengths, held.at, steps, kind_of(emit.node))


def _steps(node: Node, x: Sequence[int], y: Sequence[int]) -> list[float]:
    found = resized(node, tuple(x), tuple(y))
    assert found is not None
    return [each.step for each in found]


RULES: tuple[RuleEntry, ...] = (
    *(rule(ops(names), forward, rows=forward_rows) for names in SIZES.values()),
    *(
        rule(ops(f"{name}_backward"), backward, shape_arg=2, rows=backward_rows)
        for names in SIZES.values()
        for name in names.split()
    ),
    rule(ops(ANTIALIASED), "n.. h*2! -> n.. p*2!", linear="0"),
    *(rule(ops(f"{name}_backward"), "n.. p*2! -> n.. h*2!", linear="0", shape_arg=2) for name in ANTIALIASED.split()),
)
