"""Rule templates: ``"m k, k n -> m n"`` gives the factor of each dim, operand by operand, then result by result.

m k        the dims of a tensor, in order            1     a dim of size one
(h d)      a dim that is the product of factors      k!    a factor that needs replication
n..        any number of dims, each its own factor; a tensor may have fewer of the first ones, or ones of size one
h*2        two dims; ``h*sizes``: as many as the argument is long; ``1*h``: as many as the factor has
k@dim      this dim stands where the argument says (or the number), the others around it in order. A list names
           several dims, None all. ``1@dim``: a dim of size one, if such are kept
k!causal   replicated if the argument is true (``!reduction=1``: if it is 1)
~m n       a tensor that is broadcast to these dims: the first ones may be missing
x, ...     the same for each tensor that follows, if there are any
"""

from __future__ import annotations

import functools
import math
import re
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from shardfx.ir.errors import Error
from shardfx.ir.graph import Node, Value, op_name

from .sharding_rule import Dim, Linear, ShardingRule

Shape = tuple[int, ...]
Dims = tuple[Dim, ...]
Mark = tuple[str, str]
"""The condition for a factor to be replicated: an argument is true, or has a value; always, if it names none."""
LEFT_OUT = "none"
"""The factor of an empty vector that stands for an omitted result (or operand)."""


class TemplateWord(NamedTuple):
    """One word of a template: ``(h d)``, ``n..``, ``h*2``, ``k@dim``; without factors it is a dim of size one."""

    factors: Dim
    many: str = ""
    at: str = ""


class Tensor(NamedTuple):
    """The words of one tensor's dims; a ``broadcast`` one may lack the first."""

    words: tuple[TemplateWord, ...]
    broadcast: bool = False

    def factors(self, sizes: Mapping[str, int]) -> list[Dim]:
        """The factors of each dim, for a rule with these sizes; ``h*2`` is ``h0 h1``."""
        found = []
        for factors, many, _ in self.words:
            numbers = range(int(many)) if many else ("",)
            found += [tuple(n for f in factors if sizes.get(n := f"{f}{i}", 1) != 1) for i in numbers]
        return found

    def __str__(self) -> str:
        return " ".join((" ".join(factors) or "1") + (f"*{many}" if many else "") for factors, many, _ in self.words)


class Key(NamedTuple):
    """The cache key of a node's rule: all that it depends on.

    ``operands`` has for each tensor argument its shape, False if it is missing, True if it is a number; ``barred`` has
    for each result the operands that pass no partial sum to it, whatever the op.
    """

    operands: tuple[Shape | bool, ...]
    results: tuple[Shape | None, ...]
    arguments: tuple[tuple[str, Any], ...] = ()
    sizes: tuple[tuple[str, int], ...] = ()
    barred: tuple[frozenset[int], ...] = ()


ALL = frozenset({-1})
"""The group of all operands, written ``&``."""
WORD = re.compile(r"(\([^()]*\)|\w+)(\.\.|\*\w+)?(@-?\w+)?(!(?:\w+(?:=\w+)?)?)?")


def parse_linear(text: str) -> tuple[Linear, ...]:
    """Parse ``"0|1&2>0|3*k"``: the sets of operands that may be partial sums together, and the results that then are;
    the last one over the axes that shard ``k``."""
    if text == "&":
        return (Linear(ALL),)
    return tuple(map(_linear, text.split("|"))) if text else ()


def _linear(text: str) -> Linear:
    left, arrow, made = text.partition(">")
    partial, _, along = left.partition("*")
    operands, results = (frozenset(int(i) for i in side.split("&") if side) for side in (partial, made))
    return Linear(operands, results if arrow else None, frozenset(along.split()))


def parse_tensor(text: str, marks: dict[str, Mark] | None = None) -> Tensor:
    """Parse the words of one tensor; replicated factors are added to ``marks``."""
    found = {} if marks is None else marks
    words = []
    for body, count, at, mark in WORD.findall(text):
        inside = [factor.partition("!") for factor in body.strip("()").split()]
        factors = tuple(name for name, _, _ in inside)
        found.update({name: _mark(condition) for name, sign, condition in inside if sign})
        if mark:
            found.update(dict.fromkeys(factors, _mark(mark[1:])))
        words.append(TemplateWord(() if factors == ("1",) else factors, count.lstrip("*"), at[1:]))
    if WORD.sub("", text).strip() not in ("", "~"):
        raise Error("a rule's template has a word that cannot be read", expected="such as k! or n..", got=text)
    return Tensor(tuple(words), text.startswith("~"))


