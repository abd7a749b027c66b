"""Laws of rows by expert (:mod:`shardfx.ir.ops.experts.dispatch`): of whatever order they are, each is of one pair of a
token and an expert.

A row that was packed, sent, sorted and computed alone is what the pair itself gives; and rows that are put back stand
where their pairs do::

    rows(x) = take_rows(blocks(x), slots)                  and taken by sources, where parts are of several blocks
    routed_mm(expand(x, [n, k, a]), w, ids) = routed_mm(x, w, ids)
    f(rows(x), rows(y)) = rows(f(x, y))                    for an op that computes each row alone
    parts_mm(rows(x), w, ends) = rows(routed_mm(x, w, ids))
    parts_outer(rows(x), rows(y), ends) = routed_outer(x, y, ids)
    take_rows(rows(x), places) = blocks(x)                 and taken by the way back before

What stands behind the last row of an expert is of no pair, and is never read. That each pair has a row is an
assumption, which a flag checks in each step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from shardfx.ir.graph import Graph, Node, OutputKind, Value, substitute
from shardfx.ir.ops.computing.table_ids import row_numbers
from shardfx.ir.ops.experts.dispatch import expert_rows, expert_slots, parts_mm, parts_outer, take_rows
from shardfx.ir.ops.experts.routed_product import routed_mm, routed_outer
from shardfx.ir.ops.table import OwnOp
from shardfx.ir.rules.sharding_rule import ShardingRule
from shardfx.ir.spec import TensorType
from shardfx.runtime.verify.fault import Fault

from .head_copies import Made, Make, TermOf, Types

aten = torch.ops.aten
Permutation = tuple[tuple[int, ...], tuple[int, ...]]
"""The sizes of leading dims, and their order."""
PLAIN: Permutation = ((), ())
ALL = -1
"""In the place of a room: all pairs without a place are counted, those of no expert, or of no row of a table, too."""


class Route(NamedTuple):
    """The order of rows: the ids ``[n k]`` by their term, the permutation of tokens, and sizes."""

    ids: int
    tokens: Permutation
    shape: tuple[int, int]
    d: int
    e: int
    p: int
    room: int
    experts: int

    @property
    def lead(self) -> tuple[int, int]:
        """The dims of rows in parts."""
        return self.d * self.p, self.e * self.room


class Rows(NamedTuple):
    """Rows of a term of pairs: ``packed`` as blocks have them, in ``parts`` behind the exchange, or ``sorted``."""

    pairs: int
    route: Route
    stage: str


@dataclass
class ExpertRows:
    """The terms of rows by expert."""

    types: Sequence[TensorType]
    """Of each term."""
    seen_as: dict[int, int]
    """The term that another one is a reshape of."""
    apply_whole: Callable[[Node, TermOf], Made]
    """The terms of a node's results."""
    reshaped: Callable[[int, TensorType, Node], int]
    """The term of another one in another shape."""
    make: Make
    rule: Callable[[Node], ShardingRule]
    expanded: Mapping[int, int]
    """A term that was expanded, by the result."""
    _index: dict[int, tuple[str, Route]] = field(default_factory=dict)
    """What integers are: slots, tokens, places, counts, sources, back, ends."""
    _rows: dict[int, Rows] = field(default_factory=dict)
    _permuted: dict[int, tuple[int, Permutation]] = field(default_factory=dict)
    """A term with permuted leading dims: the term before, and the permutation."""
    _fills: dict[int, Node] = field(default_factory=dict)

    def apply(self, node: Node, term: TermOf, call: Callable[[Node, TermOf, Types], Made], types: Types) -> Made | None:
        """The terms of a node's results; None where these laws do not tell."""
        if node.op in (routed_mm, routed_outer):
            return self._of_tokens(node, term, call, types)
        if node.op is expert_slots:
            return self._slots(node, term, call(node, term, types))
        if node.op is aten.permute.default:
            return self._permute(node, term(node.operands[0]), call, term, types)
        if not self._index:
            return None
        if node.op is aten.full.default:
            made = call(node, term, types)
            self._fills.update((each, node) for each in made if each is not None)
            return made
        if node.op is aten.floor_divide.Scalar:
            kind, route = self._index.get(term(node.operands[0]), ("", None))
            made = call(node, term, types)
            if kind == "slots" and route is not None and node.args[1] == route.shape[1]:
                self._note(made, ("tokens",), route)
            return made
        if node.op is expert_rows:
            kind, route = self._index.get(term(node.operands[0]), ("", None))
            made = call(node, term, types)
            if kind == "counts" and route is not None and node.args[1] == route.room:
                self._note(made, ("sources", "back", "ends"), route)
            return made
        if node.op is take_rows:
            return self._taken(node, term)
        if node.op in (parts_mm, parts_outer):
            return self._product(node, term)
        return self._row_wise(node, term, types)

    def _of_tokens(self, node: Node, term: TermOf, call: Any, types: Types) -> Made | None:
        """A product with rows ``[n k ..]`` that are the same for all experts of a token, as one with ``[n 1 ..]``."""
        few = dict[Value, int]()
        for value in node.operands[: 1 if node.op is routed_mm else 2]:
            source = self.expanded.get(term(value))
            if source is not None and self.types[source].shape == (value.shape[0], 1, value.shape[2]):
                few[value] = source
        if not few:
            return None
        swapped = {value: Value(self.types[each]) for value, each in few.items()}
        made = Node(node.op, substitute(node.args, lambda value: swapped.get(value, value)), {})
        made.where, made.results = node.where, node.results
        terms = {swapped[value]: each for value, each in few.items()}
        return call(made, lambda v: terms[v] if v in terms else term(v), types)  # type: ignore[no-any-return]

    def _base(self, term: int) -> int:
        return self.seen_as.get(term, term)

    def _note(self, made: Made, kinds: Sequence[str], route: Route) -> None:
        self._index.update((each, (kind, route)) for each, kind in zip(made, kinds, strict=True) if each is not None)

    def _tokens(self, term: int) -> tuple[int, Permutation]:
        """The term whose tokens are in another order in this one, and the permutation."""
        return self._permuted.get(self._base(term), (self._base(term), PLAIN))

    def _slots(self, node: Node, term: TermOf, made: Made) -> Made:
        ids, experts, parts, room = node.args
        d, e, t, k = ids.shape
        base, order = self._tokens(term(ids))
        if experts % parts == 0:
            flat = self.reshaped(base, TensorType((d * e * t, k), ids.type.dtype), node)
            route = Route(flat, order, (d * e * t, k), d, e, parts, room, experts)
            self._note(made, ("slots", "places", "counts"), route)
        return made

    def _permute(self, node: Node, term: int, call: Any, term_of: TermOf, types: Types) -> Made | None:
        shape, dims = node.operands[0].shape, [d % len(node.args[1]) for d in node.args[1]]
        rows = self._rows.get(self._base(term))
        if rows is not None and dims == [0, 2, 1, 3, 4]:
            route = rows.route
            of = {"packed": (route.d, route.e, route.p), "parts": (route.d, route.p, route.e)}.get(rows.stage)
            if of == shape[:3] and shape[3] == route.room:
                other = {"packed": "parts", "parts": "packed"}[rows.stage]
                return (self._made(rows.pairs, route, other, node.outs[0].type, node),)
            return None
        count = next((i for i in range(len(dims), 0, -1) if dims[i - 1] != i - 1), 0)
        order = tuple(dims[:count])
        before, known = self._permuted.get(self._base(term), (0, PLAIN))
        back = tuple(sorted(range(len(known[1])), key=known[1].__getitem__))
        if count and order == back and shape[:count] == tuple(known[0][i] for i in known[1]):
            return (self.reshaped(before, node.outs[0].type, node),)
        made = call(node, term_of, types)
        if count:
            self._permuted[made[0]] = self._base(term), (tuple(shape[:count]), order)
        return made  # type: ignore[no-any-return]

    def _taken(self, node: Node, term: TermOf) -> Made | None:
        x, index = node.operands
        kind, route = self._index.get(term(index), ("", None))
        if route is None:
            return None
        (count, each), width, type = route.shape, x.shape[-1], node.outs[0].type
        t = count // (route.d * route.e)
        if kind in ("slots", "tokens"):
            base, order = self._tokens(term(x))
            rows = each if kind == "slots" else 1
            if order != route.tokens or x.shape != (route.d, route.e, t * rows, width):
                return None
            pairs = self.reshaped(base, TensorType((count, rows, width), x.type.dtype), node)
            return (self._made(pairs, route, "packed" if route.e > 1 else "sorted", type, node),)
        found = self._rows.get(self._base(term(x)))
        if found is None or found.route != route:
            return None
        if (kind, found.stage) in (("sources", "parts"), ("back", "sorted")) and x.shape[:-1] == route.lead:
            return (self._made(found.pairs, route, "sorted" if kind == "sources" else "parts", type, node),)
        whole = self.types[found.pairs].shape[:2] == route.shape
        stage = "packed" if route.e > 1 else "sorted"
        if (kind, found.stage) != ("places", stage) or not whole:
            return None
        if x.shape != (route.d, route.e, route.p * route.room, width):
            return None
        return (self._in_blocks(found.pairs, route.tokens, type, node),)

    def _in_blocks(self, pairs: int, tokens: Permutation, type: TensorType, node: Node) -> int:
        """The term of pairs in the order of blocks."""
        if tokens == PLAIN:
            return self.reshaped(pairs, type, node)
        (made,) = self.make(("tokens in blocks", pairs, tokens, type), (type,), node)
        assert made is not None
        self._permuted[made] = pairs, tokens
        return made

    def _made(self, pairs: int, route: Route, stage: str, type: TensorType, node: Node) -> int:
        (made,) = self.make(("rows by expert", pairs, route, stage), (type,), node)
        assert made is not None
        self._rows[made] = Rows(pairs, route, stage)
        return self.reshaped(made, type, node)

    def _sorted(self, value: Value, term: int, route: Route | None, rows: int) -> Rows | None:
        """The rows by expert of a value; of one number as often as asked for."""
        if route is not None and value.shape[:2] != route.lead:
            return None
        found, fill = self._rows.get(self._base(term)), self._fills.get(self._base(term))
        if found is None and fill is not None and route is not None:
            type = TensorType((route.shape[0], rows, *value.shape[2:]), value.type.dtype)
            return Rows(self._filled(fill, type), route, "sorted")
        return (
            found if found is not None and found.stage == "sorted" and found.route == (route or found.route) else None
        )

    def _product(self, node: Node, term: TermOf) -> Made | None:
        ends = node.operands[2]
        kind, route = self._index.get(term(ends), ("", None))
        if kind != "ends" or route is None:
            return None
        x = self._sorted(node.operands[0], term(node.operands[0]), route, 1)
        second, ids = node.operands[1], Value(self.types[route.ids])
        if x is None:
            return None
        terms = {ids: route.ids}
        first = Value(self.types[x.pairs])
        terms[first] = x.pairs
        if node.op is parts_mm:
            if second.shape[0] != route.experts:
                return None
            type = TensorType((*route.shape, second.shape[2]), node.outs[0].type.dtype)
            (made,) = self._whole(node, routed_mm, (first, second, ids), type, {**terms, second: term(second)})
            return None if made is None else (self._made(made, route, "sorted", node.outs[0].type, node),)
        y = self._sorted(second, term(second), route, route.shape[1])
        if y is None or node.args[3] != route.p:
            return None
        other = Value(self.types[y.pairs])
        args = first, other, ids, route.experts
        return self._whole(node, routed_outer, args, node.outs[0].type, {**terms, other: y.pairs})

    def _whole(self, node: Node, op: Any, args: Any, type: TensorType, terms: dict[Value, int]) -> Made:
        made = Node(op, args, dict(node.kwargs))
        made.where, made.results = node.where, [Value(type, made, 0)]
        return self.apply_whole(made, terms.__getitem__)

    def _one(self, node: Node, op: Any, args: Any, type: TensorType, terms: dict[Value, int]) -> int:
        """The term of the result of an op that has one, in the place of a node."""
        (made,) = self._whole(node, op, args, type, terms)
        assert made is not None
        return made

    def _filled(self, fill: Node, type: TensorType) -> int:
        """The term of one number in another shape."""
        return self._one(fill, fill.op, ([*type.shape], *fill.args[1:]), type, {})

    def _flat(self, term: int, value: Value, node: Node) -> int:
        """The term of integers as ``[n 1]``."""
        return self.reshaped(self._base(term), TensorType((value.type.numel, 1), value.type.dtype), node)

    def _row_wise(self, node: Node, term: TermOf, types: Types) -> Made | None:
        """The terms of an op that computes each row alone."""
        tensors = [value for value in node.operands if value.type.ndim]
        known = [self._rows.get(self._base(term(value))) for value in tensors]
        route = next((each.route for each in known if each is not None and each.stage == "sorted"), None)
        if route is None or any(type is not None and type.shape[:2] != route.lead for type in types):
            return None
        if not is_row_wise(node, self.rule(node)):
            return None
        terms, values = dict[Value, int](), dict[Value, Value]()
        for value in node.operands:
            rows = self._sorted(value, term(value), route, route.shape[1]) if value.type.ndim else None
            if value.type.ndim and (rows is None or self.types[rows.pairs].shape[:2] != route.shape):
                return None
            own = term(value) if rows is None else rows.pairs
            values[value] = Value(self.types[own])
            terms[values[value]] = own

        def argument(given: Any) -> Any:
            is_shape = isinstance(given, (list, tuple)) and tuple(given[:2]) == route.lead and len(given) > 2
            return [*route.shape, *given[2:]] if is_shape else substitute(given, values.__getitem__)

        made = Node(node.op, tuple(map(argument, node.args)), {k: argument(each) for k, each in node.kwargs.items()})
        made.where = node.where
        of = [None if type is None else TensorType((*route.shape, *type.shape[2:]), type.dtype) for type in types]
        made.results = [None if type is None else Value(type, made, i) for i, type in enumerate(of)]
        found = self.apply_whole(made, terms.__getitem__)
        return tuple(
            None if each is None or type is None else self._made(each, route, "sorted", type, node)
            for each, type in zip(found, types, strict=True)
        )


