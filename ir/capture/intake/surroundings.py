"""What the code of a model and its loss reads beside inputs and parameters: a number in a closure or a global, a field
of a configuration, an attribute of the loss. A program has it as it was when it was captured.

Looked at are numbers, texts, lists, dicts and configurations that the code *names*: a record of losses, which no code
of the model names, may grow.
"""

from __future__ import annotations

import copy
import inspect
import sysconfig
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from dis import get_instructions
from functools import partial
from itertools import islice
from types import CodeType, FunctionType, MethodType, SimpleNamespace
from typing import Any

import torch
from torch import nn

from .own_loss import OwnLoss

ATOMS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
STATE = frozenset(vars(nn.Module()))
MOST = 256
"""Of a container with more entries the first ones are looked at, and how many there are."""
FUNCTIONS = 1000
"""So many functions are followed into one another."""
INSTALLED = tuple({path for name, path in sysconfig.get_paths().items() if name in ("stdlib", "purelib", "platlib")})
"""Where code lies of which globals and closures are not looked at: no script changes those."""
Read = Callable[[], object]


class Surroundings:
    """What is read, and by which name a user knows it."""

    def __init__(self, model: nn.Module, loss: object = None) -> None:
        self._of = model, loss
        self._states: dict[tuple[str, ...], int] = {}
        self._reads: dict[Any, tuple[str, Read]] = {}
        self._front: list[FunctionType] = []
        self._met: set[int] = set()
        read = {kind: self._class(kind) for kind in {type(module) for module in model.modules()}}
        for path, module in model.named_modules():
            for name in sorted(read[type(module)] & vars(module).keys() - STATE):
                if _changes(value := vars(module)[name]):  # others cannot be set on a parallel module
                    self._add(id(value), f"{path}.{name}" if path else name, partial(_same, value))
        self._add("hooks", "hooks of all modules", hooks_of_all)
        self._callable(loss, "loss")
        while self._front and len(self._met) < FUNCTIONS:
            self._function(self._front.pop())

    def __deepcopy__(self, memo: dict[int, Any]) -> Surroundings:
        made = Surroundings(*copy.deepcopy(self._of, memo))
        made._states = dict(self._states)
        return made

    def state(self) -> tuple[int, tuple[str, ...]]:
        """The number of the state in which all of this is, in the order in which states were seen, and the names of
        what is not as in the first one.

        Ranks compare the number: a rank's own number or device, which its code may read, is none of the others'.

        Raises:
            Error: a tensor of the loss is not as it was.
        """
        if isinstance(self._of[1], OwnLoss):
            self._of[1].check()
        now = tuple([said(read()) for _, read in self._reads.values()])
        state = self._states.setdefault(now, len(self._states))
        if not state:
            return state, ()
        first = next(iter(self._states))
        names = (name for name, _ in self._reads.values())
        return state, tuple(name for name, value, was in zip(names, now, first, strict=True) if value != was)

    def settle(self, state: int) -> None:
        """What there is now counts as this state: a capture may have filled what is kept for later."""
        if isinstance(self._of[1], OwnLoss):
            self._of[1].settle()
        self._states.setdefault(tuple([said(read()) for _, read in self._reads.values()]), state)

    def _add(self, key: object, name: str, read: Read) -> None:
        self._reads.setdefault(key, (name, read))

    def _class(self, kind: type) -> set[str]:
        """Take in the functions of a class that a call of it leads to; gives the names that they use."""
        reached = led_to(kind)
        for function in reached:
            self._meet(function)
        return {name for function in reached for code in _codes(function.__code__) for name in code.co_names}

    def _callable(self, thing: Any, name: str) -> None:
        """Take in a function, a method, a part of a call, or an object that is called."""
        if isinstance(thing, FunctionType):
            self._meet(thing)
        elif isinstance(thing, MethodType):
            for function in _within(thing.__func__):
                self._meet(function)
            self._object(thing.__self__, name)
        elif isinstance(thing, partial):
            self._callable(thing.func, name)
            self._add((id(thing), "args"), name, lambda: (thing.args, thing.keywords))
        elif isinstance(thing, nn.Module):
            for path, module in thing.named_modules():
                self._object(module, f"{name}.{path}" if path else name)
        elif thing is not None and not isinstance(thing, type) and callable(thing):
            self._object(thing, name)

    def _object(self, thing: object, name: str) -> None:
        """Take in the attributes of an object that its class's code names."""
        for each in sorted(self._class(type(thing)) & getattr(thing, "__dict__", {}).keys() - STATE):
            self._add((id(thing), each), f"{name}.{each}", partial(_attribute, thing, each))

    def _meet(self, function: FunctionType) -> None:
        if id(function) not in self._met and not function.__code__.co_filename.startswith(INSTALLED):
            self._met.add(id(function))
            self._front.append(function)

    def _function(self, function: FunctionType) -> None:
        """Take in what a function reads of its closure and of its module, and the functions there."""
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        for name, cell in cells.items():
            self._named((id(cell), name), name, partial(_cell, cell))
        there = function.__globals__
        for name in sorted(_globals(function)):
            if name in there and not name.startswith("__"):
                self._named((id(there), name), name, partial(there.get, name))

    def _named(self, key: object, name: str, read: Read) -> None:
        value = read()
        if isinstance(value, ATOMS) or _changes(value):
            self._add(key, name, read)
        elif isinstance(value, (FunctionType, partial)):
            self._callable(inspect.unwrap(value) if isinstance(value, FunctionType) else value, name)


