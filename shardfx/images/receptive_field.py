"""The rows of a scene that the results of a model depend on, derived from its graph.

The model is captured twice: for a window, and for the full scene (nothing is computed). Op by op, through the factors
of the op's rule and its windows, the rows of the window's value are followed that equal those of the full scene's,
wherever the window lies. What depends on all rows, or on the position of the window, is not local: that is no error
until a result depends on it.

args.0      64 rows of 1000            1 for each row of the scene, all of them valid
conv 3      64 rows of 1000            1, rows 1 to 62 valid: the others would see beyond the window
pool 2      32 rows of 500             1/2, rows 1 to 30 valid
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from shardfx.ir.dim_sharding import Window
from shardfx.ir.errors import Error
from shardfx.ir.graph import Graph, InputKind, Node, OutputKind, Value, op_name
from shardfx.ir.rules.book import RuleBook
from shardfx.ir.rules.sharding_rule import Dim, ShardingRule
from shardfx.module.planned_module import input_value

if TYPE_CHECKING:
    from shardfx.module.parallel_module import ParallelModule
    from shardfx.visualize import LayerMargin

LARGE = (4, 8)
"""The factors over the plan's image size at which margins are derived, so that none is truncated."""
UNIFORM = ("aten.full", "aten.zeros", "aten.ones", "aten.expand")
"""Ops that make dims along which all elements are equal."""


class NotLocal(Exception):
    """Rows that do not follow from a window of the scene: why, in words."""


