"""Equivalence of graphs by hash-consed terms: values are ops applied to terms, each application once.

Two graphs are the same function if their outputs are the same terms. Communication is nothing (a value is the same
whichever ranks have it; that the ranks' programs keep to that is proven of these), sums are sets of what they add, and
an op of the captured graph that the planned one does not have becomes the terms of its decomposition, after that has
been compared with the op on random numbers. Where they still differ, both are compared once more with every op
decomposed, as far as torch or the rule book has decompositions: ``addmm`` is a product and a sum, ``silu(x)`` is
``x * sigmoid(x)``. What is equal so is equal for real numbers: up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from shardfx.ir.builder import GraphBuilder
from shardfx.ir.capture.canonical.canonical_ops import convert_call
from shardfx.ir.errors import Error
from shardfx.ir.graph import Graph, Node, Output, OutputKind, Value, Where, op_name, substitute
from shardfx.ir.mesh import Mesh
from shardfx.ir.node import draw_slot
from shardfx.ir.ops.alike import alike, argument_key, type_of
from shardfx.ir.ops.table import OwnOp
from shardfx.ir.ops.traits import COPIES, NEUTRAL, is_neutral
from shardfx.ir.rulebook.movement.table_lookups import wide_ids
from shardfx.ir.rules.book import RuleBook
from shardfx.ir.spec import Spec, TensorType
from shardfx.runtime.verify.decomposition import Unjustified, decomposed, justified, small
from shardfx.runtime.verify.fault import Fault
from shardfx.runtime.verify.interface import interface_fault

from .expert_laws import unchecked_rows
from .head_copies import HeadCopies, Types
from .step_laws import AttentionSteps
from .table_laws import ExchangedRows

aten = torch.ops.aten

SAME = {aten.view.default: aten.reshape.default, aten._unsafe_view.default: aten.reshape.default}
"""Ops that compute the same, and differ only in the memory of their results."""
RESHAPED = {aten.reshape.default, aten.unsqueeze.default}
RESHAPED |= {aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims}
"""Ops (beside :data:`SAME`) of one operand whose elements keep their order, whatever the shape."""
COMMUTE = {
    *(getattr(aten, name).default for name in "maximum minimum logical_and logical_or logical_xor".split()),
    *(getattr(aten, name).Tensor for name in "mul eq ne bitwise_and bitwise_or bitwise_xor".split()),
}
"""Commutative ops of two operands; of sums see :func:`is_sum`."""


def arguments(node: Node, change: Callable[[Value], Any]) -> tuple[Any, dict[str, Any]]:
    """A node's arguments with each value mapped by ``change``."""
    return substitute(node.args, change), {name: substitute(arg, change) for name, arg in node.kwargs.items()}


@dataclass(frozen=True)
class TermRef:
    """A term among the arguments of another."""

    term: int


@dataclass
class Terms:
    """The terms of one verification, numbered."""

    book: RuleBook
    types: list[TensorType] = field(default_factory=list)
    where: list[Where] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    _known: dict[Any, tuple[int | None, ...]] = field(default_factory=dict)
    _sums: dict[int, tuple[int, ...]] = field(default_factory=dict)
    _seen_as: dict[int, int] = field(default_factory=dict)  # in another shape

    def __post_init__(self) -> None:
        self._copies = HeadCopies(self.types, self._seen_as)
        self._steps = AttentionSteps(self.types, self._seen_as, self.apply, self._make)
        known = self.types, self._seen_as, self.apply, self._steps.reshaped, self._make
        self._rows = ExchangedRows(*known, self.book.rule, self._copies.expanded)

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
        return self._known[key][0]  # type: ignore[return-value]

    def apply(self, node: Node, term: Callable[[Value], int]) -> tuple[int | None, ...]:
        """The terms of a node's results, its operands being ``term`` of them."""
        op, term = SAME.get(node.op, node.op), wide_ids(node, term)
        operands = [term(v) for v in node.operands]
        types = [None if v is None else v.type for v in node.results]
        rows = self._rows.apply(node, term, self._call, types)
        if rows is not None:
            return rows
        if is_sum(node):
            parts = self._steps.total((part for t in operands for part in self._sums.get(t, (t,))), node)
            if len(parts) == 1:
                return parts
            made = self._make(("sum", parts, types[0]), types, node)
            self._sums[made[0]] = parts  # type: ignore[index]
            return made
        if gives_back(node):
            return (operands[0],)
        if op in RESHAPED:  # in how many steps, and how the shape was written, does not matter
            return (self._steps.reshaped(operands[0], node.outs[0].type, node),)
        if op in COMMUTE and not node.kwargs and len(operands) == len(node.args):
            return self._make((op, *sorted(operands)), types, node)
        found = self._copies.apply(node, term, types, self._call, self._make) or self._steps.apply(node, term, types)
        return found or self._call(node, term, types)

    def _call(self, node: Node, term: Callable[[Value], int], types: Types) -> tuple[int | None, ...]:
        return self._make(call_key(node, lambda v: TermRef(term(v))), types, node)

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
"""Ops that are the identity where the operand has the shape already."""


