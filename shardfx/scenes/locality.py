"""Of which rows of a scene the results of a model are made, worked out from its graph.

The model is captured twice: for a window, and for the whole scene (nothing is computed). Op by op it is followed which
rows of the window's value are those of the whole scene's, wherever the window lies, through the factors of the op's
rule and the windows through which it sees. What hangs on all rows, or on the place of the window, is not local: that is
no error until a result is made of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch

from shardfx.ir.errors import Error
from shardfx.ir.graph import Graph, InputKind, Node, OutputKind, Value, op_name
from shardfx.ir.rules.book import RuleBook
from shardfx.ir.rules.sharding_rule import Dim, ShardingRule

from .scene_rows import NotLocal, Part, Parts, Plain, Rows, as_one, joined, taken


@dataclass(frozen=True)
class Far:
    """A value that is not made of a window of the scene alone: which node made it so, and why."""

    node: Node | None
    why: str


Known = tuple[Parts, ...] | Far


@dataclass(frozen=True)
class Layer:
    """A node, and for each dim of the scene what its (first) result is of it."""

    node: Node
    rows: Mapping[int, Rows]


@dataclass(frozen=True)
class Locality:
    """What follows for a result of a model: its dims; the layers in order; and by dim of the scene on which rows a
    window may begin: on multiples of this."""

    dims: tuple[Part, ...]
    layers: Sequence[Layer]
    grid: Mapping[int, int]
    ragged: Node | None


def follow(window: Graph, whole: Graph, rules: RuleBook, axes: Iterable[int], result: str | None) -> Locality:
    """Follow some dims (``axes``) of the model's image through a model, captured for a window and for the whole scene.

    Raises:
        Error: the result of this name (None: none is asked for) is not local: the op, where it stands in the model, and
            why.
    """
    if any([*map(str, a)] != [*map(str, b)] for a, b in zip(_outline(window), _outline(whole), strict=True)):
        raise not_local(None, "it is another program for an image of the scene's size")
    known: dict[Value, Known] = {}
    for given, twin in zip(window.inputs, whole.inputs, strict=True):
        if given.kind is InputKind.SEED:
            known[given.value] = Far(None, "random numbers are drawn by their place")
            continue
        if given.constant is not None and not alike_constants(given.constant, twin.constant):
            known[given.value] = Far(None, "a number that it holds is another where the image is larger")
            continue
        sizes = zip(given.value.shape, twin.value.shape, strict=True)
        own = given.kind is InputKind.ARGUMENT
        known[given.value] = tuple(
            (Rows(dim, a, b, Fraction(1), 0, a),) if own and dim in axes else (Plain(a),)
            for dim, (a, b) in enumerate(sizes)
        )
    follower = Follower(rules, known, _more(window, whole))
    layers = []
    for node, same in zip(window.nodes, whole.nodes, strict=True):
        follower.pass_on(node, same)
        if node.outs and not isinstance(made := known[node.outs[0]], Far):
            rows = [part for parts in made for part in parts if isinstance(part, Rows)]
            layers.append(Layer(node, {part.axis: part for part in rows}))
    dims = () if result is None else _dims(window, known, result)
    return Locality(dims, layers, follower.grid, follower.ragged)


def _outline(graph: Graph) -> tuple[list[Any], list[Any]]:
    """What inputs there are, and which ops."""
    return [given.kind for given in graph.inputs], [node.op for node in graph.nodes]


def alike_constants(a: torch.Tensor, b: torch.Tensor | None) -> bool:
    """Whether two captures hold the same numbers."""
    if b is None or a.shape != b.shape:
        return False
    return a.is_meta or b.is_meta or torch.equal(a, b)


def _more(window: Graph, whole: Graph) -> dict[int, int]:
    """By how many rows the scene is larger than the window, by dim."""
    (small,), (large,) = (graph.of_kind(InputKind.ARGUMENT) for graph in (window, whole))
    return {dim: b - a for dim, (a, b) in enumerate(zip(small.value.shape, large.value.shape, strict=True))}


def _dims(graph: Graph, known: Mapping[Value, Known], name: str) -> tuple[Part, ...]:
    """What is known of each dim of a result."""
    value = next(o.value for o in graph.outputs if o.kind is OutputKind.RESULT and o.name == name)
    made = known[value]
    if isinstance(made, Far):
        raise not_local(made.node, made.why)
    try:
        return tuple(as_one(parts) or Plain(size) for parts, size in zip(made, value.shape, strict=True))
    except NotLocal as error:
        raise not_local(value.node, str(error)) from error


def not_local(node: Node | None, why: str) -> Error:
    """The error where a model does not follow from windows of a scene."""
    where = f"{node.where}  {node.where.code}".strip() if node is not None else "predict_scene(...)"
    return Error(
        f"{op_name(node.op)} is not local: it {why}" if node is not None else f"the model is not local: {why}",
        where=where,
        expected="ops that make a place of the result of places near by, so that windows of a scene will do",
        got=f"{op_name(node.op)} of an image of which a window is given" if node is not None else None,
        remedy="give the whole scene to pm(...); of norms, pm.eval() takes stored statistics",
    )


UNIFORM = ("aten.full", "aten.zeros", "aten.ones", "aten.expand")
"""What makes dims along which all is the same."""


class Follower:
    """What is known of each value, node by node."""

    def __init__(self, rules: RuleBook, known: dict[Value, Known], more: Mapping[int, int]) -> None:
        self._rules, self._known, self._more = rules, known, more
        self.grid = dict.fromkeys(more, 1)
        self.ragged: Node | None = None

    def pass_on(self, node: Node, twin: Node) -> None:
        """Find what is known of a node's results; ``twin`` is the same node for the whole scene."""
        far = next((k for value in node.operands if isinstance(k := self._known[value], Far)), None)
        if far is not None:
            self._known |= {value: Far(far.node or node, far.why) for value in node.outs}
            return
        try:
            rules = [entry.make(each) if (entry := self._rules.entry(each.op)) else None for each in (node, twin)]
            mine, theirs = rules
            if mine is None or theirs is None:
                raise NotLocal("has no rule that says of which rows its result is made")
            self._known |= self._made(node, twin, mine, theirs)
        except NotLocal as error:
            self._known |= {value: Far(node, str(error)) for value in node.outs}

    def _made(self, node: Node, twin: Node, rule: ShardingRule, whole: ShardingRule) -> dict[Value, Known]:
        operands = [known for value in node.operands if not isinstance(known := self._known[value], Far)]
        tracked = any(isinstance(part, Rows) for dims in operands for parts in dims for part in parts)
        if alike(rule) != alike(whole):
            raise NotLocal("computes something else where the image is larger")
        factors = factors_of(rule, operands)
        for factor, parts in factors.items():
            same = rule.sizes[factor] == whole.sizes[factor] or all(isinstance(p, Plain) and p.uniform for p in parts)
            if not same and not any(isinstance(part, Rows) for part in parts):
                raise NotLocal("is made for the size of the image")
        for factor, seen in rule.windows.items():
            rows = as_one(factors[factor])
            if rows is not None:
                factors[seen.leader] = (rows.seen(seen.window, whole.windows[factor].window),)
        results = [dims for dims in rule.results if dims is not None]
        found: dict[Value, Known] = {}
        for value, other, dims in zip(node.outs, twin.outs, results, strict=True):
            try:
                if tracked and rule.windows and not value.type.dtype.is_floating_point:
                    raise NotLocal("says where in the image something lies")
                found[value] = self._result(rule, dims, factors, op_name(node.op) in UNIFORM, other)
                if numbers(node) != numbers(twin):
                    raise NotLocal("computes something else where the image is larger")
            except NotLocal as error:
                found[value] = Far(node, str(error))
        return found

    def _result(
        self, rule: ShardingRule, dims: tuple[Dim, ...], factors: Mapping[str, Parts], filled: bool, whole: Value
    ) -> Known:
        there = {factor for dim in dims for factor in dim}
        for factor, parts in factors.items():
            if not any(isinstance(part, Rows) for part in parts):
                continue
            leader = rule.windows[factor].leader if factor in rule.windows else factor
            if leader not in there:
                raise NotLocal("takes all places of the image together")
            if factor in rule.whole or leader in rule.whole:
                raise NotLocal("needs all rows of the image")
        found = []
        for dim, size in zip(dims, whole.shape, strict=True):
            made: Parts = ()
            for factor in dim:
                made += factors.get(factor) or (Plain(rule.sizes[factor], filled),)
            self._check(made, size, whole)
            found.append(made)
        return tuple(found)

    def _check(self, parts: Parts, size: int, whole: Value) -> None:
        """The scene's rows are as many as follow from the window's; and note on which rows a window may begin."""
        uniform = any(isinstance(part, Plain) and part.uniform for part in parts)
        if math.prod(p.whole if isinstance(p, Rows) else p.size for p in parts) != size and not uniform:
            raise NotLocal("is made for the size of the image")
        for part in parts:
            if isinstance(part, Rows):
                if part.whole - part.size != self._more[part.axis] * part.scale:
                    self.ragged = self.ragged or whole.node
                self.grid[part.axis] = math.lcm(self.grid[part.axis], part.scale.denominator)


def factors_of(rule: ShardingRule, operands: Sequence[tuple[Parts, ...]]) -> dict[str, Parts]:
    """What is known of each factor of a rule, by the operands that have it."""
    factors: dict[str, Parts] = {}
    for dims, known in zip(rule.operands, operands, strict=True):
        for dim, parts in zip(dims, known, strict=True):
            for factor, got in zip(dim, taken(parts, rule.dim_sizes(dim)), strict=True):
                factors[factor] = joined(factors[factor], got) if factor in factors else got
    return factors


def alike(rule: ShardingRule) -> object:
    """A rule without its sizes."""
    windows = {factor: seen.leader for factor, seen in rule.windows.items()}
    return rule.operands, rule.results, rule.whole, windows, rule.reductions


def numbers(node: Node) -> list[Any]:
    """The numbers among a node's arguments that are no sizes: those that stand alone."""
    given = (*node.args, *(node.kwargs[name] for name in sorted(node.kwargs)))
    return [each for each in given if isinstance(each, (bool, int, float, str, torch.dtype))]