def _mark(condition: str) -> Mark:
    called, _, value = condition.partition("=")
    return called, value


@dataclass(frozen=True)
class Template:
    """A parsed template; calling it with a node gives the node's rule."""

    text: str
    linear: str = ""
    reduce: str = "sum"
    moves_only: bool = False
    transparent: bool = False
    identity: str = ""
    """A factor; if it has size one, the op returns its first operand."""
    unread: str = ""
    """``"ci>2"``: result number 2 does not depend on the factor ``ci``."""
    operands: tuple[Tensor, ...] = field(init=False, compare=False)
    results: tuple[Tensor, ...] = field(init=False, compare=False)
    more: tuple[bool, bool] = field(init=False, compare=False)
    marks: dict[str, Mark] = field(init=False, compare=False)
    """The replicated factors: always, or by the value of an argument."""
    names: tuple[str, ...] = field(init=False, compare=False)
    """The names of arguments in the template."""
    groups: tuple[Linear, ...] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        left, arrow, right = self.text.partition("->")
        if not arrow:
            raise Error("a rule's template has no arrow", expected="such as 'm k, k n -> m n'", got=self.text)
        sides = [[t.strip() for t in left.split(",")] if left.strip() else [], [t.strip() for t in right.split(",")]]
        more = tuple(bool(side) and side[-1] == "..." for side in sides)
        marks: dict[str, Mark] = {}
        tensors = [
            tuple(parse_tensor(t, marks) for t in (side[:-1] if repeats else side))
            for side, repeats in zip(sides, more, strict=True)
        ]
        words = [word for side in tensors for tensor in side for word in tensor.words]
        named = [*(w.at for w in words), *(w.many for w in words), *(name for name, _ in marks.values())]
        letters = {"", "..", *(factor for word in words for factor in word.factors)}
        names = (name for name in named if name not in letters and not name.lstrip("-").isdigit())
        self.__dict__.update(operands=tensors[0], results=tensors[1], more=more, marks=marks)
        self.__dict__.update(names=tuple(dict.fromkeys(names)), groups=parse_linear(self.linear))

    def __call__(self, node: Node, sizes: tuple[tuple[str, int], ...] = ()) -> ShardingRule:
        """The rule of a node. A sum of booleans is their maximum.

        Args:
            sizes: those of factors that cannot be inferred from the shapes.

        Raises:
            Error: the node's tensors do not match the template.
        """
        if self.reduce == "sum" and node.outs and all(value.type.dtype is torch.bool for value in node.outs):
            return replace(self, reduce="max")(node, sizes)
        slots = given_tensors(node)
        if len(slots) < len(self.operands) - self.more[0] or (len(slots) > len(self.operands) and not self.more[0]):
            what = f"the rule of {op_name(node.op)} does not fit its tensor arguments"
            where = str(node.where)
            raise Error(what, where=where, expected=f"{len(self.operands)} as in {self.text!r}", got=len(slots))
        unknown = [name for name in self.names if not has_argument(node.op, name)]
        if unknown:
            what = f"the rule of {op_name(node.op)} names an argument that the op does not have"
            expected = ", ".join(each.name for each in node.op._schema.arguments)
            raise Error(what, expected=expected, got=f"{', '.join(unknown)} in {self.text!r}")
        arguments = tuple((name, _frozen(argument(node, name))) for name in self.names)
        shapes = tuple(each.shape if isinstance(each, Value) else each is not None for each in slots)
        made = tuple(None if value is None else value.shape for value in node.results)
        return _rule(
            self, Key(shapes, made, arguments, sizes, barred(node, slots) if self.groups or self.identity else ())
        )


