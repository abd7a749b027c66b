"""From what a rank holds of an op's operands to what it holds of its results, and how its own call then reads.

A :class:`Fact` is "this tensor is box ``spec`` of ``term``". From the facts of the operands the op's sharding rule says
which factors are sharded, and from those what the result is; what the operands do not say (an ``expand``, an
``arange``) may
be any placement that the plan claims, and the shapes in the rank's own call decide. :func:`written` gives that call, by
the same functions of the rule book that the oracle executes against the whole op.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import fx

from shardfx.ir.dim_sharding import DimSharding, project
from shardfx.ir.errors import Error
from shardfx.ir.graph import Node, Strategy, Value, substitute
from shardfx.ir.mesh import Mesh
from shardfx.ir.ops.alike import alike
from shardfx.ir.ops.local_ops import row_of
from shardfx.ir.ops.traits import draw_slot, with_defaults
from shardfx.ir.program.devices import kernel_forms
from shardfx.ir.rules.book import RuleBook, perform, replicated
from shardfx.ir.rules.local import Share
from shardfx.ir.rules.sharding_rule import ShardingRule
from shardfx.ir.rules.strategy import implied, strategy
from shardfx.ir.spec import Spec

from .terms import Universe

Origins = tuple[tuple[str, int], ...]
"""For each axis over which a fact is partial: of which sum this is one rank's share, and how it was made of shares
(a number of :meth:`Deduction.origin`).

