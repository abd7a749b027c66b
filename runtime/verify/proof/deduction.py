"""Deduction from a rank's shards of an op's operands to those of its results, and the expected local call.

A :class:`Fact` is "this tensor is box ``spec`` of ``term``". From the facts of the operands the op's sharding rule says
which factors are sharded, and from those what the result is; what the operands do not say (an ``expand``, an
``arange``) may be any placement that the plan claims, and the shapes in the rank's own call decide. :func:`written`
gives that call, by the same functions of the rule book that the oracle executes against the op.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import fx

from shardfx.ir.dim_sharding import DimSharding, project
from shardfx.ir.errors import Error
from shardfx.ir.graph import Node, Strategy
from shardfx.ir.mesh import Mesh
from shardfx.ir.node import draw_slot
from shardfx.ir.ops.alike import alike
from shardfx.ir.ops.local_ops import row_of
from shardfx.ir.ops.traits import with_defaults
from shardfx.ir.program.devices import kernel_variants
from shardfx.ir.rules.book import RuleBook, perform, replicated
from shardfx.ir.rules.local import Emit
from shardfx.ir.rules.sharding_rule import ShardingRule
from shardfx.ir.rules.strategy import implied, strategy
from shardfx.ir.spec import Spec

from .terms import Universe, arguments

Origins = tuple[tuple[str, int], ...]
"""For each axis over which a fact is partial: the sum of which it is one rank's share, and how it was made of shares (a
number of :meth:`Deduction.origin`).

