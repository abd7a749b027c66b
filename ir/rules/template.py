"""Rules as text: ``"m k, k n -> m n"`` becomes the rule of a node.

m k        the dims of an operand, in order          n..   any number of leading dims
(h d)      a dim that is the product of factors      1     a dim of size one
k!         a factor that must be whole
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from shardfx.ir.errors import Error
from shardfx.ir.graph import Node, Value, op_name

from .sharding_rule import Dim, ShardingRule


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