class SceneRows(NamedTuple):
    """A (sub-)dim that follows a dim of the scene: ``scale`` rows for each of the scene's. Of its ``size`` rows, those
    from ``low`` to ``high`` (exclusive) equal those of the full scene, which has ``full``, wherever the window
    lies."""

    axis: int
    size: int
    full: int
    scale: Fraction
    low: int
    high: int

    def split(self, size: int) -> tuple[SceneRows, OtherDim]:
        """``size`` blocks, and the rows in each."""
        per = self.size // size
        if self.full % per:
            raise NotLocal("groups rows, and the scene's rows are no multiple of a group")
        low, high = -(-self.low // per), self.high // per
        return SceneRows(self.axis, size, self.full // per, self.scale / per, low, high), OtherDim(per)

    def times(self, per: int) -> SceneRows:
        """``per`` rows in the place of each."""
        more = (self.size * per, self.full * per, self.scale * per, self.low * per, self.high * per)
        return SceneRows(self.axis, *more)

    def seen(self, window: Window, full: Window) -> SceneRows:
        """The rows of another dim that are made of these through a window; ``full`` is that of the full scene."""
        if window.step < 0:
            raise NotLocal("flips the image, the last row to the front")
        steps = [tuple(Fraction(each, w.per) for each in (w.step, w.low, w.high)) for w in (window, full)]
        if steps[0] != steps[1] or window.step == 0:
            raise NotLocal("makes rows of others, in a larger image: its scale is that of the sizes")
        step, per, size = window.step, window.per, window.size
        low = bisect_left(range(size), self.low, key=lambda o: (step * o + window.low) // per)
        high = bisect_left(range(size), self.high, key=lambda o: (step * o + window.high) // per)
        return SceneRows(self.axis, size, full.size, self.scale * per / step, low, high)

    def both(self, other: SceneRows) -> SceneRows:
        """The valid rows of an op on two values, row by row; NotLocal where they are rows of other positions."""
        if (self.axis, self.size, self.full, self.scale) != (other.axis, other.size, other.full, other.scale):
            raise NotLocal("combines rows of different positions of the scene")
        return self._replace(low=max(self.low, other.low), high=min(self.high, other.high))

    @property
    def margin(self) -> Fraction:
        """The number of rows of the scene, at the larger of its two sides, that are not valid in the window."""
        return max(Fraction(self.low), Fraction(self.size - self.high)) / self.scale


class OtherDim(NamedTuple):
    """A (sub-)dim that does not follow the scene; ``uniform``: along it all elements are equal."""

    size: int
    uniform: bool = False

    def split(self, size: int) -> tuple[OtherDim, OtherDim]:
        """``size`` blocks, and the elements in each."""
        return OtherDim(size, self.uniform), OtherDim(self.size // size, self.uniform)


Part = SceneRows | OtherDim
Parts = tuple[Part, ...]


@dataclass(frozen=True)
class NonLocalValue:
    """A value that depends on more than a window of the scene: the node that made it so, and why."""

    node: Node | None
    why: str


Known = tuple[Parts, ...] | NonLocalValue


class LayerRows(NamedTuple):
    """The rows of a node's (first) result, for each dim of the scene."""

    node: Node
    rows: Mapping[int, SceneRows]


class Locality(NamedTuple):
    """The locality of a model's result: its dims; the layers in order; and by dim of the scene the grid on which
    windows may begin."""

    dims: tuple[Part, ...]
    layers: Sequence[LayerRows]
    grid: Mapping[int, int]
    ragged: Node | None


def follow(window: Graph, entire: Graph, rules: RuleBook, axes: Collection[int], result: str | None) -> Locality:
    """Follow some dims (``axes``) of the image through a model, captured for a window and for the full scene.

    Raises:
        Error: the result of this name (None: none is asked for) is not local: the op, where it stands in the model, and
            why.
    """
    programs = [([i.kind for i in graph.inputs], [str(node.op) for node in graph.nodes]) for graph in (window, entire)]
    if programs[0] != programs[1]:
        raise not_local(None, "it is another program for an image of the scene's size")
    known: dict[Value, Known] = {}
    for inp, twin in zip(window.inputs, entire.inputs, strict=True):
        if inp.kind is InputKind.SEED:
            known[inp.value] = NonLocalValue(None, "random numbers are drawn by position")
            continue
        a, b = inp.constant, twin.constant
        if a is not None and (b is None or a.shape != b.shape or not (a.is_meta or b.is_meta or torch.equal(a, b))):
            known[inp.value] = NonLocalValue(None, "one of its constants differs in a larger image")
            continue
        followed = axes if inp.kind is InputKind.ARGUMENT else ()
        known[inp.value] = tuple(
            (SceneRows(dim, size, full, Fraction(1), 0, size),) if dim in followed else (OtherDim(size),)
            for dim, (size, full) in enumerate(zip(inp.value.shape, twin.value.shape, strict=True))
        )
    (small,), (large,) = (graph.of_kind(InputKind.ARGUMENT) for graph in (window, entire))
    more = {dim: b - a for dim, (a, b) in enumerate(zip(small.value.shape, large.value.shape, strict=True))}
    follower = _Follower(rules, known, more)
    layers = []
    for node, same in zip(window.nodes, entire.nodes, strict=True):
        follower.visit(node, same)
        if node.outs and not isinstance(made := known[node.outs[0]], NonLocalValue):
            rows = [part for parts in made for part in parts if isinstance(part, SceneRows)]
            layers.append(LayerRows(node, {part.axis: part for part in rows}))
    return Locality(_dims(window, known, result) if result else (), layers, follower.grid, follower.ragged)


def _dims(graph: Graph, known: Mapping[Value, Known], name: str) -> tuple[Part, ...]:
    """The facts about each dim of a result."""
    value = next(o.value for o in graph.outputs if o.kind is OutputKind.RESULT and o.name == name)
    made = known[value]
    if isinstance(made, NonLocalValue):
        raise not_local(made.node, made.why)
    try:
        return tuple(_as_one(parts) or OtherDim(size) for parts, size in zip(made, value.shape, strict=True))
    except NotLocal as error:
        raise not_local(value.node, str(error)) from error


def not_local(node: Node | None, why: str) -> Error:
    """The error where a model does not follow from windows of a scene."""
    where = f"{node.where}  {node.where.code}".strip() if node is not None else "predict_scene(...)"
    return Error(
        f"{op_name(node.op)} is not local: it {why}" if node is not None else f"the model is not local: {why}",
        where=where,
        expected="ops whose result at a position depends on positions near by, so that windows of a scene suffice",
        got=f"{op_name(node.op)} of an image of which a window is given" if node is not None else None,
        remedy="give the full scene to pm(...); of norms, pm.eval() takes stored statistics",
    )


class _Follower:
    """Follows the dims of a scene through a graph, node by node."""

    def __init__(self, rules: RuleBook, known: dict[Value, Known], more: Mapping[int, int]) -> None:
        self._rules, self._known, self._more = rules, known, more
        self.grid = dict.fromkeys(more, 1)
        self.ragged: Node | None = None

    def visit(self, node: Node, twin: Node) -> None:
        """Derive the facts about a node's results; ``twin`` is the same node for the full scene."""
        far = next((k for value in node.operands if isinstance(k := self._known[value], NonLocalValue)), None)
        if far is not None:
            self._known |= {value: NonLocalValue(far.node or node, far.why) for value in node.outs}
            return
        try:
            mine, theirs = (
                entry.make(each) if (entry := self._rules.entry(each.op)) else None for each in (node, twin)
            )
            if mine is None or theirs is None:
                raise NotLocal("has no rule that says which rows its result is made of")
            self._known |= self._results(node, twin, mine, theirs)
        except NotLocal as error:
            self._known |= {value: NonLocalValue(node, str(error)) for value in node.outs}

    def _results(self, node: Node, twin: Node, rule: ShardingRule, full: ShardingRule) -> dict[Value, Known]:
        operands = [known for value in node.operands if not isinstance(known := self._known[value], NonLocalValue)]
        tracked = any(isinstance(part, SceneRows) for dims in operands for parts in dims for part in parts)
        leaders = [{factor: seen.leader for factor, seen in each.windows.items()} for each in (rule, full)]
        names = ("operands", "results", "replicated", "reduce")
        same = all(getattr(rule, name) == getattr(full, name) for name in names)
        if not same or leaders[0] != leaders[1]:
            raise NotLocal("computes something else where the image is larger")
        factors = _factors(rule, operands)
        for factor, parts in factors.items():
            same = rule.sizes[factor] == full.sizes[factor] or _uniform(parts)
            if not same and not any(isinstance(part, SceneRows) for part in parts):
                raise NotLocal("is made for the size of the image")
        for factor, seen in rule.windows.items():
            if rows := _as_one(factors[factor]):
                factors[seen.leader] = (rows.seen(seen.window, full.windows[factor].window),)
        results = [dims for dims in rule.results if dims is not None]
        found: dict[Value, Known] = {}
        for value, other, dims in zip(node.outs, twin.outs, results, strict=True):
            try:
                if tracked and rule.windows and not value.type.dtype.is_floating_point:
                    raise NotLocal("gives positions in the image")
                found[value] = self._result(rule, dims, factors, op_name(node.op) in UNIFORM, other)
                if _scalars(node) != _scalars(twin):
                    raise NotLocal("computes something else where the image is larger")
            except NotLocal as error:
                found[value] = NonLocalValue(node, str(error))
        return found

    def _result(
        self, rule: ShardingRule, dims: tuple[Dim, ...], factors: Mapping[str, Parts], filled: bool, full: Value
    ) -> Known:
        there = {factor for dim in dims for factor in dim}
        for factor, parts in factors.items():
            if not any(isinstance(part, SceneRows) for part in parts):
                continue
            leader = rule.windows[factor].leader if factor in rule.windows else factor
            if leader not in there:
                raise NotLocal("combines all positions of the image")
            if factor in rule.replicated or leader in rule.replicated:
                raise NotLocal("needs all rows of the image")
        found = []
        for dim, size in zip(dims, full.shape, strict=True):
            made: Parts = ()
            for factor in dim:
                made += factors.get(factor) or (OtherDim(rule.sizes[factor], filled),)
            self._check(made, size, full)
            found.append(made)
        return tuple(found)

    def _check(self, parts: Parts, size: int, full: Value) -> None:
        """The scene's rows must be as many as follow from the window's; and note the grid on which windows may
        begin."""
        uniform = any(isinstance(part, OtherDim) and part.uniform for part in parts)
        if math.prod(p.full if isinstance(p, SceneRows) else p.size for p in parts) != size and not uniform:
            raise NotLocal("is made for the size of the image")
        for part in parts:
            if isinstance(part, SceneRows):
                if part.full - part.size != self._more[part.axis] * part.scale:
                    self.ragged = self.ragged or full.node
                self.grid[part.axis] = math.lcm(self.grid[part.axis], part.scale.denominator)


def _factors(rule: ShardingRule, operands: Sequence[tuple[Parts, ...]]) -> dict[str, Parts]:
    """The facts about each factor of a rule, by the operands that have it."""
    factors: dict[str, Parts] = {}
    for dims, known in zip(rule.operands, operands, strict=True):
        for dim, parts in zip(dims, known, strict=True):
            for factor, got in zip(dim, _distributed(parts, rule.dim_sizes(dim)), strict=True):
                factors[factor] = _joined(factors[factor], got) if factor in factors else got
    return factors


def _scalars(node: Node) -> list[Any]:
    """The scalars among a node's arguments that are no sizes: those that stand alone."""
    args = (*node.args, *(node.kwargs[name] for name in sorted(node.kwargs)))
    return [each for each in args if isinstance(each, (bool, int, float, str, torch.dtype))]


def _uniform(parts: Parts) -> bool:
    return all(isinstance(part, OtherDim) and part.uniform for part in parts)


def _distributed(parts: Sequence[Part], sizes: Sequence[int]) -> list[Parts]:
    """The parts of a dim, distributed among sub-dims of these sizes, major first; NotLocal where they do not nest."""
    left: list[Part] = []
    for each in parts:  # adjacent dims that do not follow the scene are one
        if isinstance(each, OtherDim) and left and isinstance(last := left[-1], OtherDim):
            left[-1] = OtherDim(last.size * each.size, last.uniform and each.uniform)
        elif isinstance(each, SceneRows) or each.size != 1:
            left.append(each)
    found = []
    for size in sizes:
        got: list[Part] = []
        while size > 1:
            if not left:
                raise NotLocal("reshapes the image")
            part = left.pop(0)
            if size % part.size == 0:
                got.append(part)
                size //= part.size
            elif part.size % size == 0:
                head, rest = part.split(size)
                got.append(head)
                left.insert(0, rest)
                size = 1
            else:
                raise NotLocal("reshapes the image")
        found.append(tuple(got))
    if any(isinstance(part, SceneRows) for part in left):
        raise NotLocal("has one row, where the full scene has more: the window is too small for it")
    return found


def _as_one(parts: Parts) -> SceneRows | None:
    """Parts that are rows of the scene, with the dims in each, as one dim; None where none of them is."""
    if not any(isinstance(part, SceneRows) for part in parts):
        return None
    first, *rest = parts
    if not isinstance(first, SceneRows) or any(isinstance(part, SceneRows) for part in rest):
        raise NotLocal("has rows of the scene within something else")
    return first.times(math.prod(part.size for part in rest))


def _joined(a: Parts, b: Parts) -> Parts:
    """The facts about a sub-dim that two operands share; NotLocal where one has a value for each row."""
    if _uniform(b):
        return a
    if _uniform(a):
        return b
    if not any(isinstance(part, SceneRows) for part in (*a, *b)):
        return a
    if len(a) != len(b):
        one, other = _as_one(a), _as_one(b)
        if one is None or other is None:
            raise NotLocal("has a value of its own for each position in the image")
        return (one.both(other),)
    found: list[Part] = []
    for x, y in zip(a, b, strict=True):
        if isinstance(x, SceneRows) != isinstance(y, SceneRows) or x.size != y.size:
            raise NotLocal("has a value of its own for each position in the image")
        found.append(x.both(y) if isinstance(x, SceneRows) and isinstance(y, SceneRows) else x)
    return tuple(found)


# ---- margins by layer, and the picture of tiles ------------------------------------------------------------------


def draw_tiles(pm: ParallelModule, path: str | Path, name: str = "args.0") -> Path:
    """Draw tiles and halos on the image as one SVG file: each rank's tile, the messages of each halo exchange with
    their bytes, and the receptive field of each layer. ::

        sx.images.draw_tiles(pm, "out/tiles.svg")

    Args:
        pm: a plan that shards an image.
        path: where to write the file; its folder is made.
        name: the sharded input.

    Raises:
        Error: there is no such input, or none of its dims behind the second one is sharded.
    """
    from shardfx.visualize import draw_tiles as draw

    value = input_value(pm.planned, name, "draw_tiles(pm, path, name)")
    if value.spec is None or not any(dim.axes for dim in value.spec.dims[2:]):
        raise Error(
            f"{name} is not sharded into tiles",
            where=f"draw_tiles(pm, path, {name!r})",
            expected='height or width sharded, such as Hints(specs={"args.0": "-, -, h, w"})',
            got=value.spec.text(value.shape) if value.spec is not None else "no placement",
            remedy="pm.draw(folder) draws other plans",
        )
    return draw(pm.planned, name, layer_margins(pm), path)


def layer_margins(pm: ParallelModule, name: str = "args.0") -> list[LayerMargin]:
    """The rows of the image, on each side, that a position of each layer depends on: where that changes, layer by
    layer, up to the first that takes the full image."""
    from shardfx.visualize import LayerMargin

    image = input_value(pm.planned, name, "layer_margins(pm, name)")
    space = range(2, image.type.ndim)
    try:
        window, full = (
            pm._traced(torch.empty((1, image.shape[1], *sizes), dtype=image.type.dtype, device="meta"))
            for sizes in ([size * by for size in image.shape[2:]] for by in LARGE)
        )
        found = follow(window, full, pm._rule_book, space, None)
    except Error as error:
        return [LayerMargin(error.where or "the model", 0.0, f"not known: {error.what}")]
    made: list[LayerMargin] = []
    for layer in found.layers:
        rows = max((float(each.margin) for each in layer.rows.values()), default=None)
        if rows is not None and (not made or rows != made[-1].rows):
            made.append(LayerMargin(_named(layer), rows))
    local = {each.node for each in found.layers}
    first = next((node for node in window.nodes if node.outs and node not in local), None)
    if first is not None:
        made.append(LayerMargin(first.where.module or op_name(first.op), 0.0, "the full image"))
    return made


def _named(layer: LayerRows) -> str:
    where = layer.node.where
    return where.module or f"{where} {op_name(layer.node.op).removeprefix('aten.')}"