def gives_back(node: Node) -> bool:
    """Whether an op is the identity on its one operand: a copy, a product with 1, a slice of all there is."""
    if len(node.operands) != 1 or len(node.outs) != 1 or node.outs[0].type != node.operands[0].type:
        return False
    if node.op is aten.slice.Tensor:
        step = node.args[4] if len(node.args) > 4 else node.kwargs.get("step", 1)
        return bool(step == 1)
    if node.op in COPIES or node.op in RESHAPES or node.op is aten._to_copy.default:
        return True
    return node.op in NEUTRAL and is_neutral(node.op, node.args, node.kwargs)


def call_key(node: Node, key: Callable[[Value], Hashable]) -> Hashable:
    """A node's op and arguments as a key, with ``key`` of each operand: 1, 1.0 and True differ."""
    kwargs = [(name, argument_key(arg, key)) for name, arg in sorted(node.kwargs.items())]
    return SAME.get(node.op, node.op), argument_key(node.args, key), tuple(kwargs)


@dataclass
class Universe:
    """All terms of a plan, the planned nodes that make them, and the terms that its outputs must be."""

    terms: Terms
    of: dict[Value, int]
    outputs: dict[tuple[OutputKind, str], int]
    makers: dict[tuple[Any, int | None], list[tuple[tuple[int, ...], Node]]] = field(default_factory=dict)
    """The nodes of the planned graph, inside of decompositions too, of an op and a first operand, with the terms of all
    operands; of adds in both orders."""
    written: list[tuple[frozenset[int], Node]] = field(default_factory=list)
    """Nodes whose rule writes a rank's version itself, with the terms of their operands."""
    specs: dict[int, list[Spec]] = field(default_factory=dict)
    """The planned placements of a term: claims, used where operands alone do not determine the sharding."""
    captured: set[int] = field(default_factory=set)
    """The terms of the captured graph, inside of decompositions too."""
    decompositions: int = 0
    trusted: int = 0
    """The number of decompositions of ops too large for a comparison."""


def build(before: Graph, after: Graph, book: RuleBook, *, decomposed: bool = False) -> Universe:
    """The terms of the planned graph, and the captured graph's outputs among them; every op ``decomposed``, or only
    those of the captured graph that the planned one does not have."""
    reader = _GraphReader(Universe(Terms(book), {}, {}), book, after.mesh, decomposed)
    reader.read_planned(after)
    reader.read_captured(before)
    return reader.universe


