"""Masks as index predicates, read from a graph without computing an element of them.

An integer is an affine function of its index, and a mask chooses one of two numbers by a conjunction of conditions::

    rows = arange(t)[:, None]                         index[0]
    seen = arange(t)[None, :] <= rows                 index[1] - index[0] <= 0
    seen & (ids[:, None] == ids[None, :])             the same, where ids are the same number everywhere
    (columns - rows).abs() <= w                       index[1] - index[0] - w <= 0, index[0] - index[1] - w <= 0

Of data it knows where each element comes from: ids are equal at two places, or a flag is set at one::

    seen & (docs[:, :, None] == docs[:, None, :]) & kept[:, None, :]         of tensors [b, t] with content

Positions that begin anew in each document are in the order of the index where they have equal ids, if the ids count the
beginnings of documents, as transformers counts them::

    ids = (positions.diff(prepend=...) != 1).cumsum(-1)
    (ids[:, j] == ids[:, i]) & (positions[:, j] <= positions[:, i])          the same ids, and j <= i

What is not such a function is None. Conditions that hold for every index of a shape are left out by range analysis, so
the time does not depend on the length of a sequence.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import fx

aten = torch.ops.aten
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Affine:
    """``start + sum(steps[d] * index[d])`` for each element."""

    start: Any
    steps: tuple[int, ...]

    @property
    def is_constant(self) -> bool:
        """Whether all elements are the same."""
        return not any(self.steps)

    def plus(self, other: Affine, times: int = 1) -> Affine:
        """The sum with a multiple of another one, aligned at the last dim."""
        dims = max(len(self.steps), len(other.steps))
        mine, theirs = ((0,) * (dims - len(each.steps)) + each.steps for each in (self, other))
        return Affine(self.start + times * other.start, tuple(a + times * b for a, b in zip(mine, theirs, strict=True)))

    def negative(self) -> Affine:
        """The negated numbers."""
        return Affine(-self.start, tuple(-step for step in self.steps))

    def bounds(self, shape: Shape) -> tuple[Any, Any]:
        """The least and the greatest element."""
        ends = [step * (size - 1) for step, size in zip(self.steps, shape, strict=True)]
        return self.start + sum(min(end, 0) for end in ends), self.start + sum(max(end, 0) for end in ends)


@dataclass(frozen=True)
class Token:
    """The element of an integer or boolean tensor of the graph at ``index``, a number for each of its dims; as a
    condition, that it is true."""

    source: fx.Node
    index: tuple[Affine, ...]
    plus: int = 0
    """Added to the element."""

    def moved(self, move: Callable[[Affine], Affine]) -> Token:
        """The element at another index."""
        return Token(self.source, tuple(map(move, self.index)), self.plus)


@dataclass(frozen=True)
class SameToken:
    """The condition that two elements are equal."""

    a: Token
    b: Token

    def moved(self, move: Callable[[Affine], Affine]) -> SameToken:
        """Those at another index."""
        return SameToken(self.a.moved(move), self.b.moved(move))


@dataclass(frozen=True)
class TokenOrder:
    """The condition that one element of a tensor is at most another one."""

    least: Token
    most: Token

    def moved(self, move: Callable[[Affine], Affine]) -> TokenOrder:
        """Those at another index."""
        return TokenOrder(self.least.moved(move), self.most.moved(move))


Condition = Affine | Token | SameToken | TokenOrder


@dataclass(frozen=True)
class Choice:
    """``seen`` where each of the ``conditions`` holds (a number: that it is at most 0), and ``unseen`` elsewhere."""

    conditions: frozenset[Condition]
    seen: Any = True
    unseen: Any = False


@dataclass(frozen=True)
class Magnitude:
    """The absolute value of each element."""

    of: Affine


Value = Affine | Choice | Magnitude | Token


def constant(number: Any, shape: Shape) -> Affine:
    """The same number everywhere."""
    return Affine(number, (0,) * len(shape))


def simplified(value: Value, shape: Shape) -> Value:
    """A value without what its shape decides: steps along dims of one element, conditions that always hold."""

    def within(number: Affine) -> Affine:
        steps = (0,) * (len(shape) - len(number.steps)) + number.steps
        return Affine(number.start, tuple(0 if size == 1 else step for step, size in zip(steps, shape, strict=True)))

    if not isinstance(value, Choice):
        return _moved(value, within)
    found = [_condition_moved(each, within) for each in value.conditions]
    bounds = {each: each.bounds(shape) for each in found if isinstance(each, Affine)}
    if any(least > 0 for least, _ in bounds.values()):
        return constant(value.unseen, shape)
    left = frozenset[Condition](each for each, (_, greatest) in bounds.items() if greatest > 0)
    left |= {each for each in found if isinstance(each, (Token, TokenOrder))}
    left |= {each for each in found if isinstance(each, SameToken) and each.a != each.b}
    return Choice(left, value.seen, value.unseen) if left else constant(value.seen, shape)


def mapped(value: Value, function: Callable[[Any], Any]) -> Value | None:
    """A function of each element; None where that is None, or elements are many."""
    if isinstance(value, Affine):
        made = function(value.start) if value.is_constant else None
        return None if made is None else Affine(made, value.steps)
    if not isinstance(value, Choice):
        return None
    seen, unseen = function(value.seen), function(value.unseen)
    return None if seen is None or unseen is None else Choice(value.conditions, seen, unseen)


def true_where(value: Value | None) -> frozenset[Condition] | None:
    """The conditions under which a value is true; None where it is no conjunction."""
    if isinstance(value, Token):
        return frozenset([value]) if value.source.meta["val"].dtype is torch.bool and not value.plus else None
    if value is None or isinstance(value, Magnitude) or (isinstance(value, Affine) and not value.is_constant):
        return None
    if isinstance(value, Affine):
        return frozenset() if value.start else frozenset([Affine(1, value.steps)])
    if bool(value.seen) == bool(value.unseen):
        return frozenset() if value.seen else None
    if value.seen:
        return value.conditions
    if len(value.conditions) != 1:
        return None
    (condition,) = value.conditions
    if not isinstance(condition, Affine):
        return None
    return frozenset([Affine(1, (0,) * len(condition.steps)).plus(condition, -1)])


# ---- ops ----------------------------------------------------------------------------------------------------------


EXACT = (None, torch.int64, torch.int32)
"""Dtypes of positions, which others would round."""
FLOAT32 = torch.finfo(torch.float32).max
"""The largest number that is finite in most dtypes."""


def _range(shape: Shape, *bounds: Any, dtype: torch.dtype | None = None, **_: Any) -> Value | None:
    start, step = (0 if len(bounds) < 2 else bounds[0]), (bounds[2] if len(bounds) > 2 else 1)
    exact = dtype in EXACT and all(isinstance(each, int) for each in (start, step, *bounds))
    return Affine(start, (step,)) if exact else None


def _filled(number: int) -> Callable[..., Value]:
    return lambda shape, *_, dtype=None, **__: constant(bool(number) if dtype is torch.bool else number, shape)


def _full(shape: Shape, _: Any, number: Any, **__: Any) -> Value | None:
    return constant(number, shape) if isinstance(number, (bool, int, float)) else None


def _add(sign: int) -> Callable[..., Value | None]:
    def add(shape: Shape, a: Any, b: Any, alpha: int = 1) -> Value | None:
        if isinstance(b, (int, float)):
            b = constant(b, ())
        if isinstance(a, Token) and isinstance(b, Affine) and b.is_constant and {type(b.start), type(alpha)} == {int}:
            return None if _is_flag(a) else replace(a, plus=a.plus + sign * alpha * b.start)
        both = isinstance(a, Affine) and isinstance(b, Affine) and isinstance(alpha, int)
        return a.plus(b, sign * alpha) if both else None

    return add


def _mul(shape: Shape, a: Any, b: Any) -> Value | None:
    known = isinstance(a, (Affine, Choice)) and isinstance(b, (int, float)) and abs(b) <= FLOAT32
    return mapped(a, lambda number: number * b) if known else None


def _compare(compare: Callable[[Any, Any], bool]) -> Callable[..., Value | None]:
    """A comparison of two affine numbers, or of a choice and a number."""

    def compared(shape: Shape, a: Any, b: Any) -> Value | None:
        if isinstance(b, Affine) and b.is_constant and isinstance(a, Choice):
            b = b.start
        if isinstance(a, Choice) and isinstance(b, (bool, int, float)):
            return mapped(a, lambda number: compare(number, b))
        if isinstance(a, Token) and isinstance(b, Token) and compare in (operator.eq, operator.ne):
            equal = compare is operator.eq
            return None if a.plus or b.plus else Choice(frozenset([SameToken(a, b)]), equal, not equal)
        if isinstance(a, Token) and isinstance(b, Token):
            ordered = a.source is b.source and not _is_flag(a)
            return _compare_tokens(compare, a, b) if ordered else None
        b = constant(b, ()) if isinstance(b, (int, float)) else b
        if isinstance(a, Magnitude) and isinstance(b, Affine):
            return _compare_magnitude(compare, a.of, b)
        if not isinstance(a, Affine) or not isinstance(b, Affine):
            return None
        if a.is_constant and b.is_constant:
            return constant(compare(a.start, b.start), shape)
        if not all(isinstance(each.start, int) for each in (a, b)):
            return None
        apart, one = a.plus(b, -1), constant(1, ())
        if compare is operator.ne:
            same = simplified(Choice(frozenset([apart, apart.negative()])), shape)
            return constant(not same.start, shape) if isinstance(same, Affine) else None
        conditions = {
            operator.le: [apart],
            operator.lt: [apart.plus(one)],
            operator.ge: [apart.negative()],
            operator.gt: [apart.negative().plus(one)],
            operator.eq: [apart, apart.negative()],
        }[compare]
        return Choice(frozenset(conditions))

    return compared


def _is_flag(token: Token) -> bool:
    return bool(token.source.meta["val"].dtype is torch.bool)


def _compare_tokens(compare: Callable[[Any, Any], bool], a: Token, b: Token) -> Value:
    """An order of two elements of an integer tensor."""
    if compare in (operator.ge, operator.gt):
        a, b = b, a
    strict = compare in (operator.lt, operator.gt)
    return Choice(frozenset([TokenOrder(replace(a, plus=a.plus + 1) if strict else a, b)]))


def _compare_magnitude(compare: Callable[[Any, Any], bool], a: Affine, b: Affine) -> Value | None:
    """``|a| <= b``, and what follows from it."""
    if compare not in (operator.le, operator.lt, operator.gt, operator.ge) or not isinstance(b.start, int):
        return None
    within = compare in (operator.le, operator.lt)
    apart = constant(0 if compare in (operator.le, operator.gt) else 1, ()).plus(b, -1)
    return Choice(frozenset([a.plus(apart), a.negative().plus(apart)]), within, not within)


def _and(shape: Shape, a: Value, b: Value) -> Value | None:
    found = [true_where(each) if isinstance(each, (Affine, Choice, Token)) else None for each in (a, b)]
    return None if found[0] is None or found[1] is None else Choice(found[0] | found[1])


def _not(shape: Shape, a: Value) -> Value | None:
    return mapped(a, operator.not_)


def _where(shape: Shape, condition: Value, a: Any, b: Any) -> Value | None:
    if isinstance(condition, Choice) and condition.unseen and not condition.seen:
        condition, a, b = Choice(condition.conditions), b, a
    conditions = true_where(condition)
    if isinstance(condition, Affine) and condition.is_constant:
        chosen = a if condition.start else b
        return chosen if isinstance(chosen, Value) else constant(chosen, shape)
    numbers = [each.start if isinstance(each, Affine) and each.is_constant else each for each in (a, b)]
    if conditions is None or not all(isinstance(each, (bool, int, float)) for each in numbers):
        return None
    return Choice(conditions, *numbers)


def _masked_fill(shape: Shape, x: Value, mask: Value, number: Any) -> Value | None:
    return _where(shape, mask, number, x)


def _triangle(sign: int) -> Callable[..., Value | None]:
    """``tril`` (sign 1) keeps ``column - row <= diagonal``; ``triu`` the other side."""

    def triangle(shape: Shape, x: Value, diagonal: int = 0) -> Value | None:
        apart = Affine(-sign * diagonal, (*(0 for _ in shape[:-2]), -sign, sign))
        if isinstance(x, Choice) and not x.unseen:
            return Choice(x.conditions | {apart}, x.seen, x.unseen)
        if not isinstance(x, Affine) or not x.is_constant:
            return None
        return Choice(frozenset([apart]), x.start, type(x.start)(0))

    return triangle


def _cast(shape: Shape, x: Value, *to: Any, dtype: torch.dtype | None = None, **_: Any) -> Value | None:
    dtype = next((each for each in to if isinstance(each, torch.dtype)), dtype)
    kind = bool if dtype is torch.bool else float if dtype is not None and dtype.is_floating_point else None
    if kind is None:
        return x if dtype in EXACT and not isinstance(x, Token) else None
    return mapped(x, kind)


def _cumulative(shape: Shape, x: Value, dim: int, **_: Any) -> Value | None:
    if not isinstance(x, Affine) or not x.is_constant or not isinstance(x.start, int):
        return None
    number = int(x.start)
    return Affine(number, tuple(number if d == dim % len(shape) else 0 for d in range(len(shape))))


def _joined(parts: Sequence[tuple[Value, Shape]], dim: int) -> Value | None:
    """Concatenated affine numbers, where each part goes on as the one before."""
    dim, found, size = dim % len(parts[0][1]), parts[0][0], parts[0][1][dim]
    for part, shape in parts[1:]:
        if not isinstance(found, Affine) or not isinstance(part, Affine):
            return None
        if size == 1:  # one row has no step
            step = part.steps[dim] if shape[dim] > 1 else part.start - found.start
            found = Affine(found.start, tuple(step if d == dim else each for d, each in enumerate(found.steps)))
        step = found.steps[dim]
        if Affine(part.start - step * size, found.steps) != Affine(found.start, found.steps) or (
            shape[dim] > 1 and part.steps != found.steps
        ):
            return None
        size += shape[dim]
    return found


def _looked_up(x: Value, places: Sequence[Value | None]) -> Value | None:
    """``x[places]``, one for each dim."""
    if isinstance(x, Token):
        index = [_looked_up(each, places) for each in x.index]
        found_at = tuple(each for each in index if isinstance(each, Affine))
        return Token(x.source, found_at, x.plus) if len(found_at) == len(index) else None
    if not isinstance(x, Affine) or len(places) != len(x.steps):
        return None
    found = constant(x.start, ())
    for step, place in zip(x.steps, places, strict=True):
        if not isinstance(place, Affine):
            return None
        found = found.plus(place, step)
    return found


OPS: Mapping[str, Callable[..., Value | None]] = {
    "arange": _range,
    "ones": _filled(1),
    "zeros": _filled(0),
    "new_ones": _filled(1),
    "new_zeros": _filled(0),
    "ones_like": _filled(1),
    "zeros_like": _filled(0),
    "full": _full,
    "new_full": lambda shape, _, size, number, **__: _full(shape, size, number),
    "full_like": _full,
    "add": _add(1),
    "sub": _add(-1),
    "mul": _mul,
    "neg": lambda shape, x: x.negative() if isinstance(x, Affine) else None,
    "abs": lambda shape, x: Magnitude(x) if isinstance(x, Affine) else None,
    "le": _compare(operator.le),
    "lt": _compare(operator.lt),
    "ge": _compare(operator.ge),
    "gt": _compare(operator.gt),
    "eq": _compare(operator.eq),
    "ne": _compare(operator.ne),
    "__and__": _and,
    "bitwise_and": _and,
    "logical_and": _and,
    "bitwise_not": _not,
    "logical_not": _not,
    "where": _where,
    "masked_fill": _masked_fill,
    "tril": _triangle(1),
    "triu": _triangle(-1),
    "to": _cast,
    "_to_copy": _cast,
    "cumsum": _cumulative,
}
"""Ops of numbers, by name: the shape of the result, then the op's arguments."""


