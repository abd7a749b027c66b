"""What a piece of code reaches, by its bytecode: chains of names (``torch.backends.cudnn.benchmark``), calls of such
chains without arguments (``torch.get_num_threads()``), and whether it names attributes only when it runs:

    getattr(self, "_".join(parts))      vars(self)      self.__dict__[key]      operator.attrgetter(path)(self)

The code is followed once from its beginning to its end, with a stack of what is known of each value. Where that is
lost, a name counts as made at run time: more is looked at then, never less.
"""

from __future__ import annotations

import dis
from dataclasses import dataclass, field
from functools import cache
from types import CodeType
from typing import NamedTuple

Chain = tuple[str, ...]


class Symbol(NamedTuple):
    """What is known of a value: a ``chain`` of names from a global or a closure; whether it is what the code is a
    method of; a text that the code has; the ``name`` by which it was taken from something."""

    chain: Chain = ()
    own: bool = False
    text: object = None
    name: str = ""


@dataclass
class Reached:
    """What code reaches. By names made at run time: attributes of its ``own`` object, of ``others``, or ``globals``."""

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
"""Functions that reach attributes by what they are given."""
ENDS = ("JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT", "RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS")
CALLS = ("CALL", "CALL_KW", "CALL_FUNCTION_EX")


@cache
def reached(code: CodeType) -> Reached:
    """What a piece of code reaches, without the code within it."""
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
    """One instruction: what it does to the stack, and to what is found; whether it calls one of those that ask."""
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
    """A call: what it is of, and whether it reaches something by a name made at run time."""
    exact = each.opname == "CALL"
    count = (each.arg or 0) if exact else 0
    given = _pop(stack, count) if exact else []
    below = _pop(stack, 2 if exact else max(0, 1 - dis.stack_effect(each.opcode, each.arg)))
    stack.append(UNKNOWN)
    callee = next((symbol for symbol in reversed(below) if symbol.name), UNKNOWN)
    name = callee.name
    if exact and not given and callee.chain:
        found.called.add(callee.chain)
    if name == "attrgetter" and not (exact and all(isinstance(one.text, str) for one in given)):
        found.others = True
    if name == "globals":
        found.globals |= not _by_text(behind)
    if name not in ASKS or _by_text(behind):
        return int(name in ASKS and len(callee.chain) == 1)
    said = name.startswith("getattr") and len(given) > 1 and isinstance(given[1].text, str)
    if not said and not (exact and not given):  # vars() alone is what the code holds itself
        found.by_name_of(given[0] if given else UNKNOWN)
    return len(callee.chain) == 1


def _other(stack: list[Symbol], each: dis.Instruction) -> None:
    """Of any other instruction only how many values it takes or leaves is known."""
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
