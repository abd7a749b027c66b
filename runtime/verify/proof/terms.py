"""Values as terms: an op applied to terms, made once for each distinct application.

Two programs are the same function of their inputs if their outputs are the same term. Communication is nothing (a value
is the same whoever holds it; that the ranks' programs keep to that is proven in :mod:`.every_rank`), sums are sets of
what they add, and an op of the captured program that the planned one took apart becomes the terms of its decomposition,
after that has been compared with the op on random numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from shardfx.ir.builder import GraphBuilder
from shardfx.ir.capture.canonical.canonical_ops import convert_call
from shardfx.ir.graph import Graph, Node, Output, OutputKind, Value, Where, op_name, substitute
from shardfx.ir.ops.table import OwnOp
from shardfx.ir.ops.traits import COPIES, NEUTRAL, is_neutral
from shardfx.ir.rules.book import RuleBook
from shardfx.ir.rules.by_pieces import choices
from shardfx.ir.spec import Spec, TensorType
from shardfx.runtime.verify.decomposition import Unjustified, justified, small

aten = torch.ops.aten

SAME = {aten.view.default: aten.reshape.default, aten._unsafe_view.default: aten.reshape.default}
"""Ops that differ in the memory they use only."""


@dataclass(frozen=True)
class Ref:
    """A term among the arguments of another."""

    term: int


@dataclass
class Terms:
    """The terms of one verification, numbered."""

    by_arguments: ClassVar[bool] = True
    """Whether calls of one op of the same operands, with other arguments, always give other terms."""
    types: list[TensorType] = field(default_factory=list)
    where: list[Where] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    _known: dict[Any, tuple[int | None, ...]] = field(default_factory=dict)
    _sums: dict[int, tuple[int, ...]] = field(default_factory=dict)
    _seen_as: dict[int, int] = field(default_factory=dict)  # in another shape

    def _new(self, type: TensorType, where: Where, name: str) -> int:
        self.types.append(type)
        self.where.append(where)
        self.names.append(name)
        return len(self.types) - 1

    def given(self, name: str, type: TensorType) -> int:
        """The term of an input."""
        key = ("input", name)
        if key not in self._known:
            self._known[key] = (self._new(type, Where(module=name), name),)
        found = self._known[key][0]
        assert found is not None
        return found

    def apply(self, node: Node, term: Callable[[Value], int]) -> tuple[int | None, ...]:
        """The terms of a node's results, its operands being ``term`` of them."""
        op = SAME.get(node.op, node.op)
        args = substitute(node.args, lambda v: Ref(term(v)))
        kwargs = {k: substitute(a, lambda v: Ref(term(v))) for k, a in node.kwargs.items()}
        operands = [term(v) for v in node.operands]
        types = [None if v is None else v.type for v in node.results]
        if is_sum(node):
            parts = tuple(sorted(part for t in operands for part in self._sums.get(t, (t,))))
            made = self._make(("sum", parts, types[0]), types, node)
            assert made[0] is not None
            self._sums[made[0]] = parts
            return made
        if gives_back(node):
            return (operands[0],)
        if op is aten.reshape.default:  # in how many steps, and how the shape was written, does not matter
            base = self._seen_as.get(operands[0], operands[0])
            same = self.types[base] == node.outs[0].type
            made = (base,) if same else self._make((op, base, types[0]), types, node)
            self._seen_as.update((t, base) for t in made if t is not None and t != base)
            return made
        return self._make((op, frozen(args), frozen(kwargs)), types, node)

    def _make(self, key: Any, types: Sequence[TensorType | None], node: Node) -> tuple[int | None, ...]:
        if key not in self._known:
            name = op_name(node.op)
            self._known[key] = tuple(None if t is None else self._new(t, node.where, name) for t in types)
        return self._known[key]


def is_sum(node: Node) -> bool:
    """An add of two tensors of one dtype: the order of such adds does not matter, nor which of them is broadcast
    first."""
    return (
        node.op is aten.add.Tensor
        and not node.kwargs
        and len(node.operands) == len(node.args) == 2
        and all(v.type.dtype == node.outs[0].type.dtype for v in node.operands)
    )


RESHAPES = {aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.expand.default}
"""Ops that give their operand back where it has the shape already."""