class Binding:
    """The binding of a template's words to sizes, tensor by tensor."""

    def __init__(self, marks: Mapping[str, Mark], key: Key) -> None:
        self.arguments = dict(key.arguments)
        self.sizes = dict(key.sizes)
        self.marked = {letter for letter, mark in marks.items() if self._holds(*mark)} | {LEFT_OUT}
        self.replicated: set[str] = set()
        self.lead: dict[str, int] = {}
        """The number of dims that ``n..`` stands for: the maximum over the tensors."""
        self.fixed: dict[str, int] = {}
        """The number of dims that ``h*2`` stands for, and of those that an argument names."""

    def _holds(self, called: str, value: str) -> bool:
        found = self.arguments.get(called)
        return not called or (str(found) == value if value else bool(found))

    def _places(self, at: str, ndim: int) -> list[int]:
        """The dims that an argument (or an integer) names."""
        value = self.arguments[at] if at in self.arguments else int(at)
        if value is None or value == ():
            return list(range(ndim))
        return [d % ndim for d in (value if isinstance(value, tuple) else (value,))] if ndim else []

    def counts(self, tensor: Tensor, shape: Shape) -> list[int]:
        """The number of dims of a tensor that each word stands for."""
        found: list[int] = []
        slack = kept = None
        for i, (factors, many, at) in enumerate(tensor.words):
            if at:
                named = len(self._places(at, len(shape)))
                if factors:
                    self.fixed[f"@{at}"] = named
                else:
                    kept, named = i, self.fixed.get(f"@{at}", named)
                found.append(named)
            elif not many:
                found.append(1)
            elif many != "..":
                found.append(self._number(many))
                if factors:
                    self.fixed[factors[0]] = found[-1]
            else:
                found.append(self.fixed.get(factors[0], 0))
                slack = slack if factors[0] in self.fixed else i
        lead = tensor.words[slack].factors[0] if slack is not None else ""
        if kept is not None and len(shape) != sum(found) + self.lead.get(lead, 0):
            found[kept] = 0
        if slack is not None:
            found[slack] = max(len(shape) - sum(found), 0)
            self.lead[lead] = max(self.lead.get(lead, 0), found[slack])
        missing = sum(found) - len(shape)
        for i in range(len(found) if missing > 0 and tensor.broadcast else 0):
            less = min(found[i], missing)
            found[i] -= less
            missing -= less
        if missing:
            what = "a rule's template does not have as many dims as the tensor"
            raise Error(what, expected=f"{len(shape)} dims for shape {shape}", got=str(tensor))
        return found

    def _number(self, many: str) -> int:
        if many.isdigit():
            return int(many)
        if many in self.fixed:
            return self.fixed[many]
        value = self.arguments[many]
        return len(value) if isinstance(value, tuple) else int(value)

    def dims(self, tensor: Tensor, shape: Shape, counts: Sequence[int]) -> Dims:
        """The factors of each dim of a tensor."""
        placed: dict[int, Dim] = {}
        rest: list[Dim] = []
        for (factors, many, at), n in zip(tensor.words, counts, strict=True):
            if not many and not isinstance(self.arguments.get(at, 0) if at else 0, (tuple, type(None))):
                names = [factors] * n
            else:
                first = self.lead.get(factors[0], n) - n if many == ".." else 0
                names = [tuple([f"{f}{first + j}" for f in factors]) for j in range(n)]
            for i, f in enumerate(factors):
                if f in self.marked:
                    self.replicated.update(each[i] for each in names)
            if at:
                placed.update(zip(self._places(at, len(shape)), names, strict=False))
            else:
                rest += names
        if not placed:
            return tuple(rest)
        others = iter(rest)
        return tuple([placed[d] if d in placed else next(others) for d in range(len(shape))])

    def solve(self, pairs: Sequence[tuple[Dim, int]]) -> None:
        """Infer the sizes of all factors: a dim's size is the product of its factors', or one, which broadcasts."""
        sizes = self.sizes
        for dim, size in pairs:
            if len(dim) == 1 and sizes.setdefault(dim[0], size) == 1:
                sizes[dim[0]] = size
        left = [(dim, size) for dim, size in pairs if size != 1 and dim and (len(dim) > 1 or size != sizes[dim[0]])]
        ones = {f for dim, size in pairs if size == 1 for f in dim}
        while left:
            unsolved = []
            for dim, size in left:
                unknown = [f for f in dim if f not in sizes]
                known = math.prod(sizes[f] for f in dim if f in sizes)
                if len(unknown) == 1 and (known == size == 0 or (known and size % known == 0)):
                    sizes[unknown[0]] = size // known if known else 1
                elif len(unknown) > 1:
                    unsolved.append((dim, size))
                elif known != size:
                    raise Error("a tensor's dim does not fit the rule", expected=f"{' '.join(dim)} = {known}", got=size)
            if len(unsolved) == len(left):
                if not ones <= sizes.keys():
                    sizes.update(dict.fromkeys(ones - sizes.keys(), 1))
                    continue
                raise Error("a rule's template leaves sizes open", expected=f"the sizes of {left[0][0]}")
            left = unsolved
        sizes.update(dict.fromkeys(ones - sizes.keys(), 1))

    def held(self, dims: Dims, shape: Shape) -> Dims:
        """The factors of each dim, without those of size one in a product, and without broadcast ones."""
        sizes = self.sizes
        return tuple(
            [
                (dim if size != 1 or sizes[dim[0]] == 1 else ())
                if len(dim) == 1
                else tuple([f for f in dim if sizes[f] != 1] if size != 1 else ())
                for dim, size in zip(dims, shape, strict=True)
            ]
        )