def led_to(kind: type) -> list[FunctionType]:
    """The functions of a class that a call of it leads to."""
    names, front, met = set[str](), ["forward", "__call__"], dict[FunctionType, None]()
    while front:
        held = inspect.getattr_static(kind, front.pop(), None)
        for function in _within(getattr(held, "fget", held)):
            if function not in met and getattr(nn.Module, function.__name__, None) is not function:
                met[function] = None
                used = {name for code in _codes(function.__code__) for name in code.co_names}
                front += used - names
                names |= used
    return list(met)


SET: dict[type, frozenset[str]] = {}


def set_by_calls(kind: type) -> frozenset[str]:
    """The names of attributes that code which a call of a class leads to sets, of itself or of something else."""
    if kind not in SET:
        SET[kind] = _set_by_calls(kind)
    return SET[kind]


def _set_by_calls(kind: type) -> frozenset[str]:
    codes = (code for function in led_to(kind) for code in _codes(function.__code__))
    return frozenset(each.argval for code in codes for each in get_instructions(code) if each.opname == "STORE_ATTR")


def hooks_of_all() -> list[list[int]]:
    """The numbers of the hooks that every module of this process calls."""
    named = ("forward_pre", "forward", "backward_pre", "backward")
    return [list(getattr(nn.modules.module, f"_global_{name}_hooks")) for name in named]


def _within(thing: Any) -> Iterator[FunctionType]:
    """A function, and those that it is made of by decorators."""
    found: Any = inspect.unwrap(thing) if callable(thing) and not isinstance(thing, type) else None
    made = [getattr(found, "__func__", found)]
    made += [_cell(cell) for cell in getattr(made[0], "__closure__", None) or ()]
    yield from (each for each in made if isinstance(each, FunctionType))


def _codes(code: CodeType) -> Iterator[CodeType]:
    """The code of a function, and of those within it."""
    yield code
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _codes(each)


def _globals(function: FunctionType) -> set[str]:
    """The names that a function reads of its module: ``x.size(0)`` reads no global ``size``."""
    read = ("LOAD_GLOBAL", "LOAD_NAME")
    codes = _codes(function.__code__)
    return {each.argval for code in codes for each in get_instructions(code) if each.opname in read}


def _same(value: object) -> object:
    return value


def _attribute(thing: object, name: str) -> object:
    return vars(thing).get(name)


def _cell(cell: Any) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # nothing was put into it yet
        return None


def _changes(value: object) -> bool:
    """Whether it is a container or a configuration, whose contents may change."""
    return isinstance(value, (dict, list, set, SimpleNamespace, Namespace)) or (
        not isinstance(value, (type, nn.Module)) and (is_dataclass(value) or hasattr(type(value), "to_dict"))
    )


def _fields(value: object) -> Mapping[str, object]:
    """What a configuration holds, by name; it may have slots."""
    slots = [each.name for each in fields(value)] if is_dataclass(value) and not isinstance(value, type) else []
    return getattr(value, "__dict__", None) or {name: getattr(value, name, None) for name in slots}


def said(value: object, depth: int = 4) -> str:
    """A value as text: the same for equal contents; of what is no plain value, its type."""
    if isinstance(value, ATOMS):
        return repr(value)
    if isinstance(value, (list, tuple, set, frozenset)):
        inside = [said(each, depth - 1) for each in islice(value, MOST)] if depth else []
        return f"{len(value)} [{', '.join(sorted(inside) if isinstance(value, (set, frozenset)) else inside)}]"
    if isinstance(value, Mapping) or _changes(value):
        held = value if isinstance(value, Mapping) else _fields(value)
        pairs = [f"{key!s}: {said(each, depth - 1)}" for key, each in islice(held.items(), MOST)] if depth else []
        return f"{len(held)} {{{', '.join(pairs)}}}"
    return type(value).__name__