Shares add up to the whole only if they are shares of one sum, pieces of one sharding, and came the same way: of a
product ``s @ s`` one rank's ``share @ s`` and another's ``s @ share`` are shares of two sums.
"""


@dataclass(frozen=True)
class Fact:
    """A tensor of one rank is the box ``spec`` (at the rank's coordinates) of ``term``."""

    term: int
    spec: Spec
    origins: Origins = ()


@dataclass
class Deduction:
    """Strategies by node and operand placements, each made once for all ranks, and once for nodes that are alike."""

    universe: Universe
    book: RuleBook
    mesh: Mesh
    _kinds: dict[Node, int] = field(default_factory=dict)
    _numbers: dict[Hashable, int] = field(default_factory=dict)
    _rules: dict[int, ShardingRule] = field(default_factory=dict)
    _known: dict[tuple[int, tuple[Spec, ...]], list[Strategy]] = field(default_factory=dict)
    _sharding: dict[tuple[int, int], Mapping[str, tuple[str, DimSharding]]] = field(default_factory=dict)
    _forms: dict[tuple[int, int, int], list[Any]] = field(default_factory=dict)
    _origins: dict[Hashable, int] = field(default_factory=dict)

    def _kind(self, node: Node) -> int:
        """The same number for nodes that are alike, and of whose result the plan claims the same."""
        if node not in self._kinds:
            claims = tuple(self.universe.specs.get(self.universe.of[node.outs[0]], ()))
            self._kinds[node] = self._numbers.setdefault((alike(node), claims), len(self._numbers))
        return self._kinds[node]

    def rule(self, node: Node) -> ShardingRule:
        """The rule of a node; for an op without one, that every operand is needed whole."""
        kind = self._kind(node)
        if kind not in self._rules:
            entry = self.book.entry(node.op)
            self._rules[kind] = (entry.make(node) if entry is not None else None) or replicated(node)
        return self._rules[kind]

    def strategies(self, node: Node, specs: tuple[Spec, ...]) -> list[Strategy]:
        """The ways in which the node may be computed from operands that are placed so."""
        key = (self._kind(node), specs)
        if key not in self._known:
            self._known[key] = list(self._strategies(node, specs))
        return self._known[key]

    def _strategies(self, node: Node, specs: tuple[Spec, ...]) -> Iterator[Strategy]:
        rule = self.rule(node)
        shardings: dict[str, DimSharding] = {}
        for value, spec, dims in zip(node.operands, specs, rule.operands, strict=True):
            for size, sharding, dim in zip(value.shape, spec.dims, dims, strict=True):
                projected = (
                    project(sharding, size, rule.dim_sizes(dim), self.mesh)
                    if dim
                    else ()
                    if not sharding.axes
                    else None
                )
                if projected is None:
                    return
                for f, sharding in zip(dim, projected, strict=True):
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
            whole = [(axis, f) for axis, f in used if f in rule.whole and self.mesh.extent(every[f].axes) > 1]
            groups = [(f, partial[axis][1] if axis in partial else frozenset()) for axis, f in whole]
            if any(rule.together(*each) is None for each in groups):
                continue
            try:
                made = strategy(rule, every, self.mesh, partial)
            except Error:  # an axis twice in one placement
                continue
            if made.operands == specs:
                yield made

    def forms(self, node: Node, made: Strategy, rank: int) -> list[Any]:
        """What :func:`written` gives of a node, with a :class:`Place` for each operand: made once for nodes that are
        alike and draw nothing."""
        key = (self._kind(node), id(made), rank)
        if draw_slot(node) is not None:
            return list(written(node, made, _places(len(node.operands)), self.mesh, rank, self.book))
        if key not in self._forms:
            self._forms[key] = list(written(node, made, _places(len(node.operands)), self.mesh, rank, self.book))
        return self._forms[key]

    def _pieces(self, node: Node, made: Strategy) -> Mapping[str, tuple[str, DimSharding]]:
        """For each axis that shards a factor: the factor, and how it is sharded over all of its axes.

        A share of a sum is one piece of the box that is summed. Which one follows from the rank's coordinates and this
        sharded: pieces of ``8{dp,tp}`` are not those of ``8{tp,dp}``, nor those of ``(2{dp} 4{tp})``.
        """
        key = (self._kind(node), id(made))  # which lives as long as this does
        if key not in self._sharding:
            rule, found = self.rule(node), dict[str, tuple[str, DimSharding]]()
            for value, spec, dims in zip(node.operands, made.operands, rule.operands, strict=True):
                for size, sharding, dim in zip(value.shape, spec.dims, dims, strict=True):
                    projected = (
                        project(sharding, size, rule.dim_sizes(dim), self.mesh) if dim and sharding.axes else None
                    )
                    for each in (implied(rule, f, c, self.mesh) for f, c in zip(dim, projected or (), strict=False)):
                        if each is not None:
                            found.update(dict.fromkeys(each[1].axes, each))
            for factor, axes in made.shardings:  # which no operand has
                for axis in axes:
                    found.setdefault(axis, (factor, DimSharding(axes)))
            self._sharding[key] = found
        return self._sharding[key]

    def _free(
        self, node: Node, rule: ShardingRule, shardings: dict[str, DimSharding]
    ) -> Iterator[dict[str, DimSharding]]:
        """Shardings of the factors that no operand has: none, or as the plan claims of the result."""
        result = rule.results[0]
        alone = {f for dim in result or () for f in dim} - set(shardings)
        found: list[dict[str, DimSharding]] = [{}]
        if alone and result is not None:
            value = node.outs[0]
            for spec in self.universe.specs.get(self.universe.of[value], ()):
                one: dict[str, DimSharding] | None = {}
                for size, sharding, dim in zip(value.shape, spec.dims, result, strict=True):
                    projected = project(sharding, size, rule.dim_sizes(dim), self.mesh) if dim else ()
                    if projected is None or one is None:
                        one = None
                        break
                    one.update((f, c) for f, c in zip(dim, projected, strict=True) if f in alone)
                if one is not None and one not in found:
                    found.append(one)
        yield from found

    def results(self, node: Node, made: Strategy, facts: Sequence[Fact]) -> list[Fact | None]:
        """The facts of a node's results."""
        pieces = self._pieces(node, made)
        specs = iter(made.results)
        found: list[Fact | None] = []
        for value in node.results:
            if value is None:
                found.append(None)
                continue
            spec, term = next(specs), self.universe.of[value]
            origins = [(axis, self.origin(axis, term, pieces.get(axis), facts)) for axis, _ in spec.partial]
            found.append(Fact(term, spec, tuple(origins)))
        return found

    def origin(self, axis: str, term: int, piece: tuple[str, DimSharding] | None, facts: Sequence[Fact]) -> int:
        """Equal for shares over an axis that are made alike: of a sum that begins here, by the sharding of what is
        summed
        (``piece``), or of the operands' shares, or both."""
        shares = [(place, made) for place, fact in enumerate(facts) for a, made in fact.origins if a == axis]
        if piece is not None:
            return self._origins.setdefault((term, *piece, *shares), len(self._origins))
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
    """A call that a rank's program should have."""

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass
class Expected(Share):
    """Notes the calls that a rule's ``local`` function writes."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)

    def call(self, op: Any, *args: Any, **kwargs: Any) -> Any:
        """The call that the rule writes, as data; one that gives its operand back is that operand."""
        row = row_of(op)
        made = row.plain(args, kwargs) if row is not None and row.plain is not None else (op, args, kwargs)
        return ExpectedCall(*made) if isinstance(made, tuple) else made


@dataclass(frozen=True)
class Place:
    """An operand of an op, by its number, where the op's calls are written for no program yet."""

    number: int


@cache
def _places(count: int) -> tuple[Place, ...]:
    return tuple(Place(i) for i in range(count))


def written(
    node: Node, made: Strategy, operands: Sequence[Any], mesh: Mesh, rank: int, book: RuleBook
) -> Iterator[Any]:
    """One rank's version of a node: an :class:`ExpectedCall`, or one of the operands; and by the kernels of devices."""
    copy = Node(node.op, node.args, node.kwargs, node.results, strategy=made)
    given = iter(operands)

    def next_operand(_: Value) -> Any:
        return next(given)

    args = substitute(node.args, next_operand)
    kwargs = {k: substitute(a, next_operand) for k, a in node.kwargs.items()}
    share = Expected(copy, mesh, mesh.coords(rank), args, kwargs)
    call = perform(book.entry(node.op), share)
    if not isinstance(call, ExpectedCall):
        yield call
        return
    for form in kernel_forms(share, (call.op, call.args, call.kwargs)):
        yield ExpectedCall(*form)


def nesting(expected: Any, known: dict[int, int] | None = None) -> int:
    """How many expected calls stand one within the other."""
    known = {} if known is None else known
    if isinstance(expected, (list, tuple)):
        return max((nesting(each, known) for each in expected), default=0)
    if not isinstance(expected, ExpectedCall):
        return 0
    if id(expected) not in known:  # one call may stand in several places
        known[id(expected)] = 1 + nesting([*expected.args, *expected.kwargs.values()], known)
    return known[id(expected)]


def same(
    expected: Any,
    actual: Any,
    root: Mapping[fx.Node, fx.Node],
    operands: Sequence[fx.Node] = (),
    known: dict[tuple[int, fx.Node], bool] | None = None,
) -> bool:
    """Whether a program has a call as expected: the same op of the same operands with the same arguments.

    ``operands`` are what stands at each :class:`Place`, ``known`` the calls that were compared already.
    """
    known = {} if known is None else known
    if isinstance(expected, Place):
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
            a, b = (normal(expected.op, each.args, each.kwargs) for each in (expected, actual))
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
