"""expert-parallel: the rows of tokens by expert, and their dispatch to the ranks that have these experts.

Propagation leaves products with the matrices of experts (:mod:`shardfx.ir.ops.experts.routed_product`) sharded as
their tokens are, and gathers the matrices. This pass sorts the rows of each block of tokens by expert, once for all
products and what is between them; where an axis shards experts it also shards parts of these rows, so that the tokens'
blocks and the parts imply an all-to-all:

    before   %9 = shardfx.routed_mm(%7, %w, %ids)           tokens [4096{ep}, 2, 64], matrices [8{ep}, 64, 96] gathered

    after    %2 = shardfx.take_rows(%1, %slots)             rows [1, 4{ep}, 4, 2560, 64]: a block of each rank's tokens
             %3 = aten.permute(%2, [0, 2, 1, 3, 4])         [1, 4{ep}, 4, 2560, 64]: a part of the experts; all-to-all
             %5 = shardfx.take_rows(%4, %sources)           [4{ep}, 10240, 64], by expert
             %6 = shardfx.parts_mm(%5, %w, %ends)           matrices [8{ep}, 64, 96]: none is sent
             ...                                            and back again

Each block has room for so many rows of a part, ``capacity`` times the mean: rows without room are counted, and a step
that has some is run again with more room (``OutputKind.OVERFLOW``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeGuard

import torch

from shardfx.ir.dim_sharding import REPLICATED, DimSharding
from shardfx.ir.errors import Error, did_you_mean
from shardfx.ir.graph import Graph, InputKind, Node, Value, substitute
from shardfx.ir.ops.experts.dispatch import expert_rows, expert_slots, parts_mm, parts_outer, take_rows
from shardfx.ir.ops.experts.routed_product import routed_mm, routed_outer
from shardfx.ir.rewriter import Rewriter
from shardfx.ir.rules.strategy import factor_shardings
from shardfx.ir.spec import Spec, TensorType

from .base import SHARDED, Pass, PassContext, RuleCache, is_within
from .context_parallel import Context
from .token_blocks import TokenBlocks, add_overflow, is_filled, overflow

aten = torch.ops.aten
ROUTED = (routed_mm, routed_outer)
EXPERTS = "experts: "
LADDER = (0.0, 2.0, math.inf)
"""The least capacities, each for a step that finds too little room with the one before; the last is room for all."""
LOST = "rows of experts without room"
"""The output that counts them."""


@dataclass(frozen=True)
class Experts:
    """Expert parallelism of the experts in a module: ``specs={"**.experts": sx.Experts("ep")}``.

    All their weights are sharded by expert. Where the axis shards tokens as well, as ``"kwargs.input_ids": "ep, -"``
    says, each rank sends the rows of its tokens to the ranks of their experts, and gets the results back: two
    all-to-alls forward and two backward. Where tokens are replicated over it, each rank computes the rows of its own
    experts.

    Args:
        axis: the mesh axis over which experts are sharded; several, major first, as ``"dp ep"``.
        capacity: the room for rows from one rank to another, in times the mean (GShard,
            https://arxiv.org/abs/2006.16668). No row is dropped: a step that has more runs again with more room, twice
            the mean, and then room for all rows; so do the steps behind it.

    Example::

        hints = sx.Hints(..., specs={"kwargs.input_ids": "ep, -", "**.experts": sx.Experts("ep", capacity=1.5)})
    """

    axis: str
    capacity: float = 1.25

    def __post_init__(self) -> None:
        where = f"Experts({self.axis!r}, capacity={self.capacity!r})"
        if not isinstance(self.axis, str) or not self.axes or len(set(self.axes)) < len(self.axes):
            expected = 'the name of a mesh axis, or names of several, as "dp ep"'
            raise Error("the axis of Experts is no name", where=where, expected=expected, got=repr(self.axis))
        if isinstance(self.capacity, bool) or not isinstance(self.capacity, (int, float)) or not self.capacity > 0:
            expected = "times the mean number of rows, above 0; 1.25 has room for a quarter more"
            raise Error("experts without room for rows", where=where, expected=expected, got=repr(self.capacity))

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes, major first."""
        return tuple(self.axis.replace(",", " ").split())

    @property
    def text(self) -> str:
        """As a saved plan has it."""
        return f"{EXPERTS}{self.axis}; {self.capacity}"

    @staticmethod
    def of_text(text: str) -> Experts | None:
        """Read :attr:`text`; None if it is that of something else."""
        axis, _, capacity = text.removeprefix(EXPERTS).partition("; ") if text.startswith(EXPERTS) else ("", "", "")
        return Experts(axis, float(capacity)) if axis else None


OF_OPS = (Context, Experts)
"""Hints on the ops of modules."""


@dataclass(frozen=True)
class ExpertParallel(Pass):
    """Sort the rows of tokens by expert, and send them to the experts' ranks."""

    name: ClassVar[str] = "expert-parallel"
    requires: ClassVar[frozenset[str]] = frozenset({SHARDED})

    room: int = field(
        default=0, metadata={"help": "how often a step found too little room: 1 twice the mean, 2 for all"}
    )

    def run(self, graph: Graph, context: PassContext) -> bool:
        groups: dict[Value, list[Node]] = {}
        for node in graph.nodes:
            if node.op in ROUTED:
                groups.setdefault(node.operands[2], []).append(node)
        parameters = {inp.value for inp in graph.of_kind(InputKind.PARAMETER)}
        lost, changed = overflow(graph), False
        for ids, nodes in groups.items():
            hint = self._hint(nodes[0], context)
            capacity = max(LADDER[self.room], (hint or Experts("any")).capacity)
            made = RoutedRows(graph, context, ids, nodes, parameters, hint.axes if hint else (), capacity)
            if made.why_not:
                graph.notes.append(f"experts of {nodes[0].where.module}: rows stay in place, for {made.why_not}")
                continue
            made.convert(lost)
            lost, changed = made.lost, True
        add_overflow(graph, LOST, lost)
        if changed:
            graph.rename()
        return changed

    def _hint(self, node: Node, context: PassContext) -> Experts | None:
        hints = (each for text, each in context.specs.items() if isinstance(each, Experts) and _names(text, node))
        return next(hints, None)


def experts_of(graph: Graph, text: str, hint: Experts) -> dict[Value, Spec]:
    """The placements of the parameters that a hint is about.

    Raises:
        Error: there are no experts there, or they are not divided by their ranks.
    """
    inputs = {inp.value: inp for inp in graph.of_kind(InputKind.PARAMETER)}
    products = [node for node in graph.nodes if node.op is routed_mm]
    found = {_origin(node.operands[1]): node for node in products if _names(text, node)}
    if not found:
        modules = list(dict.fromkeys(node.where.module for node in products))
        remedy = did_you_mean(text, modules, "name one of these", count=3)
        if not modules:
            remedy = 'shard the weights by name, as "**.experts.*": "ep, -, -"'
        raise Error(
            f"hint {text!r} names no experts",
            where="Hints(specs=...)",
            expected=f"a module of experts of which a token has some: {', '.join(modules[:4]) or 'none here'}",
            got=f"{text!r}: {hint}",
            remedy=remedy,
        )
    made = {}
    for value, node in found.items():
        if unknown := [axis for axis in hint.axes if axis not in graph.mesh.names]:
            raise Error(
                f"mesh axis {unknown[0]!r} is unknown",
                where=f"hint {text!r}: {hint}; {node.where}",
                expected=f"axes of {graph.mesh!r}",
                got=unknown[0],
                remedy=did_you_mean(unknown[0], graph.mesh.names),
            )
        count, ranks = value.shape[0], graph.mesh.extent(hint.axes)
        if count % ranks:
            fits = max(n for n in range(1, ranks + 1) if count % n == 0)
            raise Error(
                "experts cannot be shared out equally",
                where=f"hint {text!r}: {hint}; {node.where}",
                expected=f"a number of ranks that divides {count} experts",
                got=f"{ranks} ranks of {hint.axis!r}",
                remedy=f"experts over {fits}: a mesh with an axis of {fits} ranks, and another one for the rest",
            )
        for each in _stored(value):
            if each in inputs:
                made[each] = Spec((DimSharding(hint.axes), *[REPLICATED] * (each.type.ndim - 1)))
    return made


def replicate_own(graph: Graph, hints: Mapping[Value, Any]) -> None:
    """Let experts that are modules of their own compute with all of their matrices, however a hint stores them."""
    for node in graph.nodes:
        stored = _stored(node.operands[1]) if node.op is routed_mm else []
        for value in stored if len(stored) > 1 else ():
            if isinstance(hints.get(value), Experts):
                value.hint = Spec.replicated(value.type.ndim)


def _names(text: str, node: Node) -> bool:
    return is_within(node.where.module, text)


def _origin(value: Value) -> Value:
    """The value that matrices are computed of alone."""
    while value.node is not None and len(value.node.operands) == 1:
        value = value.node.operands[0]
    return value


def _is_stack(node: Node | None) -> TypeGuard[Node]:
    """Whether a node stacks the matrices of experts that are modules of their own."""
    return node is not None and node.op is aten.stack.default and node.args[1:] in ((), (0,))


def _stored(value: Value) -> list[Value]:
    """The values that matrices are computed of, by expert where each has its own."""
    value = _origin(value)
    return [_origin(each) for each in value.node.operands] if _is_stack(value.node) else [value]


class RoutedRows(TokenBlocks):
    """The rows of the tokens that share some ids, and all that is computed of them."""

    def __init__(
        self,
        graph: Graph,
        context: PassContext,
        ids: Value,
        nodes: Sequence[Node],
        parameters: set[Value],
        hinted: Sequence[str],
        capacity: float,
    ) -> None:
        self.ids, self.nodes = ids, nodes
        self.experts = next(node.operands[1].shape[0] for node in nodes if node.op is routed_mm)
        assert ids.spec is not None
        wanted = hinted or ids.spec.dims[0].axes
        known = [_axes_of(node.operands[1], parameters, wanted) for node in nodes if node.op is routed_mm]
        super().__init__(graph, context, ids, max(known, key=len))
        pairs = self.t * self.each
        self.room = pairs if capacity >= self.p else min(pairs, math.ceil(capacity * pairs / self.p))
        self.rows: dict[Value, Value] = {}
        """By a value of pairs of a token and an expert, its rows by expert."""

    @property
    def why_not(self) -> str:
        """Why rows cannot be sorted by expert: ranks would not have equally many tokens, or experts."""
        if self.experts % self.p:
            return f"{self.p} ranks do not divide {self.experts} experts"
        return "" if self.is_even else f"{self.d * self.e} ranks do not divide {self.count} tokens"

    def convert(self, lost: Value | None) -> None:
        """Convert all products, and what is computed of their rows alone; count rows that are ``lost``, too."""
        self._index(self.nodes[0], lost)
        inside, gradients = self._inside(), list[tuple[Value, Value]]()
        for node in [each for each in self.graph.nodes if each in inside]:
            if node.op is routed_mm:
                x, w, _ = node.operands
                self._place_matrices(w)
                of = {"d": self.of_d, "p": self.of_p, **self._of(node)}
                made = self._call(node, parts_mm, self._rows(x, node), w, self.ends, **of)
                self.rows[node.outs[0]] = made
            elif node.op is routed_outer:
                x, y, _ = node.operands
                of = {"d": self.of_d, "p": self.of_p, **self._of(node)}
                args = self._rows(x, node), self._rows(y, node), self.ends, self.p
                made = self._call(node, parts_outer, *args, **of)
                gradients.append((made, self._matrices_of(node)))
                self.rewriter.replace(node.outs[0], made)
            else:
                self._row_wise(node)
            self.rewriter.erase(node)
        leaving = {output.value for output in self.graph.outputs}
        for value in [value for value in self.rows if value.node in inside]:
            if value in leaving or any(user not in inside for user in self.users[value]):
                self.rewriter.replace(value, self._pairs(value))
        self.rewriter.apply()
        users = self.graph.users()
        for value, matrices in gradients:
            self._place_gradient(value, users, matrices)

    def _matrices_of(self, outer: Node) -> Value:
        """The matrices that a gradient is of: those of the product of the same rows; itself where there is none."""
        (gradient,) = outer.outs
        products = (node.operands for node in self.nodes if node.op is routed_mm)
        found = (w for x, w, _ in products if x is outer.operands[0] and w.shape == gradient.shape)
        return next(found, gradient)

    # ---- which ops are computed by row ----------------------------------------------------------------------------

    def _inside(self) -> set[Node]:
        """The products, and the ops between them that work on each row alone."""
        rows = {value for node in self.nodes for value in node.outs if node.op is routed_mm}
        alone = set[Node]()
        for node in self.graph.nodes:
            if node not in self.nodes and self._is_row_wise(node, rows):
                rows.update(node.outs)
                alone.add(node)
        inside = {*self.nodes}
        for node in reversed(self.graph.nodes):
            if node in alone and any(user in inside for value in node.outs for user in self.users[value]):
                inside.add(node)
        for node in self.graph.nodes:  # of several rows that would be put back one makes one: a bias that is added
            operands = {value for value in node.operands if value.node in inside and value in rows}
            users = (user for value in operands for user in self.users[value])
            if node in alone - inside and len(operands) > 1 and all(user in inside or user is node for user in users):
                inside.add(node)
        return inside

    def _is_row_wise(self, node: Node, rows: set[Value]) -> bool:
        """Whether an op computes each row of its results of one row of each operand."""
        shape = (self.count, self.each)
        if not node.outs or any(value.type.ndim < 3 or value.shape[:2] != shape for value in node.outs):
            return False
        tensors = [value for value in node.operands if value.type.ndim and not is_filled(value)]
        if not tensors or not rows.issuperset(tensors):
            return False
        rule = self.cache.rule(node)
        dims = [each for value, each in zip(node.operands, rule.operands, strict=True) if value.type.ndim]
        dims += [each for each in rule.results if each is not None]
        lead = {tuple(each[:2]) for each in dims}
        barred = rule.replicated | rule.windows.keys() | rule.leaders
        barred |= {factor for each in dims for dim in each[2:] for factor in dim}
        return len(lead) == 1 and barred.isdisjoint(factor for dim in lead.pop() for factor in dim)

    # ---- rows by expert --------------------------------------------------------------------------------------------

    def _index(self, node: Node, lost: Value | None) -> None:
        """The places of rows, by the ids."""
        ids = self._blocks(self.ids, node)
        outs = self._outs(node, expert_slots, ids, self.experts, self.p, self.room)
        self.slots, self.places, counts = outs
        self.of_tokens = self.slots
        if self.each > 1:
            self.of_tokens = self._call(node, aten.floor_divide.Scalar, self.slots, self.each)
        outs = self._outs(node, expert_rows, counts, self.room, d=self.of_d, p=self.of_p)
        self.sources, self.back, self.ends = outs
        self.lost = lost
        if self.room < self.t * self.each:
            sums = self._call(node, aten.sum.dim_IntList, counts, [3])
            more = self._call(node, aten.sub.Tensor, sums, self.room)
            self.lost = self._with_lost(node, self._call(node, aten.clamp.default, more, 0), lost)

    def _rows(self, value: Value, node: Node) -> Value:
        """The rows of a value ``[n k h]``, or ``[n 1 h]``."""
        if value in self.rows:
            return self.rows[value]
        source = value.node.operands[0] if value.node is not None and value.node.op is aten.expand.default else value
        if source is not value and source.shape == (self.count, 1, value.shape[2]):  # the same for all of a token
            self.rows[value] = self._rows(source, node)
            return self.rows[value]
        each, width = value.shape[1:]
        if value.node is not None and value.node.op is aten.full.default:
            self.rows[value] = self._filled(value.node, node)
            return self.rows[value]
        x = self._call(node, aten.reshape.default, self._blocks(value, node), [self.d, self.e, self.t * each, width])
        index = self.slots if each == self.each else self.of_tokens
        x = self._to_parts(node, self._packed(node, x, index))
        x = self._call(node, aten.reshape.default, x, [self.d * self.p, self.e * self.room, width])
        if self.e > 1:
            x = self._call(node, take_rows, x, self.sources)
        self.rows[value] = x
        return x

    def _filled(self, full: Node, node: Node) -> Value:
        """Rows of one number."""
        shape = [self.d * self.p, self.e * self.room, full.outs[0].shape[2]]
        both = DimSharding((*self.of_d.axes, *self.of_p.axes))
        return self._call(node, full.op, shape, *full.args[1:], at={0: both}, how=full.kwargs)

    def _pairs(self, value: Value) -> Value:
        """The rows of a value as ``[n k h]``."""
        node, x, width = value.node, self.rows[value], value.shape[2]
        assert node is not None
        if self.e > 1:
            x = self._call(node, take_rows, x, self.back)
            x = self._call(node, aten.reshape.default, x, [self.d, self.p, self.e, self.room, width])
        return self._from_parts(node, x, value.shape)

    def _row_wise(self, node: Node) -> None:
        """The same op, of rows by expert."""
        shape = (self.d * self.p, self.e * self.room)
        for value in node.operands:
            if value.type.ndim and is_filled(value):
                self._rows(value, node)
        given = substitute(node.args, lambda v: self.rows.get(v, v))
        args = tuple([*shape, *each[2:]] if self._is_shape(each) else each for each in given)
        kwargs = {key: substitute(each, lambda v: self.rows.get(v, v)) for key, each in node.kwargs.items()}
        types = [None if v is None else TensorType((*shape, *v.shape[2:]), v.type.dtype) for v in node.results]
        made = Rewriter.make(node.op, args, types, like=node, kwargs=kwargs)
        self.rewriter.place(made)
        self.rewriter.before(node, made)
        self.rows |= {old: new for old, new in zip(node.results, made.results, strict=True) if old and new}

    def _is_shape(self, argument: Any) -> bool:
        return isinstance(argument, (list, tuple)) and len(argument) > 2 and argument[:2] == [self.count, self.each]

    # ---- placements -----------------------------------------------------------------------------------------------

    def _of(self, node: Node) -> dict[str, DimSharding]:
        """The shardings of rows and columns of the matrices of a product."""
        barred = {*self.of_d.axes, *self.of_p.axes}
        found = factor_shardings(self.cache.rule(node), node, self.mesh)
        return {f: each for f, each in found.items() if f in ("a", "m") and not barred & {*each.axes}}

    def _place_matrices(self, value: Value) -> None:
        """Shard experts in that of which matrices are computed."""
        while self.p > 1 and value.node is not None and self._keeps_experts(value.node):
            self._shard(value.node, {0: self.of_p}, {})
            value = value.node.operands[0]
        if self.p > 1 and _is_stack(value.node):  # sharded as they are stored: an all-to-all behind it
            self._shard(value.node, {dim + 1: each for dim, each in self._as_stored(value, 0).items()}, {})

    def _as_stored(self, matrices: Value, number: int) -> dict[int, DimSharding]:
        """The dims of an expert's own matrix that are stored over the axes of experts."""
        spec = _stored(matrices)[number].spec
        own = {*self.of_p.axes}
        return {i: each for i, each in enumerate(spec.dims if spec else ()) if own & {*each.axes} and not each.parts}

    def _place_gradient(
        self, value: Value, users: Mapping[Value, Sequence[Node]], matrices: Value | None = None
    ) -> None:
        """Shard experts in what is computed of a gradient of matrices: where each has its own, as that is stored."""
        while self.p > 1 and len(users[value]) == 1 and self._keeps_experts(users[value][0]):
            self.rewriter.place(users[value][0])
            (value,) = users[value][0].outs
        if self.p == 1 or matrices is None or not _is_stack(_origin(matrices).node):
            return
        for node in users[value]:
            if node.op is aten.select.int and node.args[1] == 0:
                self._shard(node, self._as_stored(matrices, node.args[2]), {})
                self._place_gradient(node.outs[0], users)

    def _keeps_experts(self, node: Node) -> bool:
        return keeps_first_dim(node, self.cache)


def keeps_first_dim(node: Node, cache: RuleCache) -> bool:
    """Whether an op of one tensor keeps its first dim as it is."""
    if len(node.operands) != 1 or len(node.outs) != 1 or not node.operands[0].type.ndim or not node.outs[0].type.ndim:
        return False
    rule = cache.rule(node)
    (first, *_), made = rule.operands[0], rule.results[0]
    return made is not None and made[0] == first and rule.replicated.isdisjoint(first)


def _axes_of(matrices: Value, parameters: set[Value], wanted: Sequence[str]) -> tuple[str, ...]:
    """The axes over which the parameters that matrices are computed of are stored, by experts. Of experts that are
    modules of their own they shard other dims: the ``wanted`` ones, of the hint or those that shard tokens."""
    stored = _stored(matrices)
    spec = stored[0].spec
    if not parameters.issuperset(stored) or spec is None or spec.dims[0].parts:
        return ()
    if len(stored) == 1:
        return spec.dims[0].axes
    return tuple(axis for dim in spec.dims for axis in dim.axes if axis in wanted)