def gives_back(node: Node) -> bool:
    """Whether an op gives its one operand back: a copy, a product with 1, a slice of all there is."""
    if len(node.operands) != 1 or len(node.outs) != 1 or node.outs[0].type != node.operands[0].type:
        return False
    if node.op is aten.slice.Tensor:
        step = node.args[4] if len(node.args) > 4 else node.kwargs.get("step", 1)
        return bool(step == 1)
    if node.op in COPIES or node.op in RESHAPES or node.op is aten._to_copy.default:
        return True
    return node.op in NEUTRAL and is_neutral(node.op, node.args, node.kwargs)


def frozen(arg: Any) -> Any:
    """A nest of arguments as a key: 1, 1.0 and True differ."""
    if isinstance(arg, Ref):
        return arg
    if isinstance(arg, (list, tuple)):
        return tuple(frozen(a) for a in arg)
    if isinstance(arg, dict):
        return tuple(sorted((k, frozen(a)) for k, a in arg.items()))
    return type(arg).__name__, repr(arg)


@dataclass
class Universe:
    """All terms of a plan, the nodes of the planned program that make them, and what its outputs must be."""

    terms: Terms
    of: dict[Value, int]
    outputs: dict[tuple[OutputKind, str], int]
    makers: dict[tuple[Any, tuple[int, ...]], list[Node]] = field(default_factory=dict)
    written: list[tuple[frozenset[int], Node]] = field(default_factory=list)
    """Nodes whose rule writes a rank's version itself, with the terms of their operands."""
    specs: dict[int, list[Spec]] = field(default_factory=dict)
    """Placements in which the plan holds a term: claims, for what alone does not say how it is sharded."""
    captured: set[int] = field(default_factory=set)
    """What the captured program computes, parts of ops that were taken apart among them."""
    decompositions: int = 0
    trusted: int = 0
    """Decompositions of ops too large to be compared with."""

    def results(self, node: Node) -> tuple[int | None, ...]:
        """The term of each result of a node of the graph; None for a result that is no tensor."""
        return tuple(None if v is None else self.of[v] for v in node.results)


def build(before: Graph, after: Graph, book: RuleBook, fused: bool = False, terms: Terms | None = None) -> Universe:
    """The terms of the planned program, and the captured program's outputs among them.

    ``fused``: what the planned program does by an op that the captured one does not have is taken apart, too.
    ``terms``: none yet, of a kind that knows more of them to be equal.
    """
    terms = terms or Terms()
    of: dict[Value, int] = {given.value: terms.given(given.name, given.value.type) for given in after.inputs}
    universe = Universe(terms, of, {})
    reader = None
    if fused:
        there = _as_they_are(before, universe)
        reader = _Reader(after, universe, book, there, {t for made in there for t in made if t is not None}, False)
    seen: set[tuple[int | None, ...]] = set()
    registered: set[Any] = set()
    for node in after.nodes:
        if isinstance(node.op, OwnOp):
            one = len({of[v] for v in node.operands}) == 1
            pieces = terms.apply(node, of.__getitem__) if node.op.joins and not one else ()  # of nothing that there is
            of.update(zip(node.outs, pieces or [of[v] for v in node.operands], strict=False))  # type: ignore[arg-type]
            continue
        made = terms.apply(node, of.__getitem__) if reader is None else reader.results(node, of)
        of.update((v, t) for v, t in zip(node.results, made, strict=True) if v is not None and t is not None)
        key = tuple(of[v] for v in node.operands)
        seen.add(made)
        asked = (SAME.get(node.op, node.op), key)
        call = (asked, made, None if terms.by_arguments else frozen(substitute((node.args, node.kwargs), _no_value)))
        if call in registered:
            continue
        registered.add(call)
        universe.makers.setdefault(asked, []).append(node)
        entry = book.entry(node.op)
        if entry is not None and (entry.local is not None or entry.rows is not None):
            universe.written.append((frozenset(key), node))
    for value, term in of.items():
        if value.spec is not None:
            held = universe.specs.setdefault(term, [])
            if value.spec.reduced() not in held:
                held.append(value.spec.reduced())
    if reader is not None:
        universe.decompositions = len(reader.checked)
    _captured(before, universe, book, seen)
    return universe


def _no_value(_: Value) -> None:
    """Arguments apart from the operands."""