def bind(
    operands: Sequence[Tensor], results: Sequence[Tensor], marks: Mapping[str, Mark], key: Key
) -> tuple[tuple[Dims, ...], tuple[Dims | None, ...], dict[str, int], frozenset[str]]:
    """The factors of the dims of operands and of results, the sizes of the factors, and the replicated ones.

    Raises:
        Error: the tensors do not match the words.
    """
    shapes = [(operands[min(i, len(operands) - 1)], s) for i, s in enumerate(key.operands) if not isinstance(s, bool)]
    made = [(results[min(i, len(results) - 1)], s) for i, s in enumerate(key.results) if s is not None]
    tensors = shapes + made
    if (0,) in key.results or (0,) in key.operands[1:]:
        some = bool(shapes) and 0 not in shapes[0][1]
        absent = Tensor((TemplateWord((LEFT_OUT,)),))
        no_vector = [not t.broadcast and sum(not word.many for word in t.words) > 1 for t, _ in tensors]
        tensors = [
            (absent if s == (0,) and (some or dims) else t, s) for (t, s), dims in zip(tensors, no_vector, strict=True)
        ]
    binding = Binding(marks, key)
    counts = [binding.counts(tensor, shape) for tensor, shape in tensors]
    bound = [binding.dims(*each, n) for each, n in zip(tensors, counts, strict=True)]
    binding.solve([pair for dims, (_, s) in zip(bound, tensors, strict=True) for pair in zip(dims, s, strict=True)])
    stored = [binding.held(dims, shape) for dims, (_, shape) in zip(bound, tensors, strict=True)]
    rest = iter(stored[len(shapes) :])
    placed = tuple([None if s is None else next(rest) for s in key.results])
    sizes = {f: binding.sizes[f] for dims in stored for dim in dims for f in dim}
    return tuple(stored[: len(shapes)]), placed, sizes, frozenset(binding.replicated & sizes.keys())


