"""Rules as text: ``"m k, k n -> m n"`` says of each operand, then of each result, the factor of each dim.

m k        the dims of a tensor, in order            1     a dim of size one
(h d)      a dim that is the product of factors      k!    a factor that must be whole
n..        any number of dims, each its own factor; a tensor may have fewer of the first ones, or ones of size one
h*2        two dims; ``h*sizes``: as many as the argument is long; ``1*h``: as many as the factor has
k@dim      this dim stands where the argument says (or the number), the others around it in order. A list names
           several dims, None all. ``1@dim``: a dim of size one, if such are kept
k!causal   whole if the argument is true (``!reduction=1``: if it is 1)
~m n       a tensor that is broadcast to these dims: the first ones may be missing
x, ...     the same for each tensor that follows, if there are any
"""

from __future__ import annotations

import functools
import math
import re
import string
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from shardfx.ir.errors import Error
from shardfx.ir.graph import Node, Value, op_name

from .binding import Key, Mark, TemplateWord, Tensor, bind
from .sharding_rule import Linear, ShardingRule

ALL = frozenset({-1})
"""The group of all operands, written ``&``."""
WORD = re.compile(r"(\([^()]*\)|\w+)(\.\.|\*\w+)?(@-?\w+)?(!(?:\w+(?:=\w+)?)?)?")


def parse_linear(text: str) -> tuple[Linear, ...]:
    """``"0|1&2>0|3*k"``: the sets of operands that may be partial sums together, and the results that then are; the
    last one over the axes that shard ``k``."""
    if text == "&":
        return (Linear(ALL),)
    return tuple(map(_linear, text.split("|"))) if text else ()


def _linear(text: str) -> Linear:
    left, arrow, made = text.partition(">")
    given, _, along = left.partition("*")
    operands, results = (frozenset(int(i) for i in side.split("&") if side) for side in (given, made))
    return Linear(operands, results if arrow else None, frozenset(along.split()))


def parse_tensor(text: str, marks: dict[str, Mark] | None = None) -> Tensor:
    """The words of one tensor; factors that are whole are put into ``marks``."""
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
    """A factor: where it has size one, the op gives its first operand back."""
    unread: str = ""
    """``"ci>2"``: result number 2 is made without the factor ``ci``."""
    operands: tuple[Tensor, ...] = field(init=False, compare=False)
    results: tuple[Tensor, ...] = field(init=False, compare=False)
    more: tuple[bool, bool] = field(init=False, compare=False)
    marks: dict[str, Mark] = field(init=False, compare=False)
    """The factors that are whole: always, or by the value of an argument."""
    names: tuple[str, ...] = field(init=False, compare=False)
    """The arguments that the template asks for."""
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
        found = {
            "operands": tensors[0],
            "results": tensors[1],
            "more": more,
            "marks": marks,
            "names": tuple(dict.fromkeys(names)),
            "groups": parse_linear(self.linear),
        }
        for name, value in found.items():
            object.__setattr__(self, name, value)

    def __call__(self, node: Node, sizes: tuple[tuple[str, int], ...] = ()) -> ShardingRule:
        """The rule of a node. What would be a sum of booleans is their maximum: whether any is true.

        Args:
            sizes: those of factors that do not follow from the shapes.

        Raises:
            Error: the node has other tensors than the template.
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


@functools.lru_cache(maxsize=8192)
def _rule(template: Template, key: Key) -> ShardingRule:
    """The rule of all nodes of the same shapes and arguments."""
    operands, results, sizes, whole = bind(template.operands, template.results, template.marks, key)
    position = {slot: i for i, slot in enumerate(j for j, s in enumerate(key.operands) if not isinstance(s, bool))}
    numbers = {j for j, shape in enumerate(key.operands) if shape is True}
    empty = [position[j] for j, shape in enumerate(key.operands) if not isinstance(shape, bool) and 0 in shape]
    linear = [Linear(frozenset({i}), frozenset()) for i in empty]  # there is nothing in them to be summed
    there = {i for i, shape in enumerate(key.results) if shape is not None}
    for group, said, letters in template.groups:
        asked = set(range(len(key.operands))) if group is ALL else group
        given = frozenset(position[i] for i in asked if i in position)
        made = said if said is None else said & there
        along = frozenset(f for f in sizes if f.rstrip(string.digits) in letters)
        stops = numbers.union(*(key.barred[i] for i in (there if made is None else made)))
        if not (along and len(given) == len(asked) if letters else given):
            continue
        if made == frozenset() or not stops & asked:  # what adds a number is not linear in the rest
            linear.append(Linear(given, made, along))
    moves = template.moves_only
    if template.identity and all(n == 1 for f, n in sizes.items() if f.rstrip(string.digits) == template.identity):
        moves, linear = True, [] if 0 in key.barred[0] else [Linear(frozenset({0}), frozenset({0}))]
    letter, _, made_without = template.unread.partition(">")
    unread = {f: frozenset({int(made_without)}) for f in sizes if letter and f.rstrip(string.digits) == letter}
    return ShardingRule(
        operands, results, sizes, whole, tuple(linear), template.reduce, moves, template.transparent, unread
    )


def barred(node: Node, slots: Sequence[Any]) -> tuple[frozenset[int], ...]:
    """For each result the tensor arguments that may be no partial sums, whatever the op: terms that are rounded to the
    result's dtype are not those of the rounded sum, and numbers that are infinite make NaN of terms of two signs."""
    if any(isinstance(each, float) and not math.isfinite(each) for each in (*node.args, *node.kwargs.values())):
        return (frozenset(range(len(slots))),) * len(node.results)
    given = [(i, each.type.dtype) for i, each in enumerate(slots) if isinstance(each, Value)]
    return tuple(
        frozenset(i for i, dtype in given if not keeps_precision(dtype, value.type.dtype)) if value else frozenset()
        for value in node.results
    )


