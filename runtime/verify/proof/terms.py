"""Values as terms: an op applied to terms, made once for each distinct application.

Two programs are the same function of their inputs if their outputs are the same term. Communication is nothing (a value
is the same whoever holds it; that the ranks' programs keep to that is proven in :mod:`.every_rank`), sums are sets of
what they add, and an op of the captured program that the planned one took apart becomes the terms of its decomposition,
after that has been compared with the op on random numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._decomp import decomposition_table
from torch.fx.experimental.proxy_tensor import make_fx

from shardfx.ir.builder import GraphBuilder
from shardfx.ir.capture.canonical import convert_call
from shardfx.ir.graph import Graph, Node, Output, OutputKind, Value, Where, op_name, substitute
from shardfx.ir.ops.table import OwnOp
from shardfx.ir.rules.book import RuleBook
from shardfx.ir.spec import Spec, TensorType

aten = torch.ops.aten

SAME = {aten.view.default: aten.reshape.default, aten._unsafe_view.default: aten.reshape.default}
"""Ops that differ in the memory they use only."""
CHECKED_NUMEL = 1 << 22
"""A decomposition is compared with its op where the op's tensors have no more elements than this."""
TOLERANCE = 1e-9


@dataclass(frozen=True)
class Ref:
    """A term among the arguments of another."""

    term: int


class Unjustified(Exception):
    """A decomposition that is not the op, or that cannot be made."""


@dataclass
class Terms:
    """The terms of one verification, numbered."""

    types: list[TensorType] = field(default_factory=list)
    where: list[Where] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    _known: dict[Any, tuple[int | None, ...]] = field(default_factory=dict)
    _sums: dict[int, tuple[int, ...]] = field(default_factory=dict)

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
            made = self._make(("sum", parts), types, node)
            assert made[0] is not None
            self._sums[made[0]] = parts
            return made
        if moves_nothing(node):
            return (operands[0],)
        if op is aten.reshape.default:  # how the shape was written (-1, a SymInt) does not matter
            args = (args[0], list(node.outs[0].shape))
        return self._make((op, frozen(args), frozen(kwargs)), types, node)

    def _make(self, key: Any, types: Sequence[TensorType | None], node: Node) -> tuple[int | None, ...]:
        if key not in self._known:
            name = op_name(node.op)
            self._known[key] = tuple(None if t is None else self._new(t, node.where, name) for t in types)
        return self._known[key]


def is_sum(node: Node) -> bool:
    """An add of two tensors of one type: the order of such adds does not matter."""
    return (
        node.op is aten.add.Tensor
        and not node.kwargs
        and len(node.operands) == len(node.args) == 2
        and all(v.type == node.outs[0].type for v in node.operands)
    )


def moves_nothing(node: Node) -> bool:
    """A slice of all there is."""
    if node.op is not aten.slice.Tensor:
        return False
    step = node.args[4] if len(node.args) > 4 else node.kwargs.get("step", 1)
    return step == 1 and node.outs[0].shape == node.operands[0].shape


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
    """Placements in which the plan holds a term: claims, for what alone does not say how it is cut."""
    decompositions: int = 0
    trusted: int = 0
    """Decompositions of ops too large to be compared with."""

    def results(self, node: Node) -> tuple[int | None, ...]:
        """The term of each result of a node of the graph; None for a result that is no tensor."""
        return tuple(None if v is None else self.of[v] for v in node.results)


def build(before: Graph, after: Graph, book: RuleBook) -> Universe:
    """The terms of the planned program, and the captured program's outputs among them."""
    terms = Terms()
    of: dict[Value, int] = {given.value: terms.given(given.name, given.value.type) for given in after.inputs}
    universe = Universe(terms, of, {})
    seen: set[tuple[int | None, ...]] = set()
    for node in after.nodes:
        if isinstance(node.op, OwnOp):
            of.update(zip(node.outs, (of[v] for v in node.operands), strict=True))
            continue
        made = terms.apply(node, of.__getitem__)
        of.update((v, t) for v, t in zip(node.results, made, strict=True) if v is not None and t is not None)
        key = tuple(of[v] for v in node.operands)
        if made in seen and not is_sum(node):
            continue
        seen.add(made)
        universe.makers.setdefault((SAME.get(node.op, node.op), key), []).append(node)
        entry = book.entry(node.op)
        if entry is not None and entry.local is not None:
            universe.written.append((frozenset(key), node))
    for value, term in of.items():
        if value.spec is not None:
            held = universe.specs.setdefault(term, [])
            if value.spec.reduced() not in held:
                held.append(value.spec.reduced())
    _captured(before, universe, book, seen)
    return universe