def is_row_wise(node: Node, rule: ShardingRule) -> bool:
    """Whether an op computes each row ``[.. .. :]`` of its results of the same row of each operand."""
    dims = [each for value, each in zip(node.operands, rule.operands, strict=True) if value.type.ndim]
    dims += [each for each in rule.results if each is not None]
    lead = {tuple(each[:2]) for each in dims}
    if not dims or len(lead) != 1 or any(len(each) < 3 for each in dims):
        return False
    barred = rule.replicated | rule.windows.keys() | rule.leaders
    barred |= {factor for each in dims for dim in each[2:] for factor in dim}
    return barred.isdisjoint(factor for dim in lead.pop() for factor in dim)


def unchecked_rows(graph: Graph, of: Mapping[Value, int]) -> Fault | None:
    """A fault where a plan has too little room for all rows, and does not count those without; ``of`` are terms."""
    late = [output.value for output in graph.outputs if output.kind is OutputKind.OVERFLOW]
    counted = set[tuple[int, int]]()
    while late:
        value = late.pop()
        node = value.node
        if node is None:
            continue
        if isinstance(node.op, OwnOp):
            late.append(node.operands[value.index])
        elif node.op is aten.add.Tensor:
            late += node.operands
        elif found := _without_room(node):
            counted.add((of[found[0].outs[0]], found[1]))
    for node in graph.nodes:
        if node.op is not expert_slots:
            continue
        maker = maker_of(node)
        room = ALL if maker is not None and maker.op is row_numbers else node.args[3]
        few = room == ALL or room < math.prod(node.operands[0].shape[2:])
        if few and counted.isdisjoint({(of[node.outs[0]], room), (of[node.outs[0]], ALL)}):
            what = "rows that have no room are not counted"
            return Fault(what, node=node.outs[0].name, where=str(node.where), certain=True)
    return None


