"""Op rules: what may be cut, as data.

A rule is an einsum over *factors*, in the spirit of Shardy's::

    rule(aten.mm.default, "m k, k n -> m n", linear="0|1")

    m k        the dims of an operand, in order          n..   any number of leading dims
    (h d)      a dim that is the product of factors      1     a dim of size one
    k!         a factor that must be whole

A factor that is missing from *one* result makes *that* result partial over the axes that cut the factor.
``linear`` says which operands may be partial sums: ``"0|1"`` one of them at a time, ``"0&1"`` both together.
An operand that is optional and not given is left out of the template. What no template can say is said by a
function of the node that returns a :class:`ShardingRule`. From a rule follow all strategies of an op, for any
number of mesh axes: see :func:`strategy`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Any, Protocol

import torch

from .errors import Error
from .graph import Node, Strategy, Value, op_name
from .mesh import Mesh
from .spec import WHOLE, Cut, Part, Spec, compound

SAME = "same"
Dim = tuple[str, ...]
"""The factors whose product a tensor dim is, major first; () is a dim of size one."""


@dataclass(frozen=True)
class ShardingRule:
    """What may be cut of one node: per operand and per result the factors of each dim."""

    operands: tuple[tuple[Dim, ...], ...]
    results: tuple[tuple[Dim, ...] | None, ...]
    sizes: Mapping[str, int]
    whole: frozenset[str] = frozenset()
    linear: tuple[frozenset[int], ...] = ()
    reduce: str = "sum"
    """What a result is of the pieces' results where it lacks a factor that is cut; ``same``: every rank has all of it.
    One word for all results, or one for each: ``"min, max"``."""
    moves_only: bool = False
    """The op only moves elements about: any kind of partial value (a max too) may pass."""
    transparent: bool = False
    """Every cut passes as it is: the op moves elements, or works on each alone."""

    @cached_property
    def factors(self) -> dict[str, list[tuple[bool, int, int, int]]]:
        """Where each factor stands: (is an operand, tensor, dim, place in the dim)."""
        found: dict[str, list[tuple[bool, int, int, int]]] = {}
        for is_operand, tensors in ((True, self.operands), (False, self.results)):
            for t, dims in enumerate(tensors):
                for d, dim in enumerate(dims or ()):
                    for place, factor in enumerate(dim):
                        found.setdefault(factor, []).append((is_operand, t, d, place))
        return found

    @cached_property
    def result_factors(self) -> tuple[frozenset[str], ...]:
        return tuple(frozenset(f for dim in dims or () for f in dim) for dims in self.results)

    @cached_property
    def reductions(self) -> tuple[str, ...]:
        """The reduction of each result."""
        words = [word.strip() for word in self.reduce.split(",")]
        return tuple(words if len(words) == len(self.results) else words * len(self.results))

    def dim_sizes(self, dim: Dim) -> list[int]:
        return [self.sizes[f] for f in dim]


class Emit(Protocol):
    """What a rule's ``local`` function gets to write one rank's version of a node (made by code generation)."""

    node: Node
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def call(self, op: Any, *args: Any, **kwargs: Any) -> Any:
        """Write a call; gives its result, to be used in further calls."""

    def operand_bounds(self, operand: int, dim: int) -> tuple[int, int]:
        """Start and length of what this rank holds of a dim of an operand."""

    def result_bounds(self, result: int, dim: int) -> tuple[int, int]:
        """Start and length of what this rank holds of a dim of a result."""

    def operand_shape(self, operand: int) -> tuple[int, ...]:
        """The local shape of an operand."""

    def result_shape(self, result: int) -> tuple[int, ...]:
        """The local shape of a result."""


class Contiguous(Enum):
    """Which layout of its tensors a kernel takes: some give wrong numbers for another, without a word."""

    ANY = "any"
    LAST_DIM = "last dim"
    ALL = "all dims"


MakeRule = Callable[[Node], "ShardingRule | None"]
MakeLocal = Callable[[Emit], Any]


@dataclass(frozen=True)
class RuleEntry:
    """A rule in a rule book: for which ops, and how one rank's version of a node is written.

    ``shape_arg`` names an argument that is the result's shape, to be replaced by the local one; ``local``
    writes anything else; ``free`` says that the op costs next to nothing, so that it may be done once per placement
    that is needed of its result; ``contiguous`` which memory layout its kernel takes; ``expand`` says that where a
    whole factor is in the way the op may be taken apart into its decomposition (True: torch's own); ``discovered``
    that nobody wrote it: it is found by running the op.
    """

    ops: tuple[Any, ...]
    make: MakeRule
    text: str = ""
    shape_arg: int | None = None
    local: MakeLocal | None = None
    expand: bool | Callable[..., Any] = False
    free: bool = False
    contiguous: Contiguous = Contiguous.ANY
    discovered: bool = False


def rule(
    ops: Any,
    template: str | MakeRule,
    *,
    linear: str = "",
    reduce: str = "sum",
    moves_only: bool = False,
    shape_arg: int | None = None,
    local: MakeLocal | None = None,
    expand: bool | Callable[..., Any] = False,
    free: bool = False,
    contiguous: Contiguous = Contiguous.ANY,
) -> RuleEntry:
    """A :class:`RuleEntry` from a template such as ``"m k, k n -> m n"`` or from a function of the node.

    Args:
        ops: an ``OpOverload``, an ``OpOverloadPacket`` (all its overloads), or a tuple of them.

    Raises:
        Error: the template cannot be read.

    Example::

        rule(torch.ops.mylib.scale_rows.default, "n d, n -> n d", linear="0|1")
    """
    given = ops if isinstance(ops, tuple) else (ops,)
    if isinstance(template, str):
        parsed = Template(template, linear, reduce, moves_only)
        return RuleEntry(given, parsed, template, shape_arg, local, expand, free, contiguous)
    return RuleEntry(given, template, template.__name__, shape_arg, local, expand, free, contiguous)


def parse_linear(text: str) -> tuple[frozenset[int], ...]:
    return tuple(frozenset(int(i) for i in group.split("&")) for group in text.split("|")) if text else ()


@dataclass(frozen=True)
class Template:
    """A parsed template; calling it with a node gives the node's rule."""

    text: str
    linear: str = ""
    reduce: str = "sum"
    moves_only: bool = False
    operands: tuple[tuple[Dim, ...], ...] = field(init=False)
    results: tuple[tuple[Dim, ...], ...] = field(init=False)

    def __post_init__(self) -> None:
        left, arrow, right = self.text.partition("->")
        if not arrow:
            raise Error("a rule's template has no arrow", expected="such as 'm k, k n -> m n'", got=self.text)
        object.__setattr__(self, "operands", tuple(self._tensor(t) for t in left.split(",")) if left.strip() else ())
        object.__setattr__(self, "results", tuple(self._tensor(t) for t in right.split(",")))

    def _tensor(self, text: str) -> tuple[Dim, ...]:
        dims: list[Dim] = []
        compound_dim: list[str] | None = None
        for word in text.replace("(", " ( ").replace(")", " ) ").split():
            if word == "(":
                compound_dim = []
            elif word == ")":
                if compound_dim is None:
                    raise Error("a ')' without '(' in a rule's template", got=self.text)
                dims.append(tuple(compound_dim))
                compound_dim = None
            elif compound_dim is not None:
                compound_dim.append(word)
            else:
                dims.append(() if word == "1" else (word,))
        return tuple(dims)

    def __call__(self, node: Node) -> ShardingRule:
        slots = tensor_slots(node)
        if len(slots) != len(self.operands):
            raise Error(
                f"the rule of {op_name(node.op)} does not fit its tensor arguments",
                where=str(node.where),
                expected=f"{len(self.operands)} as in {self.text!r}",
                got=len(slots),
            )
        given = [(d, v.shape) for d, v in zip(self.operands, slots, strict=True) if v is not None]
        position = {slot: i for i, slot in enumerate(j for j, v in enumerate(slots) if v is not None)}
        made = [(d, v.shape) for d, v in zip(self.results, node.results, strict=False) if v is not None]
        tensors, sizes, whole = self._bind(given + made)
        operands, rest = tuple(tensors[: len(given)]), iter(tensors[len(given) :])
        results = tuple(None if v is None else next(rest) for v in node.results)
        linear = tuple(
            frozenset(position[i] for i in group if i in position)
            for group in parse_linear(self.linear)
            if any(i in position for i in group)
        )
        return ShardingRule(operands, results, sizes, frozenset(whole), linear, self.reduce, self.moves_only)

    def _bind(
        self, tensors: Sequence[tuple[tuple[Dim, ...], Sequence[int]]]
    ) -> tuple[list[tuple[Dim, ...]], dict[str, int], set[str]]:
        """The factors of each tensor's dims, the sizes of the factors, and those that are whole.

        Leading dims broadcast: a tensor may have fewer of them, or one of size 1 where another has more.
        """
        sizes: dict[str, int] = {}
        whole = {f[:-1] for dims, _ in tensors for dim in dims if not _is_lead(dim) for f in dim if f.endswith("!")}
        leads: dict[str, int] = {}
        for dims, shape in tensors:
            for dim in filter(_is_lead, dims):
                leads[_base(dim)] = max(leads.get(_base(dim), 0), len(shape) - len(dims) + 1)
        bound: list[tuple[Dim, ...]] = []
        for dims, shape in tensors:
            expanded: list[Dim] = []
            for dim in dims:
                if not _is_lead(dim):
                    expanded.append(tuple(f.rstrip("!") for f in dim))
                    continue
                count = len(shape) - len(dims) + 1
                names = [f"{_base(dim)}{i}" for i in range(leads[_base(dim)] - count, leads[_base(dim)])]
                for name, size in zip(names, shape[len(expanded) :], strict=False):
                    sizes[name] = size if sizes.get(name, 1) == 1 else sizes[name]
                if "!" in dim[0]:
                    whole.update(names)
                expanded.extend((name,) for name in names)
            if len(expanded) != len(shape):
                raise Error(
                    "a rule's template does not have as many dims as the tensor",
                    expected=f"{len(shape)} dims for shape {tuple(shape)}",
                    got=self.text,
                )
            bound.append(tuple(expanded))
        pairs = [
            (dim, size)
            for dims, (_, shape) in zip(bound, tensors, strict=True)
            for dim, size in zip(dims, shape, strict=True)
        ]
        self._solve(pairs, sizes)
        leading = {f"{base}{i}" for base, count in leads.items() for i in range(count)}
        return (
            [
                tuple(
                    () if size == 1 and dim and dim[0] in leading and sizes[dim[0]] != 1 else dim
                    for dim, size in zip(dims, shape, strict=True)
                )
                for dims, (_, shape) in zip(bound, tensors, strict=True)
            ],
            sizes,
            whole,
        )

    def _solve(self, pairs: Sequence[tuple[Dim, int]], sizes: dict[str, int]) -> None:
        """Find the sizes of all factors: each dim's size is the product of its factors'."""
        open_pairs = list(pairs)
        while open_pairs:
            left = []
            for dim, size in open_pairs:
                unknown = [f for f in dim if f not in sizes]
                known = math.prod(sizes[f] for f in dim if f in sizes)
                broadcast = size == 1 and len(dim) == 1 and not unknown
                if len(unknown) == 1 and (known == size == 0 or (known and size % known == 0)):
                    sizes[unknown[0]] = size // known if known else 1
                elif len(unknown) > 1:
                    left.append((dim, size))
                elif known != size and not broadcast:
                    raise Error(
                        "a tensor's dim does not fit the rule",
                        expected=f"{' '.join(dim)} = {known}",
                        got=f"size {size} in {self.text!r}",
                    )
            if len(left) == len(open_pairs):
                raise Error("a rule's template leaves sizes open", expected=f"the sizes of {left[0][0]}", got=self.text)
            open_pairs = left


def _is_lead(dim: Dim) -> bool:
    return bool(dim) and ".." in dim[0]


def _base(dim: Dim) -> str:
    return dim[0].replace("..", "").rstrip("!")


def tensor_slots(node: Node) -> list[Value | None]:
    """The tensor arguments that the op's schema names, in its order; None for an optional one that is not given."""
    schema = node.op._schema.arguments
    slots: list[Value | None] = []
    for i, argument in enumerate(schema):
        kind = str(argument.type)
        if "Tensor" not in kind:
            continue
        value = node.args[i] if i < len(node.args) else node.kwargs.get(argument.name)
        if "List" in kind:
            slots.extend(v if isinstance(v, Value) else None for v in value or ())
        else:
            slots.append(value if isinstance(value, Value) else None)
    return slots


Fallback = Callable[[Any], "RuleEntry | None"]


class RuleBook:
    """The rules by op: for an overload, for all overloads of a name, or (pointwise ops) by torch's tag.

    What has none of these is asked of the fallback, if the book has one.
    """

    def __init__(self, entries: Iterable[RuleEntry], pointwise: RuleEntry) -> None:
        self._pointwise = pointwise
        self._fallback: Fallback | None = None
        self._by_op: dict[Any, RuleEntry] = {}
        for entry in entries:
            for op in entry.ops:
                self._by_op[op] = entry

    def extended(self, entries: Iterable[RuleEntry]) -> RuleBook:
        """A new book in which ``entries`` stand beside these, and win."""
        book = RuleBook((), self._pointwise)
        book._by_op = dict(self._by_op)
        book._fallback = self._fallback
        for entry in entries:
            for op in entry.ops:
                book._by_op[op] = entry
        return book

    def with_fallback(self, fallback: Fallback) -> RuleBook:
        """A new book that asks ``fallback`` for what it does not hold."""
        book = self.extended(())
        book._fallback = fallback
        return book

    def entry(self, op: Any) -> RuleEntry | None:
        """The entry of an op, or None where there is no rule."""
        found = self._by_op.get(op)
        if found is None and isinstance(op, torch._ops.OpOverload):
            found = self._by_op.get(op.overloadpacket)
            if found is None and torch.Tag.pointwise in op.tags:
                found = self._pointwise
        if found is None and self._fallback is not None:
            found = self._fallback(op)
        return found

    def __iter__(self) -> Any:
        return iter(self._by_op.items())


def replicated(node: Node) -> ShardingRule:
    """The rule of an op that has none: nothing may be cut."""
    sizes: dict[str, int] = {}

    def dims(prefix: str, value: Value) -> tuple[Dim, ...]:
        names = [f"{prefix}{d}" for d in range(value.type.ndim)]
        sizes.update(zip(names, value.shape, strict=True))
        return tuple((name,) for name in names)

    operands = tuple(dims(f"a{i}_", v) for i, v in enumerate(node.operands))
    results = tuple(None if v is None else dims(f"r{i}_", v) for i, v in enumerate(node.results))
    return ShardingRule(operands, results, sizes, frozenset(sizes))


Cuts = Mapping[str, Cut]


def place(dims: tuple[Dim, ...], cuts: Cuts, rule: ShardingRule, mesh: Mesh) -> tuple[Cut, ...]:
    """The cuts of a tensor's dims that follow from the cuts of the factors."""
    placed = []
    for dim in dims:
        if len(dim) == 1:
            placed.append(cuts.get(dim[0], WHOLE))
        elif not any(f in cuts for f in dim):
            placed.append(WHOLE)
        else:
            parts: list[Part] = []
            for f in dim:
                parts.extend(cuts.get(f, WHOLE).sub(rule.sizes[f]))
            placed.append(compound(parts, mesh))
    return tuple(placed)


def strategy(
    rule: ShardingRule,
    cuts: Cuts,
    mesh: Mesh,
    partial: Mapping[str, tuple[str, frozenset[int]]] | None = None,
) -> Strategy:
    """How a node is computed when its factors are cut so, and operands are partial so.

    Args:
        cuts: factor -> cut. Over all factors, an axis at most once.
        partial: axis -> (reduction, the operands that are partial over it), one of ``rule.linear``'s groups.
    """
    partial = partial or {}
    operands = []
    for i, dims in enumerate(rule.operands):
        held = tuple((axis, op) for axis, (op, group) in partial.items() if i in group)
        operands.append(Spec(place(dims, cuts, rule, mesh), held))
    passed = tuple((axis, op) for axis, (op, _) in partial.items())
    results = []
    for present, made_dims, kind in zip(rule.result_factors, rule.results, rule.reductions, strict=True):
        if made_dims is None:
            continue
        lost = (cut for f, cut in cuts.items() if f not in present) if kind != SAME else ()
        made = tuple((axis, kind) for cut in lost for axis in cut.axes)
        ordered = sorted(passed + made, key=lambda pair: mesh.order(pair[0]))
        results.append(Spec(place(made_dims, cuts, rule, mesh), tuple(ordered)))
    return Strategy(tuple(operands), tuple(results), tuple((f, c.axes) for f, c in cuts.items() if c.axes))