@functools.cache
def keeps_precision(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether a number of the one dtype is one of the other, but for its imaginary part."""
    if not (source.is_floating_point or source.is_complex):
        return True
    source, target = (each.to_real() if each.is_complex else each for each in (source, target))
    if source == target or not target.is_floating_point:
        return source == target
    own, other = torch.finfo(source), torch.finfo(target)
    return other.eps <= own.eps and other.max >= own.max and other.smallest_normal <= own.smallest_normal


template = functools.cache(Template)
"""A template, parsed once."""


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, (list, tuple)) else value


# ---- what an op's schema says of the arguments of a node -------------------------------------------------------


@functools.cache
def _places(op: Any) -> dict[str, tuple[int, Any]]:
    return {each.name: (i, each.default_value) for i, each in enumerate(op._schema.arguments)}


@functools.cache
def _tensors(op: Any) -> tuple[tuple[int, str, bool], ...]:
    """Place and name of the arguments that are tensors, and whether each is a list of them."""
    kinds = ((i, each.name, str(each.type)) for i, each in enumerate(op._schema.arguments))
    return tuple((i, name, "List" in kind) for i, name, kind in kinds if "Tensor" in kind)


@functools.cache
def has_argument(op: Any, name: str) -> bool:
    """Whether the op, or another overload of it, has an argument of that name."""
    packet = getattr(op, "overloadpacket", None)
    overloads = [getattr(packet, each) for each in packet.overloads()] if packet is not None else [op]
    return any(name in _places(each) for each in overloads)


def argument(node: Node, *called: str) -> Any:
    """The value of the argument that the op's schema calls so, by the first of the names that it has; its default if it
    is not given, None if there is none."""
    places = _places(node.op)
    for name in called:
        if name in places:
            i, default = places[name]
            return node.args[i] if i < len(node.args) else node.kwargs.get(name, default)
    return None


def given_tensors(node: Node) -> list[Any]:
    """What is given for each tensor that the schema names, in its order: a value, a number in its stead, or None."""
    slots: list[Any] = []
    for i, name, many in _tensors(node.op):
        value = node.args[i] if i < len(node.args) else node.kwargs.get(name)
        if many:
            slots.extend(value or ())
        else:
            slots.append(value)
    return slots


def tensor_slots(node: Node) -> list[Value | None]:
    """The tensor arguments that the op's schema names, in its order; None for an optional one that is not given."""
    return [each if isinstance(each, Value) else None for each in given_tensors(node)]