def _captured(before: Graph, universe: Universe, book: RuleBook, planned: set[tuple[int | None, ...]]) -> None:
    """The terms of the captured program, among those of the planned one."""
    of = {given.value: universe.terms.given(given.name, given.value.type) for given in before.inputs}
    reader = _Reader(before, universe, book, planned, set(universe.of.values()))
    for node in before.nodes:
        made = reader.results(node, of)
        of.update((v, t) for v, t in zip(node.results, made, strict=False) if v is not None and t is not None)
    universe.decompositions = len(reader.checked)
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
    checked: dict[Any, torch.fx.GraphModule] = field(default_factory=dict)

    def results(self, node: Node, of: Mapping[Value, int]) -> tuple[int | None, ...]:
        """The terms of a node's results."""
        made = self.universe.terms.apply(node, of.__getitem__)
        entry = self.book.entry(node.op)
        if entry is None or not entry.expand or made in self.planned or any(t in self.known for t in made):
            return made
        key = (node.op, frozen(substitute(node.args, lambda v: v.type)), frozen(dict(node.kwargs)))
        if key not in self.checked:
            self.checked[key] = justified(node, entry.expand)
            self.universe.trusted += not small(node)
        return self._taken_apart(self.checked[key], node, of)

    def _taken_apart(self, traced: torch.fx.GraphModule, node: Node, of: Mapping[Value, int]) -> tuple[int | None, ...]:
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
            found = self.results(made, inner)
            inner.update((v, t) for v, t in zip(made.results, found, strict=False) if v is not None and t is not None)
        given = results if isinstance(results, (list, tuple)) else [results]
        return tuple(None if v is None else inner[v] for v in given)


def justified(node: Node, expand: Any) -> torch.fx.GraphModule:
    """The decomposition of a node, traced, after a comparison with the op on random numbers."""
    decomposition = expand if callable(expand) else decomposition_table[node.op]

    def call(function: Callable[..., Any], tensors: Iterable[torch.Tensor], wide: bool = False) -> Any:
        given = iter(tensors)
        args = substitute(node.args, lambda _: next(given))
        kwargs = {k: substitute(a, lambda _: next(given)) for k, a in node.kwargs.items()}
        out = function(*widened(args), **widened(kwargs)) if wide else function(*args, **kwargs)
        return tuple(out) if isinstance(out, (tuple, list)) else out

    def function(*tensors: torch.Tensor) -> Any:
        return call(decomposition, tensors)

    fake = [torch.empty(v.shape, dtype=v.type.dtype, device="meta") for v in node.operands]
    traced = make_fx(function, tracing_mode="real")(*fake)
    if small(node):
        random = torch.Generator().manual_seed(0)
        least = min((size for v in node.operands for size in v.shape), default=2)
        tensors = [_random(v.type, random, min(least, 2)) for v in node.operands]
        with torch.no_grad():
            expected, got = call(node.op, tensors, True), call(decomposition, tensors, True)
        pairs = zip(expected, got, strict=False) if isinstance(expected, tuple) else [(expected, got)]
        for (a, b), value in zip(pairs, node.results, strict=False):
            asked = value is not None and a is not None  # an output mask leaves some out
            if asked and (b is None or not _close(a, b)):
                raise Unjustified(f"the decomposition of {op_name(node.op)} gives other numbers than the op")
    return traced


def small(node: Node) -> bool:
    """Whether the node can be run here, for a comparison."""
    return sum(v.type.numel for v in [*node.operands, *node.outs]) <= CHECKED_NUMEL


def widened(arg: Any) -> Any:
    """A nest of arguments with float64 for every floating-point dtype among them."""
    if isinstance(arg, torch.dtype) and arg.is_floating_point:
        return torch.float64
    if isinstance(arg, (list, tuple)):
        return type(arg)(widened(a) for a in arg)
    if isinstance(arg, dict):
        return {k: widened(a) for k, a in arg.items()}
    return arg


def _random(type: TensorType, random: torch.Generator, indices: int) -> torch.Tensor:
    """Random numbers that are far from zero; integers below ``indices``, as they may be indices."""
    if type.dtype.is_floating_point:
        return torch.rand(type.shape, dtype=torch.float64, generator=random) + 0.25
    if type.dtype is torch.bool:
        return torch.rand(type.shape, generator=random) < 0.5
    return torch.randint(0, max(indices, 1), type.shape, generator=random).to(type.dtype)


def _close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a.double(), b.double(), rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True)


def differing(universe: Universe, outputs: Iterable[Output]) -> Output | None:
    """The first output of the planned program that is another term than the captured program's."""
    for output in outputs:
        if universe.of[output.value] != universe.outputs.get((output.kind, output.name)):
            return output
    return None