Shares add up only if they are shares of one sum, by one sharding, and came the same way: of a product ``s @ s`` one
rank's ``share @ s`` and another's ``s @ share`` are shares of two sums.
"""


@dataclass(frozen=True)
class Fact:
    """A fact: a tensor of one rank is the box ``spec`` (at the rank's coordinates) of ``term``."""

    term: int
    spec: Spec
    origins: Origins = ()

    def __hash__(self) -> int:
        return self.term


@dataclass
class Deduction:
    """Strategies by node and operand placements, cached for all ranks and for nodes that are alike."""

    universe: Universe
    book: RuleBook
    mesh: Mesh
    _kinds: dict[Node, int] = field(default_factory=dict)
    _numbers: dict[Hashable, int] = field(default_factory=dict)
    _rules: dict[int, ShardingRule] = field(default_factory=dict)
    _known: dict[tuple[int, tuple[Spec, ...]], list[Strategy]] = field(default_factory=dict)
    _shardings: dict[tuple[int, int], Mapping[str, tuple[str, DimSharding]]] = field(default_factory=dict)
    _calls: dict[tuple[int, int, int], list[Any]] = field(default_factory=dict)
    _origins: dict[Hashable, int] = field(default_factory=dict)

    def _kind(self, node: Node) -> int:
        """The class of a node: equal for nodes that are alike and have equal planned placements of results."""
        if node not in self._kinds:
            claims = tuple(self.universe.specs.get(self.universe.of[node.outs[0]], ()))
            self._kinds[node] = self._numbers.setdefault((alike(node), claims), len(self._numbers))
        return self._kinds[node]

    def rule(self, node: Node) -> ShardingRule:
        """The rule of a node; for an op without one, that every operand is needed replicated."""
        kind = self._kind(node)
        if kind not in self._rules:
            entry = self.book.entry(node.op)
            self._rules[kind] = (entry.make(node) if entry is not None else None) or replicated(node)
        return self._rules[kind]

    def strategies(self, node: Node, specs: tuple[Spec, ...]) -> list[Strategy]:
        """The strategies by which the node may be computed from operands with these placements."""
        key = (self._kind(node), specs)
        if key not in self._known:
            self._known[key] = list(self._strategies(node, specs))
        return self._known[key]

    def _projected(
        self, rule: ShardingRule, shape: Sequence[int], spec: Spec, dims: Sequence[tuple[str, ...]]
    ) -> Iterator[list[tuple[str, DimSharding]] | None]:
        """The shardings of each dim's factors by a value's placement; None where it does not shard these."""
        for size, sharding, dim in zip(shape, spec.dims, dims, strict=True):
            found = project(sharding, size, rule.dim_sizes(dim), self.mesh) if dim else None if sharding.axes else ()
            yield None if found is None else list(zip(dim, found, strict=True))

    def _strategies(self, node: Node, specs: tuple[Spec, ...]) -> Iterator[Strategy]:
        rule = self.rule(node)
        shardings: dict[str, DimSharding] = {}
        for value, spec, dims in zip(node.operands, specs, rule.operands, strict=True):
            for pairs in self._projected(rule, value.shape, spec, dims):
                if pairs is None:
                    return
                for f, sharding in pairs:
                    each = implied(rule, f, sharding, self.mesh)
                    wider = each is None and f in rule.windows  # for other rows of a leader than tiles: by the claims
                    if not wider and (each is None or shardings.setdefault(*each) != each[1]):
                        return
        partial = _partial(specs)
        if partial is None:
            return
        for free in self._free(node, rule, shardings):
            every = {f: c for f, c in (shardings | free).items() if c.axes}
            used = [(axis, f) for f, sharding in every.items() for axis in sharding.axes]
            along = dict(used)
            if len(used) != len(along) or any(
                rule.passes(kind, group, along.get(axis, "")) is None for axis, (kind, group) in partial.items()
            ):
                continue
            full = [(axis, f) for axis, f in used if f in rule.replicated and self.mesh.extent(every[f].axes) > 1]
            groups = [(f, partial[axis][1] if axis in partial else frozenset()) for axis, f in full]
            if any(rule.together(*each) is None for each in groups):
                continue
            try:
                made = strategy(rule, every, self.mesh, partial)
            except Error:  # an axis twice in one placement
                continue
            if made.operands == specs:
                yield made

    def expected_calls(self, node: Node, made: Strategy, rank: int) -> list[Any]:
        """The calls of :func:`written` for a node, with an :class:`OperandSlot` for each operand: cached for nodes that
        are alike and draw nothing."""
        key = (self._kind(node), id(made), rank)
        if draw_slot(node) is None and key in self._calls:
            return self._calls[key]
        slots = [OperandSlot(i) for i in range(len(node.operands))]
        found = self._calls[key] = list(written(node, made, slots, self.mesh, rank, self.book))
        return found

    def _sharded_factors(self, node: Node, made: Strategy) -> Mapping[str, tuple[str, DimSharding]]:
        """The factor that each axis shards, and its sharding over all of its axes.

        Which share of a sum a rank has follows from its coordinates and this sharding: shards by ``8{dp,tp}`` are not
        those by ``8{tp,dp}``, nor those by ``(2{dp} 4{tp})``.
        """
        key = (self._kind(node), id(made))  # which lives as long as this does
        if key not in self._shardings:
            rule, found = self.rule(node), dict[str, tuple[str, DimSharding]]()
            for value, spec, dims in zip(node.operands, made.operands, rule.operands, strict=True):
                for pairs in self._projected(rule, value.shape, spec, dims):
                    for each in (implied(rule, f, sharding, self.mesh) for f, sharding in pairs or ()):
                        if each is not None:
                            found.update(dict.fromkeys(each[1].axes, each))
            for factor, axes in made.shardings:  # which no operand has
                for axis in axes:
                    found.setdefault(axis, (factor, DimSharding(axes)))
            self._shardings[key] = found
        return self._shardings[key]

    def _free(
        self, node: Node, rule: ShardingRule, shardings: dict[str, DimSharding]
    ) -> Iterator[dict[str, DimSharding]]:
        """Shardings of the factors that no operand has: none, or as the plan claims of the result."""
        result, value = rule.results[0], node.outs[0]
        alone = {f for dim in result or () for f in dim} - set(shardings)
        found: list[dict[str, DimSharding]] = [{}]
        for spec in self.universe.specs.get(self.universe.of[value], ()) if alone and result is not None else ():
            dims = [*self._projected(rule, value.shape, spec, result)]  # type: ignore[arg-type]
            if all(pairs is not None or not dim for pairs, dim in zip(dims, result, strict=True)):  # type: ignore[arg-type]
                found.append({f: sharding for pairs in dims for f, sharding in pairs or () if f in alone})
        yield from (each for i, each in enumerate(found) if each not in found[:i])

    def results(self, node: Node, made: Strategy, facts: Sequence[Fact]) -> list[Fact | None]:
        """The facts of a node's results."""
        factors = self._sharded_factors(node, made)
        specs = iter(made.results)
        found: list[Fact | None] = []
        for value in node.results:
            if value is None:
                found.append(None)
                continue
            spec, term = next(specs), self.universe.of[value]
            origins = [(axis, self.origin(axis, term, factors.get(axis), facts)) for axis, _ in spec.partial]
            found.append(Fact(term, spec, tuple(origins)))
        return found

    def origin(self, axis: str, term: int, factor: tuple[str, DimSharding] | None, facts: Sequence[Fact]) -> int:
        """An identifier of the origin of shares over an axis, equal for shares that are made alike: of a sum that
        begins here, by how the summed ``factor`` is sharded, or of the operands' shares, or both."""
        shares = [(place, made) for place, fact in enumerate(facts) for a, made in fact.origins if a == axis]
        if factor is not None:
            return self._origins.setdefault((term, *factor, *shares), len(self._origins))
        if len(facts) == len(shares) == 1:
            return shares[0][1]
        return self._origins.setdefault(tuple(shares), len(self._origins))


def _partial(specs: Sequence[Spec]) -> dict[str, tuple[str, frozenset[int]]] | None:
    """Per axis the reduction and the operands that are partial over it; None where they are so by two reductions."""
    found: dict[str, tuple[str, frozenset[int]]] = {}
    for i, spec in enumerate(specs):
        for axis, kind in spec.partial:
            known = found.get(axis, (kind, frozenset()))
            if known[0] != kind:
                return None
            found[axis] = (kind, known[1] | {i})
    return found


@dataclass(frozen=True)
class ExpectedCall:
    """An expected call of a rank's program."""

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @cached_property
    def arguments(self) -> dict[str, Any]:
        """All arguments by name."""
        return normal(self.op, self.args, self.kwargs)


@dataclass
class Expected(Emit):
    """Records the calls that a rule's ``local`` function writes."""

    def call(self, op: Any, *args: Any, **kwargs: Any) -> Any:
        """The call that the rule writes, as data; one that gives its operand back is that operand."""
        row = row_of(op)
        made = row.plain(args, kwargs) if row is not None and row.plain is not None else (op, args, kwargs)
        return ExpectedCall(*made) if isinstance(made, tuple) else made


@dataclass(frozen=True)
class OperandSlot:
    """An operand of an op, by its number, where the op's calls are written for no program yet."""

    number: int


def written(
    node: Node, made: Strategy, operands: Sequence[Any], mesh: Mesh, rank: int, book: RuleBook
) -> Iterator[Any]:
    """One rank's version of a node: an :class:`ExpectedCall`, or one of the operands; and by the kernels of devices."""
    copy = Node(node.op, node.args, node.kwargs, node.results, strategy=made)
    left = iter(operands)
    args, kwargs = arguments(node, lambda _: next(left))
    share = Expected(copy, mesh, mesh.coords(rank), args, kwargs)
    call = perform(book.entry(node.op), share)
    if not isinstance(call, ExpectedCall):
        yield call
        return
    for form in kernel_variants(share, (call.op, call.args, call.kwargs)):
        yield ExpectedCall(*form)


def same(
    expected: Any,
    actual: Any,
    root: Mapping[fx.Node, fx.Node],
    operands: Sequence[fx.Node] = (),
    known: dict[tuple[int, fx.Node], bool] | None = None,
) -> bool:
    """Whether a program has a call as expected: the same op of the same operands with the same arguments.

    ``operands`` are what stands at each :class:`OperandSlot`, ``known`` the calls that were compared already.
    """
    known = {} if known is None else known
    if isinstance(expected, OperandSlot):
        expected = operands[expected.number]
    if isinstance(expected, fx.Node):
        return isinstance(actual, fx.Node) and root.get(actual, actual) is root.get(expected, expected)
    if isinstance(expected, ExpectedCall):
        if not isinstance(actual, fx.Node):
            return False
        actual = root.get(actual, actual)
        if actual.op != "call_function" or actual.target is not expected.op:
            return False
        key = id(expected), actual
        if key not in known:
            a, b = expected.arguments, normal(expected.op, actual.args, actual.kwargs)
            known[key] = a.keys() == b.keys() and all(same(a[k], b[k], root, operands, known) for k in a)
        return known[key]
    if isinstance(expected, (list, tuple)):
        if not isinstance(actual, (list, tuple)) or len(expected) != len(actual):
            return False
        return all(same(a, b, root, operands, known) for a, b in zip(expected, actual, strict=True))
    if isinstance(expected, float) and expected != expected:
        return isinstance(actual, float) and actual != actual
    return not isinstance(actual, fx.Node) and type(expected) is type(actual) and bool(expected == actual)


def normal(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments by name, defaults among them; a device is no part of what is computed."""
    if not isinstance(op, torch._ops.OpOverload):
        return {str(i): a for i, a in enumerate(args)} | dict(kwargs)
    return {name: arg for name, arg in with_defaults(op, args, kwargs).items() if name != "device"}
