"""The functions that a call of a class leads to, what their code names, and what counts of what they may read."""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dis import get_instructions
from functools import cache
from types import CodeType, FunctionType
from typing import Any, NamedTuple

from torch import nn

from .reached import reached

WHICH = "is"
"""Stands among the names of code that asks which of some values are one."""
DOTTED = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")
SET: dict[type, frozenset[str]] = {}


class Names:
    """What code names, and of which objects all counts: code names their attributes only when it runs.

    ``every``: of all objects; ``kinds``: of those of these classes.
    """

    def __init__(self) -> None:
        self.named = set[str]()
        self.kinds: tuple[type, ...] = ()
        self.every = False

    @property
    def size(self) -> tuple[int, int, bool]:
        """Grows with what counts."""
        return len(self.named), len(self.kinds), self.every

    def of(self, thing: object, there: Iterable[str]) -> list[str]:
        """Which of these attributes of an object, or of a class, count."""
        kind = thing if isinstance(thing, type) else type(thing)
        every = self.every or (bool(self.kinds) and issubclass(kind, self.kinds))
        return [name for name in there if every or name in self.named]

    def all_of(self, kind: type) -> None:
        """From here on all attributes of a class's objects count."""
        if kind not in self.kinds:
            self.kinds = (*self.kinds, kind)


class Once(set[object]):
    """What was met already."""

    def take(self, thing: object) -> bool:
        """Whether it is met for the first time."""
        before = len(self)
        self.add(thing)
        return len(self) > before


def led_to(kind: type, begin: Iterable[str] = ("forward", "__call__")) -> list[FunctionType]:
    """The functions of a class that a call of it, or of its methods ``begin``, leads to."""
    names, front, met = set[str](), [*begin], dict[FunctionType, None]()
    there = {name: held for each in (*_upwards(type(kind)), *_upwards(kind)) for name, held in vars(each).items()}
    while front:
        held = there.get(front.pop())
        for function in within(getattr(held, "fget", held)):
            if function not in met and getattr(nn.Module, function.__name__, None) is not function:
                met[function] = None
                used = {name for code in codes(function.__code__) for name in named_in(code)}
                front += used - names
                names |= used
    return list(met)


def _upwards(kind: type) -> Iterator[type]:
    """A class behind those that it is made of, so that what it holds itself comes last."""
    return reversed(kind.__mro__)


def set_by_calls(kind: type) -> frozenset[str]:
    """The names of attributes that code which a call of a class leads to sets, of itself or of something else."""
    if kind not in SET:
        SET[kind] = _set_by_calls(kind)
    return SET[kind]


def _set_by_calls(kind: type) -> frozenset[str]:
    own = (code for function in led_to(kind) for code in codes(function.__code__))
    return frozenset(each.argval for code in own for each in get_instructions(code) if each.opname == "STORE_ATTR")


def within(thing: Any) -> Iterator[FunctionType]:
    """A function, and those that it is made of by decorators."""
    found: Any = inspect.unwrap(thing) if callable(thing) and not isinstance(thing, type) else None
    made = [getattr(found, "__func__", found)]
    made += [cell_of(cell) for cell in getattr(made[0], "__closure__", None) or ()]
    yield from (each for each in made if isinstance(each, FunctionType))


def cell_of(cell: Any) -> object:
    """What a cell of a closure holds; None, where nothing was put into it yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def codes(code: CodeType) -> Iterator[CodeType]:
    """The code of a function, and of those within it."""
    yield code
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from codes(each)


@cache
def read_of_module(code: CodeType) -> frozenset[str]:
    """What code, and the code within it, reads of its module."""
    every = (each for inside in codes(code) for each in get_instructions(inside))
    return frozenset(each.argval for each in every if each.opname in ("LOAD_GLOBAL", "LOAD_NAME"))


@cache
def set_in_module(code: CodeType) -> frozenset[str]:
    """What code, and the code within it, sets in its module."""
    every = (each for inside in codes(code) for each in get_instructions(inside))
    return frozenset(each.argval for each in every if each.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"))


@cache
def named_in(code: CodeType) -> frozenset[str]:
    """What code names, as a name or in a text (``"a"``, ``"a.b"``), alone or in a tuple of them."""
    return frozenset((*code.co_names, *_texts(code.co_consts), *([WHICH] if _asks_which(code) else ())))


def asks_which(named: Collection[str]) -> bool:
    """Whether code that names these asks which of some values are one."""
    return not {WHICH, "id", "is_set_to"}.isdisjoint(named)


def one_where_asked(given: Sequence[object], named: Collection[str]) -> tuple[int, ...]:
    """For each of some values the first that is the same one; none, if all are others, or the code does not ask."""
    first: dict[int, int] = {}
    found = tuple([first.setdefault(id(each), number) for number, each in enumerate(given)])
    return found if len(first) < len(found) and asks_which(named) else ()


def _asks_which(code: CodeType) -> bool:
    """Whether code asks if a value is another one (``a is b``, ``a in (b, c)``), none of which it names itself."""
    before = ""
    for each in get_instructions(code):
        if each.opname == "IS_OP" and before not in ("LOAD_CONST", "LOAD_GLOBAL"):
            return True
        if each.opname == "CONTAINS_OP" and before in ("BUILD_LIST", "BUILD_TUPLE", "BUILD_SET"):
            return True
        before = each.opname
    return False


def _texts(constants: Collection[object]) -> Iterator[str]:
    for each in constants:
        if isinstance(each, (tuple, frozenset)):
            yield from _texts(each)
        elif isinstance(each, str) and DOTTED.fullmatch(each):
            yield from each.split(".")


class AtRunTime(NamedTuple):
    """Of what code reaches something by names that it makes up when it runs: of the object whose method it is, of other
    objects, of its module."""

    own: bool
    others: bool
    globals: bool


def names_at_run_time(function: FunctionType) -> AtRunTime:
    """What a function's code, and the code within it, reaches by names made at run time."""
    found = [reached(code) for code in codes(function.__code__)]
    return AtRunTime(*(any(getattr(each, name) for each in found) for name in AtRunTime._fields))