def _moved(value: Value, move: Callable[[Affine], Affine]) -> Value:
    """A value whose dims are moved."""
    if isinstance(value, Affine):
        return move(value)
    if isinstance(value, Magnitude):
        return Magnitude(move(value.of))
    if isinstance(value, Token):
        return value.moved(move)
    conditions = frozenset(_condition_moved(each, move) for each in value.conditions)
    return Choice(conditions, value.seen, value.unseen)


def _condition_moved(condition: Condition, move: Callable[[Affine], Affine]) -> Condition:
    return move(condition) if isinstance(condition, Affine) else condition.moved(move)


def _with_dims(shape: Shape, given: Shape) -> Callable[[Affine], Affine] | None:
    """The way from one shape to another that differs in dims of one element alone."""
    if [n for n in shape if n != 1] != [n for n in given if n != 1]:
        return None

    def move(value: Affine) -> Affine:
        steps = iter(step for step, size in zip(value.steps, given, strict=True) if size != 1)
        return Affine(value.start, tuple(0 if size == 1 else next(steps) for size in shape))

    return move


def _view(name: str, shape: Shape, given: Shape, value: Value, *args: Any) -> Value | None:
    """What an op makes that shows the elements of another value; None: it is no such op."""
    if name in ("unsqueeze", "squeeze", "view", "reshape", "_unsafe_view"):
        move = _with_dims(shape, given)
        return None if move is None else _moved(value, move)
    if name in ("expand", "clone", "contiguous", "alias", "detach", "lift_fresh_copy"):
        return value  # aligned at the last dim
    if name in ("transpose", "permute"):
        order = [*range(len(shape))]
        if name == "permute":
            order = [dim % len(shape) for dim in args[0]]
        else:
            a, b = (dim % len(shape) for dim in args)
            order[a], order[b] = b, a
        return _moved(value, lambda each: Affine(each.start, tuple(each.steps[dim] for dim in order)))
    if name == "slice":
        options: list[Any] = [*args, *(0, 0, None, 1)[len(args) :]]
        dim, start, _, step = options
        first = min(max((start or 0) + (given[dim] if (start or 0) < 0 else 0), 0), given[dim])
        return _moved(
            value,
            lambda each: Affine(
                each.start + each.steps[dim] * first,
                tuple(by * step if d == dim % len(given) else by for d, by in enumerate(each.steps)),
            ),
        )
    if name == "select":
        dim, at = args[0] % len(given), args[1] % given[args[0]]
        return _moved(
            value,
            lambda each: Affine(each.start + each.steps[dim] * at, each.steps[:dim] + each.steps[dim + 1 :]),
        )
    return None