def _as_they_are(graph: Graph, universe: Universe) -> set[tuple[int | None, ...]]:
    """The terms of a graph's nodes, none of them taken apart."""
    of = {given.value: universe.terms.given(given.name, given.value.type) for given in graph.inputs}
    found = set()
    for node in graph.nodes:
        made = universe.terms.apply(node, of.__getitem__)
        of.update((v, t) for v, t in zip(node.results, made, strict=False) if v is not None and t is not None)
        found.add(made)
    return found


def _captured(before: Graph, universe: Universe, book: RuleBook, planned: set[tuple[int | None, ...]]) -> None:
    """The terms of the captured program, among those of the planned one."""
    of = {given.value: universe.terms.given(given.name, given.value.type) for given in before.inputs}
    universe.captured.update(of.values())
    reader = _Reader(before, universe, book, planned, set(universe.of.values()))
    for node in before.nodes:
        made = reader.results(node, of)
        of.update((v, t) for v, t in zip(node.results, made, strict=False) if v is not None and t is not None)
    universe.captured.update(of.values(), reader.inside)
    universe.decompositions += len(reader.checked)
    universe.outputs = {(o.kind, o.name): of[o.value] for o in before.outputs}


@dataclass
class _Reader:
    """Reads the captured program: what the plan does not hold is taken apart by the op's decomposition, and what that
    holds again, if need be."""

    graph: Graph
    universe: Universe
    book: RuleBook
    planned: set[tuple[int | None, ...]]
    known: set[int]
    must: bool = True
    """An op whose decomposition is not justified is an error; or else it stays as it is."""
    checked: dict[Any, torch.fx.GraphModule | None] = field(default_factory=dict)
    inside: set[int] = field(default_factory=set)
    """The terms of what ops were taken apart into."""

    def results(
        self, node: Node, of: Mapping[Value, int], apart: frozenset[Any] = frozenset()
    ) -> tuple[int | None, ...]:
        """The terms of a node's results; within what ops were taken ``apart`` into, these are not once more."""
        made = self.universe.terms.apply(node, of.__getitem__)
        entry = self.book.entry(node.op)
        if entry is None or not entry.expand or node.op in apart:
            return made
        if made in self.planned or any(t in self.known for t in made):
            return made
        held = self.universe.specs.get(of[node.operands[0]], ())
        for expand in choices(entry.expand, node, held, self.graph.mesh):
            key = (node.op, expand, frozen(substitute(node.args, lambda v: v.type)), frozen(dict(node.kwargs)))
            if key not in self.checked:
                self.checked[key] = self._justified(node, expand)
                self.universe.trusted += not small(node)
            traced = self.checked[key]
            if traced is not None:
                made = self._taken_apart(traced, node, of, apart | {node.op})
            if all(t is None or t in self.known for t in made):
                break
        return made

    def _justified(self, node: Node, expand: Any) -> torch.fx.GraphModule | None:
        try:
            return justified(node, expand)
        except Unjustified:
            if self.must:
                raise
            return None

    def _taken_apart(
        self, traced: torch.fx.GraphModule, node: Node, of: Mapping[Value, int], apart: frozenset[Any]
    ) -> tuple[int | None, ...]:
        builder = GraphBuilder(self.graph.mesh)
        builder.where, builder.phase = node.where, node.phase
        operands = iter(node.operands)
        inner = dict(of)
        results: Any = None
        for each in traced.graph.nodes:
            if each.op == "placeholder":
                builder.env[each] = next(operands)
            elif each.op == "call_function":
                builder.env[each] = convert_call(builder, each)
            elif each.op == "output":
                results = torch.fx.map_arg(each.args[0], builder.env.__getitem__)
            else:
                raise Unjustified(f"the decomposition of {op_name(node.op)} holds a constant")
        for made in builder.graph.nodes:
            found = self.results(made, inner, apart)
            inner.update((v, t) for v, t in zip(made.results, found, strict=False) if v is not None and t is not None)
            self.inside.update(t for t in found if t is not None)
        given = results if isinstance(results, (list, tuple)) else [results]
        return tuple(None if v is None else inner[v] for v in given)


def differing(universe: Universe, outputs: Iterable[Output]) -> Output | None:
    """The first output of the planned program that is another term than the captured program's."""
    for output in outputs:
        if universe.of[output.value] != universe.outputs.get((output.kind, output.name)):
            return output
    return None