@dataclass
class _GraphReader:
    """Reads the planned graph, and then the captured one. An op that is decomposed may be made of such ops."""

    universe: Universe
    book: RuleBook
    mesh: Mesh
    every: bool
    """Whether every op is decomposed."""
    of: dict[Value, int] = field(default_factory=dict)
    """The terms of the values of the graph that is read."""
    planned: set[tuple[int | None, ...]] = field(default_factory=set)
    known: frozenset[int] | None = None
    """The terms of the planned graph, once it was read."""
    checked: dict[Any, torch.fx.GraphModule | None] = field(default_factory=dict)
    registered: dict[Any, list[Node]] = field(default_factory=dict)

    def read_planned(self, graph: Graph) -> None:
        """Record the terms of all values, their makers and their placements."""
        universe, of = self.universe, self.universe.of
        self.of = of
        of.update((inp.value, universe.terms.given(inp.name, inp.value.type)) for inp in graph.inputs)
        for node in graph.nodes:
            if isinstance(node.op, OwnOp):
                of.update(zip(node.outs, [of[v] for v in node.operands], strict=True))
            else:
                self.results(node)
        for value, term in of.items():
            if value.spec is not None and value.spec.reduced() not in universe.specs.setdefault(term, []):
                universe.specs[term].append(value.spec.reduced())
        self.known = frozenset(of.values())
        flags = (output for output in graph.outputs if output.kind is OutputKind.OVERFLOW)
        universe.outputs.update(((o.kind, o.name), of[o.value]) for o in flags)

    def read_captured(self, graph: Graph) -> None:
        """Record the terms of all values, and of the outputs."""
        universe = self.universe
        self.of = {inp.value: universe.terms.given(inp.name, inp.value.type) for inp in graph.inputs}
        for node in graph.nodes:
            self.results(node)
        universe.captured.update(self.of.values())
        universe.decompositions = sum(traced is not None for traced in self.checked.values())
        universe.outputs |= {(o.kind, o.name): self.of[o.value] for o in graph.outputs}

    def results(self, node: Node, within: frozenset[Any] = frozenset()) -> tuple[int | None, ...]:
        """The terms of a node's results; it is ``within`` the decompositions of these ops."""
        made = self._decomposed(node, within) if self.every else None
        made = made or self.universe.terms.apply(node, self.of.__getitem__)
        made = self._register(node, made) if self.known is None else self._as_planned(node, made, within, self.known)
        self.of.update((v, t) for v, t in zip(node.results, made, strict=False) if v is not None and t is not None)
        return made

    def _register(self, node: Node, made: tuple[int | None, ...]) -> tuple[int | None, ...]:
        """Record that a node of the planned graph makes terms, unless an equal call of the same operands does."""
        self.planned.add(made)
        op, key = SAME.get(node.op, node.op), tuple(self.of[v] for v in node.operands)
        equal = self.registered.setdefault((op, key, made), [])
        if equal and call_key(node, type_of) in [call_key(each, type_of) for each in equal]:
            return made
        equal.append(node)
        for terms_of in dict.fromkeys((key, key[::-1]) if node.op is aten.add.Tensor else (key,)):
            self.universe.makers.setdefault((op, next(iter(terms_of), None)), []).append((terms_of, node))
        entry = self.book.entry(node.op)
        if entry is not None and (entry.local is not None or entry.rows is not None):
            self.universe.written.append((frozenset(key), node))
        return made

    def _as_planned(
        self, node: Node, made: tuple[int | None, ...], within: frozenset[Any], known: Collection[int]
    ) -> tuple[int | None, ...]:
        """The terms of a captured node, decomposed by the rule book where the planned graph does not have it."""
        entry = self.book.entry(node.op)
        there = made in self.planned or any(t in known for t in made)
        if there or entry is None or not entry.expand or node.op in within:
            return made
        key = entry.expand, call_key(node, type_of)
        if key not in self.checked:
            self.checked[key] = justified(node, entry.expand)
            self.universe.trusted += not small(node)
        return self._inside(node, self.checked[key], within)  # type: ignore[arg-type]

    def _decomposed(self, node: Node, within: frozenset[Any]) -> tuple[int | None, ...] | None:
        """The terms of a node's results by its decomposition; None where it has none that can be read."""
        if node.op in within or draw_slot(node) is not None:
            return None
        key = alike(node)
        if key not in self.checked:
            self.checked[key] = decomposed(node, self.book)
            self.universe.trusted += self.checked[key] is not None and not small(node)
        traced = self.checked[key]
        try:
            return None if traced is None else self._inside(node, traced, within)
        except (Unjustified, Error):
            return None

    def _inside(self, node: Node, traced: torch.fx.GraphModule, within: frozenset[Any]) -> tuple[int | None, ...]:
        builder = GraphBuilder(self.mesh)
        builder.where, builder.phase = node.where, node.phase
        operands = iter(node.operands)
        results: Any = None
        for each in traced.graph.nodes:
            if each.op == "placeholder":
                builder.env[each] = next(operands)
            elif each.op == "call_function":
                if isinstance(each.target, torch._ops.OpOverload) and each.target._schema.is_mutable:
                    raise Unjustified(f"the decomposition of {op_name(node.op)} writes to an operand")
                builder.env[each] = convert_call(builder, each)
            elif each.op == "output":
                results = torch.fx.map_arg(each.args[0], builder.env.__getitem__)
            else:
                raise Unjustified(f"the decomposition of {op_name(node.op)} holds a constant")
        for made in builder.graph.nodes:
            found = self.results(made, within | {node.op})
            self.universe.captured.update(t for t in found if t is not None and self.known is not None)
        return tuple(None if v is None else self.of[v] for v in results)


def same_function(
    before: Graph,
    after: Graph,
    book: RuleBook,
    outputs: Iterable[Output] | None = None,
    *,
    decomposed: bool = False,
) -> Universe | Fault:
    """The terms of both graphs, if ``outputs`` (by default all) are the same terms in both; or the fault that one is
    not. Every op is ``decomposed`` where that is asked for, or needed.
    """
    claim = interface_fault(before, after) if outputs is None else None
    if claim is not None:
        return claim
    wanted = after.outputs if outputs is None else list(outputs)
    try:
        for every in (True,) if decomposed else (False, True):
            universe = build(before, after, book, decomposed=every)
            other = next((o for o in wanted if universe.of[o.value] != universe.outputs.get((o.kind, o.name))), None)
            if other is None:
                return unchecked_rows(after, universe.of) or universe
            fault = _blamed(universe, after, other)
    except Unjustified as error:
        return Fault(str(error))
    return fault


def _blamed(universe: Universe, after: Graph, output: Output) -> Fault:
    """The first node behind an output that the captured program does not have."""
    name = f"{output.kind.value} {output.name}"
    behind = {output.value}
    for node in reversed(after.nodes):
        if behind & set(node.outs):
            behind.update(node.operands)
    what = "the planned graph computes another function of the inputs than the captured one"
    for node in after.nodes:  # of a sum in another order only the end is there
        unknown = [v for v in node.outs if v in behind and universe.of[v] not in universe.captured]
        if unknown and not isinstance(node.op, OwnOp) and not is_sum(node):
            return Fault(f"{what}, which has no such {op_name(node.op)}", name, None, unknown[0].name, str(node.where))
    returned = universe.terms.names[universe.of[output.value]]
    return Fault(f"{what}: it returns a {returned}", name, None, output.value.name, str(output.value.where))