@functools.lru_cache(maxsize=8192)
def _rule(template: Template, key: Key) -> ShardingRule:
    """The rule of all nodes with the same shapes and arguments, cached."""
    operands, results, sizes, full = bind(template.operands, template.results, template.marks, key)
    position = {slot: i for i, slot in enumerate(j for j, s in enumerate(key.operands) if not isinstance(s, bool))}
    numbers = {j for j, shape in enumerate(key.operands) if shape is True}
    empty = [position[j] for j, shape in enumerate(key.operands) if not isinstance(shape, bool) and 0 in shape]
    linear = [Linear(frozenset({i}), frozenset()) for i in empty]  # there is nothing in them to be summed
    there = {i for i, shape in enumerate(key.results) if shape is not None}
    for group, said, letters in template.groups:
        asked = set(range(len(key.operands))) if group is ALL else group
        operands_of_group = frozenset(position[i] for i in asked if i in position)
        made = said if said is None else said & there
        along = frozenset(f for f in sizes if f.rstrip(string.digits) in letters)
        stops = numbers.union(*(key.barred[i] for i in (there if made is None else made)))
        if not (along and len(operands_of_group) == len(asked) if letters else operands_of_group):
            continue
        if made == frozenset() or not stops & asked:  # what adds a number is not linear in the rest
            linear.append(Linear(operands_of_group, made, along))
    moves = template.moves_only
    if template.identity and all(n == 1 for f, n in sizes.items() if f.rstrip(string.digits) == template.identity):
        moves, linear = True, [] if 0 in key.barred[0] else [Linear(frozenset({0}), frozenset({0}))]
    letter, _, made_without = template.unread.partition(">")
    unread = {f: frozenset({int(made_without)}) for f in sizes if letter and f.rstrip(string.digits) == letter}
    return ShardingRule(
        operands, results, sizes, full, tuple(linear), template.reduce, moves, template.transparent, unread
    )


def barred(node: Node, slots: Sequence[Any]) -> tuple[frozenset[int], ...]:
    """The tensor arguments that may not be partial sums for each result, whatever the op: terms rounded to the result's
    dtype do not add up to the rounded sum, and infinite factors make NaN of terms of both signs."""
    if any(isinstance(each, float) and not math.isfinite(each) for each in (*node.args, *node.kwargs.values())):
        return (frozenset(range(len(slots))),) * len(node.results)
    dtypes = [(i, each.type.dtype) for i, each in enumerate(slots) if isinstance(each, Value)]
    return tuple(
        frozenset(i for i, dtype in dtypes if not keeps_precision(dtype, value.type.dtype)) if value else frozenset()
        for value in node.results
    )


@functools.cache
def keeps_precision(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether one dtype represents all numbers of the other, apart from their imaginary part."""
    if not (source.is_floating_point or source.is_complex):
        return True
    source, target = (each.to_real() if each.is_complex else each for each in (source, target))
    if source == target or not target.is_floating_point:
        return source == target
    own, other = torch.finfo(source), torch.finfo(target)
    return other.eps <= own.eps and other.max >= own.max and other.smallest_normal <= own.smallest_normal


template = functools.cache(Template)
"""The cached parser of templates."""


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, (list, tuple)) else value


# ---- arguments by the schema of an op ---------------------------------------------------------------------------


@functools.cache
def _places(op: Any) -> dict[str, tuple[int, Any]]:
    return {each.name: (i, each.default_value) for i, each in enumerate(op._schema.arguments)}


@functools.cache
def _tensors(op: Any) -> tuple[tuple[int, str, bool], ...]:
    """Index and name of the arguments that are tensors, and whether each is a list of them."""
    kinds = ((i, each.name, str(each.type)) for i, each in enumerate(op._schema.arguments))
    return tuple((i, name, "List" in kind) for i, name, kind in kinds if "Tensor" in kind)


@functools.cache
def has_argument(op: Any, name: str) -> bool:
    """Whether the op, or another of its overloads, has an argument of that name."""
    packet = getattr(op, "overloadpacket", None)
    overloads = [getattr(packet, each) for each in packet.overloads()] if packet is not None else [op]
    return any(name in _places(each) for each in overloads)


def argument(node: Node, *called: str) -> Any:
    """An argument by its name in the op's schema (the first of several that it has); its default if it is missing, None
    if the op has none of these."""
    places = _places(node.op)
    for name in called:
        if name in places:
            i, default = places[name]
            return node.args[i] if i < len(node.args) else node.kwargs.get(name, default)
    return None


def given_tensors(node: Node) -> list[Any]:
    """The arguments for all tensor parameters of the schema, in order: a value, a number, or None."""
    slots: list[Any] = []
    for i, name, many in _tensors(node.op):
        value = node.args[i] if i < len(node.args) else node.kwargs.get(name)
        if many:
            slots.extend(value or ())
        else:
            slots.append(value)
    return slots


def tensor_slots(node: Node) -> list[Value | None]:
    """The tensor arguments of the schema, in its order; None for a missing optional one."""
    return [each if isinstance(each, Value) else None for each in given_tensors(node)]
