"""Bytecode analysis: the functions that a call leads to, and what their code names and reaches.

Chains of names (``torch.backends.cudnn.benchmark``), calls of such chains without arguments, and whether attributes are
named only at run time:

    getattr(self, "_".join(parts))      vars(self)      self.__dict__[key]      operator.attrgetter(path)(self)

The code is followed once from its beginning to its end, with a stack of what is known of each value. Where that is
lost, a name counts as made at run time: more is looked at then, never less.
"""

from __future__ import annotations

import dis
import inspect
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from dis import get_instructions
from functools import cache
from types import CodeType, FunctionType
from typing import Any, NamedTuple

from torch import nn

WHICH = "is"
"""Among the names of code: it compares identities of values."""
DOTTED = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")
SET: dict[type, frozenset[str]] = {}


class CodeNames:
    """Attribute names in code, and the objects of which all attributes count, for code names them only at run time.

    ``every``: all objects; ``kinds``: those of these classes.
    """

    def __init__(self) -> None:
        self.named = set[str]()
        self.kinds: tuple[type, ...] = ()
        self.every = False

    @property
    def size(self) -> tuple[int, int, bool]:
        """A key that grows with what counts."""
        return len(self.named), len(self.kinds), self.every

    def of(self, thing: object, there: Iterable[str]) -> list[str]:
        """Which of these attributes of an object, or of a class, count."""
        kind = thing if isinstance(thing, type) else type(thing)
        every = self.every or (bool(self.kinds) and issubclass(kind, self.kinds))
        return [name for name in there if every or name in self.named]

    def all_of(self, kind: type) -> None:
        """Have all attributes of a class's objects count."""
        if kind not in self.kinds:
            self.kinds = (*self.kinds, kind)


class FirstTime(set[object]):
    """A set that says what is new."""

    def take(self, thing: object) -> bool:
        """Whether it is met for the first time."""
        before = len(self)
        self.add(thing)
        return len(self) > before


def led_to(kind: type, begin: Iterable[str] = ("forward", "__call__")) -> list[FunctionType]:
    """The functions of a class that a call of it, or of its methods ``begin``, leads to."""
    names, front, met = set[str](), [*begin], dict[FunctionType, None]()
    there = {name: member for each in (*_upwards(type(kind)), *_upwards(kind)) for name, member in vars(each).items()}
    while front:
        member = there.get(front.pop())
        for function in within(getattr(member, "fget", member)):
            if function not in met and getattr(nn.Module, function.__name__, None) is not function:
                met[function] = None
                used = {name for code in codes(function.__code__) for name in named_in(code)}
                front += used - names
                names |= used
    return list(met)


def _upwards(kind: type) -> Iterator[type]:
    """The MRO from the base on, so that own attributes come last."""
    return reversed(kind.__mro__)


def set_by_calls(kind: type) -> frozenset[str]:
    """The attributes that code which a call of a class leads to stores, on any object."""
    if kind not in SET:
        SET[kind] = _set_by_calls(kind)
    return SET[kind]


def _set_by_calls(kind: type) -> frozenset[str]:
    own = (code for function in led_to(kind) for code in codes(function.__code__))
    return frozenset(each.argval for code in own for each in get_instructions(code) if each.opname == "STORE_ATTR")


def within(thing: Any) -> Iterator[FunctionType]:
    """A function, and those that its decorators wrap."""
    found: Any = inspect.unwrap(thing) if callable(thing) and not isinstance(thing, type) else None
    made = [getattr(found, "__func__", found)]
    made += [cell_of(cell) for cell in getattr(made[0], "__closure__", None) or ()]
    yield from (each for each in made if isinstance(each, FunctionType))


def cell_of(cell: Any, empty: object = None) -> object:
    """The content of a closure's cell, or ``empty``."""
    try:
        return cell.cell_contents
    except ValueError:
        return empty


def codes(code: CodeType) -> Iterator[CodeType]:
    """The code of a function, and of those within it."""
    yield code
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from codes(each)