def _without_room(node: Node) -> tuple[Node, int] | None:
    """The slots of which a node sums the rows without room, and the room: sum(clamp(sum(counts, [3]) - room, 0)); or
    all that have no place: sum(places < 0)."""
    clamped = maker_of(node) if node.op is aten.sum.default and not node.kwargs and len(node.args) == 1 else None
    if clamped is not None and clamped.op is aten.lt.Scalar and clamped.args[1] == 0:
        places = _behind(clamped.operands[0])
        slots = places.node if places.index == 1 else None
        return (slots, ALL) if slots is not None and slots.op is expert_slots else None
    if clamped is None or clamped.op is not aten.clamp.default or clamped.args[1:] != (0,) or clamped.kwargs:
        return None
    less = maker_of(clamped)
    if less is None or less.op is not aten.sub.Tensor or less.kwargs or not isinstance(less.args[1], int):
        return None
    summed = maker_of(less)
    if summed is None or summed.op is not aten.sum.dim_IntList or summed.args[1:] != ([3],):
        return None
    counts = _behind(summed.operands[0])
    slots = counts.node
    return (slots, less.args[1]) if slots is not None and slots.op is expert_slots and counts.index == 2 else None


def maker_of(node: Node) -> Node | None:
    """The node of a node's first operand, behind communication."""
    return _behind(node.operands[0]).node


def _behind(value: Value) -> Value:
    """A value before communication."""
    while value.node is not None and isinstance(value.node.op, OwnOp):
        value = value.node.operands[value.index]
    return value