class MaskReader:
    """Reads the values of a graph's nodes."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph, self.values, self.written = graph, dict[fx.Node, Value](), _written(graph)
        for node in graph.nodes:
            if node not in self.written and (shape := _shape(node)) is not None:
                found = self._read(node, shape) if node.op == "call_function" else None
                found = _token(node, shape) if found is None else found
                if found is not None:
                    self.values[node] = simplified(found, shape)

    def _read(self, node: fx.Node, shape: Shape) -> Value | None:
        if not isinstance(node.target, torch._ops.OpOverload):
            return None
        name = node.target._schema.name.removeprefix("aten::")
        if any(each not in self.values for each in node.all_input_nodes):
            return None
        read: Any = self.values.get
        args, kwargs = (cast(Any, fx.map_arg(each, read)) for each in (node.args, node.kwargs))
        if name in OPS:
            return OPS[name](shape, *args, **kwargs)
        if name in ("cat", "diff"):
            return self._rows(name, node, shape, *args)
        if name == "index":
            places: Any = node.args[1]
            least = [_least(each, value) for each, value in zip(places, args[1], strict=True)]
            return None if None in least or min(least) < 0 else _looked_up(*args)
        if name == "gather":
            own = [Affine(0, tuple(int(d == dim) for d in range(len(shape)))) for dim in range(len(shape))]
            own[args[1]] = args[2]
            return _looked_up(args[0], own)
        first = node.all_input_nodes[:1]
        given = _shape(first[0]) if first else None
        return None if given is None else _view(name, shape, given, *args)

    def _rows(self, name: str, node: fx.Node, shape: Shape, *args: Any) -> Value | None:
        """Of ``cat`` and ``diff`` what is affine."""
        if name == "cat":
            given: Any = node.args[0]
            shapes = [_shape(each) or () for each in given]
            return _joined([*zip(args[0], shapes, strict=True)], args[1] if len(args) > 1 else 0)
        options: list[Any] = [*args, *(None, 1, -1, None, None)[len(args) :]]
        x, count, dim, before, behind = options
        parts = [(each, _shape(of[0]) or ()) for each, of in ((before, node.args[3:4]), (x, node.args[:1])) if each]
        if count != 1 or behind is not None:
            return None
        whole = _joined(parts, dim)
        return constant(whole.steps[dim], shape) if isinstance(whole, Affine) else None

    def in_order(self, conditions: frozenset[Condition]) -> frozenset[Condition]:
        """The conditions, with an order of places for that of positions in documents of equal ids."""
        same = [each for each in conditions if isinstance(each, SameToken)]
        found = set[Condition]()
        for each in conditions:
            if isinstance(each, TokenOrder) and any(self._counts(ids, each) for ids in same):
                apart = each.least.index[-1].plus(each.most.index[-1], -1)
                found.add(apart.plus(constant(each.least.plus - each.most.plus, ())))
            else:
                found.add(each)
        return frozenset(found)

    def _counts(self, ids: SameToken, order: TokenOrder) -> bool:
        """Whether ids number the documents whose positions are compared: ``(diff(positions) != 1).cumsum(-1)``."""
        source, places = ids.a.source, {order.least.index, order.most.index}
        begins = source.args[0] if source.target is aten.cumsum.default and ids.b.source is source else None
        if not isinstance(begins, fx.Node) or begins.target is not aten.ne.Scalar or begins.args[1] != 1:
            return False
        steps: Any = begins.args[0]
        if steps.target is not aten.diff.default or {ids.a.index, ids.b.index} != places:
            return False
        if steps.kwargs or source.kwargs or len(source.args) > 2:
            return False
        last, given = len(_shape(source) or ()) - 1, [*steps.args[1:], *(1, -1, None, None)[len(steps.args) - 1 :]]
        count, along, _, behind = given
        positions, whole = self.values.get(steps.args[0]), _token(order.least.source, _shape(order.least.source) or ())
        at_ends = {along, source.args[1]} <= {-1, last} and count == 1 and behind is None
        return at_ends and positions == whole and _shape(steps) == _shape(steps.args[0])


def _token(node: fx.Node, shape: Shape) -> Token | None:
    """The elements of a tensor that is not read further, if they are exact and per token: of two dims at most."""
    exact = node.meta["val"].dtype in (torch.bool, *EXACT)
    if not exact or sum(size != 1 for size in shape) > 2:
        return None
    return Token(node, tuple(Affine(0, tuple(int(d == dim) for d in range(len(shape)))) for dim in range(len(shape))))


def _written(graph: fx.Graph) -> set[fx.Node]:
    """The nodes that share memory with what an op of the graph writes into."""
    bases: dict[fx.Node, fx.Node] = {}
    written = set[fx.Node]()
    for node in graph.nodes:
        schema = node.target._schema if isinstance(node.target, torch._ops.OpOverload) else None
        first = node.all_input_nodes[:1]
        shares = schema is not None and first and any(each.alias_info is not None for each in schema.returns)
        bases[node] = bases[first[0]] if shares else node
        for argument, value in zip(schema.arguments, node.args, strict=False) if schema is not None else ():
            if argument.is_write and isinstance(value, fx.Node):
                written.add(bases[value])
    return {node for node, base in bases.items() if base in written}


def write(like: fx.Node, before: fx.Node, op: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """Write a call into a graph, before a node."""
    with before.graph.inserting_before(before):
        node = before.graph.call_function(op, args, kwargs)
    values: Any = fx.map_arg(args, lambda each: each.meta["val"])
    node.meta = {**like.meta, "val": op(*values, **kwargs)}
    return node


def behind(node: fx.Node) -> fx.Node:
    """The first call behind a node."""
    return node.next if node.next.op != "placeholder" else behind(node.next)


def write_nothing(graph: fx.Graph) -> None:
    """Replace in-place ops by those that give a new tensor, where nothing else reads what they write into."""
    for node in graph.nodes:
        op, x = node.target, node.args[0] if node.args else None
        name = op._schema.name if isinstance(op, torch._ops.OpOverload) else ""
        packet = getattr(aten, name.removeprefix("aten::")[:-1], None) if name.endswith("_") else None
        if packet is None or not isinstance(x, fx.Node) or [*x.users] != [node]:
            continue
        is_new = isinstance(x.target, torch._ops.OpOverload) and (
            torch.Tag.pointwise in x.target.tags or not x.all_input_nodes
        )
        if not is_new or node.kwargs:
            continue
        pure, value, given = getattr(packet, op._overloadname, None), node.meta["val"], x.meta["val"]
        values = fx.map_arg(node.args, lambda each: each.meta["val"])
        after = None if pure is None else pure(*values)
        if isinstance(after, torch.Tensor) and (after.dtype, after.shape) == (given.dtype, given.shape) == (
            value.dtype,
            value.shape,
        ):
            node.target = pure


def _least(node: Any, value: Any) -> Any:
    """The least element of an index; None where it is not known."""
    shape = _shape(node)
    return value.bounds(shape)[0] if isinstance(value, Affine) and shape is not None else None


def _shape(node: Any) -> Shape | None:
    """The shape of what a node gives, where it is one tensor of a static shape."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    static = isinstance(value, torch.Tensor) and all(isinstance(size, int) for size in value.shape)
    return tuple(value.shape) if static else None  # type: ignore[union-attr]