@cache
def read_of_module(code: CodeType) -> frozenset[str]:
    """The globals of its module that code, and the code within it, reads."""
    every = (each for inside in codes(code) for each in get_instructions(inside))
    return frozenset(each.argval for each in every if each.opname in ("LOAD_GLOBAL", "LOAD_NAME"))


@cache
def set_in_module(code: CodeType) -> frozenset[str]:
    """The globals of its module that code, and the code within it, sets."""
    every = (each for inside in codes(code) for each in get_instructions(inside))
    return frozenset(each.argval for each in every if each.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"))


@cache
def named_in(code: CodeType) -> frozenset[str]:
    """The names in code, also those in texts (``"a"``, ``"a.b"``) and in tuples of them."""
    return frozenset((*code.co_names, *_texts(code.co_consts), *([WHICH] if _asks_which(code) else ())))


def asks_which(named: Collection[str]) -> bool:
    """Whether code with these names compares identities of values."""
    return not {WHICH, "id", "is_set_to"}.isdisjoint(named)


def one_where_asked(args: Sequence[object], named: Collection[str]) -> tuple[int, ...]:
    """For each of some values the first that is identical; () if all differ, or the code does not compare
    identities."""
    first: dict[int, int] = {}
    found = tuple([first.setdefault(id(each), number) for number, each in enumerate(args)])
    return found if len(first) < len(found) and asks_which(named) else ()


def _asks_which(code: CodeType) -> bool:
    """Whether code compares identities (``a is b``, ``a in (b, c)``) other than with constants and globals."""
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


class DynamicNames(NamedTuple):
    """Whether code reaches attributes by names made at run time: of its own object, of other objects, of its module."""

    own: bool
    others: bool
    globals: bool


def names_at_run_time(function: FunctionType) -> DynamicNames:
    """The accesses of a function's code, and the code within it, by names made at run time."""
    found = [reached(code) for code in codes(function.__code__)]
    return DynamicNames(*(any(getattr(each, name) for each in found) for name in DynamicNames._fields))


Chain = tuple[str, ...]


class Symbol(NamedTuple):
    """A symbolic value: a ``chain`` of names from a global or a closure; whether it is ``self``; a constant text; the
    ``name`` of the attribute that it is."""

    chain: Chain = ()
    own: bool = False
    text: object = None
    name: str = ""


@dataclass
class Reached:
    """What code reaches; by names made at run time, attributes of its ``own`` object, of ``others``, or ``globals``."""

    chains: set[Chain] = field(default_factory=set)
    called: set[Chain] = field(default_factory=set)
    own: bool = False
    others: bool = False
    globals: bool = False

    def by_name_of(self, holder: Symbol) -> None:
        """Attributes of a value are reached by names made at run time."""
        self.own |= holder.own
        self.others |= not holder.own


UNKNOWN = Symbol()
ASKS = ("getattr", "vars", "dir", "eval", "exec", "__getattribute__", "getmembers", "getattr_static")
"""Functions that reach attributes by their arguments."""
ENDS = ("JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT", "RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS")
CALLS = ("CALL", "CALL_KW", "CALL_FUNCTION_EX")


@cache
def reached(code: CodeType) -> Reached:
    """The names that one code object reaches, without the code within it."""
    found, stack, jumps = Reached(), list[Symbol](), dict[int, list[Symbol]]()
    every, asked = [*dis.get_instructions(code)], 0
    after_end = False
    for place, each in enumerate(every):
        if after_end or (each.offset in jumps and len(jumps[each.offset]) != len(stack)):
            stack = [*jumps.get(each.offset, [])]
        elif each.offset in jumps:
            pairs = zip(stack, jumps[each.offset], strict=True)
            stack = [ours if ours == theirs else UNKNOWN for ours, theirs in pairs]
        asked += each.argval in ASKS and each.opname == "LOAD_GLOBAL"
        asked -= _step(found, stack, each, every[place + 1 : place + 3], code)
        if each.opcode in dis.hasjrel or each.opcode in dis.hasjabs:
            jumps.setdefault(each.argval, [*stack])
        after_end = each.opname in ENDS
    found.others |= asked > 0  # one is handed on: map(getattr, ...)
    return found


def _step(
    found: Reached, stack: list[Symbol], each: dis.Instruction, behind: list[dis.Instruction], code: CodeType
) -> int:
    """Interpret one instruction on the stack; returns whether it calls one of ASKS."""
    name, kind = each.argval, each.opname
    if kind in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_CLASSDEREF"):
        if kind == "LOAD_GLOBAL" and each.arg is not None and each.arg & 1:
            stack.append(UNKNOWN)  # below what is called
        stack.append(Symbol((name,), kind == "LOAD_DEREF" and name == "self", name=name))
        found.chains.add((name,))
    elif kind in ("LOAD_FAST", "LOAD_FAST_CHECK"):
        stack.append(Symbol(own=code.co_argcount > 0 and name == code.co_varnames[0]))
    elif kind == "LOAD_CONST":
        stack.append(Symbol(text=name))
    elif kind in ("LOAD_ATTR", "LOAD_METHOD"):
        _attribute(found, stack, each, behind)
    elif kind in CALLS:
        return _call(found, stack, each, behind)
    elif kind not in ("PRECALL", "KW_NAMES", "RESUME", "NOP", "CACHE", "EXTENDED_ARG"):
        _other(stack, each)
    return 0


def _attribute(found: Reached, stack: list[Symbol], each: dis.Instruction, behind: list[dis.Instruction]) -> None:
    holder = _pop(stack, 1)[0]
    chain = (*holder.chain, each.argval) if holder.chain else ()
    if chain:
        found.chains.add(chain)
    if each.argval == "__dict__" and not _by_text(behind):
        found.by_name_of(holder)
    if dis.stack_effect(each.opcode, each.arg) > 0:  # a method: it, and its object
        stack.append(UNKNOWN)
    stack.append(Symbol(chain, name=each.argval))


def _by_text(behind: list[dis.Instruction]) -> bool:
    """Whether what comes next is an index by a text."""
    return [each.opname for each in behind] == ["LOAD_CONST", "BINARY_SUBSCR"] and isinstance(behind[0].argval, str)


def _call(found: Reached, stack: list[Symbol], each: dis.Instruction, behind: list[dis.Instruction]) -> int:
    """Interpret a call; returns whether it is of one of ASKS."""
    exact = each.opname == "CALL"
    count = (each.arg or 0) if exact else 0
    args = _pop(stack, count) if exact else []
    below = _pop(stack, 2 if exact else max(0, 1 - dis.stack_effect(each.opcode, each.arg)))
    stack.append(UNKNOWN)
    callee = next((symbol for symbol in reversed(below) if symbol.name), UNKNOWN)
    name = callee.name
    if exact and not args and callee.chain:
        found.called.add(callee.chain)
    if name == "attrgetter" and not (exact and all(isinstance(one.text, str) for one in args)):
        found.others = True
    if name == "globals":
        found.globals |= not _by_text(behind)
    if name not in ASKS or _by_text(behind):
        return int(name in ASKS and len(callee.chain) == 1)
    said = name.startswith("getattr") and len(args) > 1 and isinstance(args[1].text, str)
    if not said and not (exact and not args):  # vars() alone is what the code holds itself
        found.by_name_of(args[0] if args else UNKNOWN)
    return len(callee.chain) == 1


def _other(stack: list[Symbol], each: dis.Instruction) -> None:
    """Interpret any other instruction by its stack effect."""
    effect = dis.stack_effect(each.opcode, each.arg, jump=None)
    if each.opname.startswith(("STORE", "POP", "RETURN")):
        _pop(stack, -effect)
    elif effect < 0:
        _pop(stack, 1 - effect)
        stack.append(UNKNOWN)
    elif effect == 0:
        if stack:
            stack[-1] = UNKNOWN
    else:
        stack += [UNKNOWN] * effect


def _pop(stack: list[Symbol], count: int) -> list[Symbol]:
    """The last values of the stack, the missing ones unknown."""
    taken = [stack.pop() if stack else UNKNOWN for _ in range(count)]
    return taken[::-1]
