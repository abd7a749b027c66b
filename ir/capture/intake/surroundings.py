"""What the code of a model and its loss reads beside inputs and parameters: a number in a closure, a global or a class,
a field of a configuration, what an object holds, the defaults of a function, which function it calls. A program has it
as it was when it was captured.

Looked at is what the code *names*, in its own words or as a text (``getattr(self, "scale")``): a record of losses,
which no code of the model names, may grow. Code that is installed is not looked into, but for the model's classes.
"""

from __future__ import annotations

import copy
import inspect
import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dis import get_instructions
from functools import cache, partial
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import nn

from .contents import ATOMS, STATE, Contents, cell_of, is_fixed, is_installed, is_installed_file
from .own_loss import OwnLoss

ASKS_FOR_GRADIENTS = frozenset(("is_grad_enabled", "requires_grad"))
"""What code names that does one thing where gradients are wanted, and maybe another where they are not."""
FUNCTIONS = 1000
"""So many functions are followed into one another."""
NOT_CALLED = frozenset(
    f"__{name}__"
    for name in (
        "init new del repr str reduce reduce_ex getstate setstate init_subclass class_getitem set_name dir sizeof"
    ).split()
)
"""Methods that no operator calls; ``__init__`` is, where the code names the class."""
METHODS = (FunctionType, property, classmethod, staticmethod)
Read = Callable[[], object]


class Surroundings:
    """What is read, and by which name a user knows it."""

    def __init__(self, model: nn.Module, loss: object = None) -> None:
        self._of = model, loss
        self._states: dict[tuple[str, ...], int] = {}
        self._reads: dict[Any, tuple[str, Read]] = {}
        self._names = set[str]()
        """What the code names."""
        self._functions = dict[int, FunctionType]()
        self._kinds = dict[type, set[str]]()
        self._contents = Contents(self._names, {id(module) for module in model.modules()})
        self._look()

    def __deepcopy__(self, memo: dict[int, Any]) -> Surroundings:
        made = Surroundings(*copy.deepcopy(self._of, memo))
        made._states = dict(self._states)
        now = self._states.get(tuple(self._said()))
        if now is not None:  # a copied object is another one
            made._states.setdefault(tuple(made._said()), now)
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
        now = tuple(self._said())
        if now not in self._states and self._states:
            self._look()  # what is new may lead to more
            now = tuple(self._said())
        state = self._states.setdefault(now, len(self._states))
        if not state:
            return state, ()
        first = next(iter(self._states))
        names = (name for name, _ in self._reads.values())
        return state, tuple(name for name, value, was in zip(names, now, first, strict=False) if value != was)

    def settle(self, state: int) -> None:
        """What there is now counts as this state: a capture may have filled what is kept for later."""
        if isinstance(self._of[1], OwnLoss):
            self._of[1].settle()
        self._states.setdefault(tuple(self._said()), state)

    def named(self) -> dict[str, str]:
        """What there is now, by name."""
        found: dict[str, str] = {}
        for (name, _), said in zip(self._reads.values(), self._said(), strict=True):
            found[name] = found.get(name, "") + said
        return found

    def _said(self) -> Iterator[str]:
        """What there is, as texts; what is read in several places is looked at once."""
        known: dict[int, tuple[object, str]] = {}
        for _, read in self._reads.values():
            value = read()
            if id(value) not in known:
                known[id(value)] = value, self._contents.said(value)
            yield known[id(value)][1]

    # ---- looking --------------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Find what is read: names lead to values, these to code, and that to further names."""
        model, loss = self._of
        self._add("hooks", "hooks of all modules", hooks_of_all)
        self._add("dtype", "torch.get_default_dtype()", torch.get_default_dtype)
        before = (-1, -1, -1)
        while before != (now := (len(self._names), len(self._reads), len(self._functions))):
            before = now
            for kind in {type(module) for module in model.modules()}:
                self._class(kind, ("forward", "__call__"))
            for path, module in model.named_modules():
                self._attributes(module, path)
            self._loss(loss)
            for function in [*self._functions.values()]:
                self._function(function)
            if self._names & ASKS_FOR_GRADIENTS:
                self._add("gradients", "torch.is_grad_enabled()", torch.is_grad_enabled)
            for kind, called in [*self._kinds.items()]:
                for name, value in _of_class(kind, self._names).items():
                    if name in called or not isinstance(value, FunctionType):
                        self._take(value)

    def _attributes(self, thing: object, path: str) -> None:
        for name in sorted(self._names & vars(thing).keys() - STATE):
            value = vars(thing)[name]
            if not isinstance(value, (*ATOMS, torch.Tensor, nn.Module)) and not is_fixed(value):
                self._add((id(thing), name), f"{path}.{name}" if path else name, partial(_attribute, thing, name))
                self._take(value)

    def _loss(self, loss: object) -> None:
        if isinstance(loss, nn.Module):
            for path, module in loss.named_modules():
                self._class(type(module), ("forward", "__call__"))
                for name in sorted(self._names & vars(module).keys() - STATE):
                    said = ".".join(part for part in ("loss", path, name) if part)
                    self._add((id(module), name), said, partial(_attribute, module, name))
        elif loss is not None:
            if not isinstance(loss, FunctionType):
                self._add("loss", "loss", lambda: loss)
            self._take(loss)

    def _take(self, value: object) -> None:
        """Take in the code that a value, and what it holds, may lead to."""
        for each in self._contents.walk(value):
            if isinstance(each, FunctionType):
                for function in within(each):
                    self._meet(function)
            elif isinstance(each, type):
                if _is_users(each):
                    self._class(each, self._called(each) | {"__init__"})
            elif not isinstance(each, (nn.Module, torch.Tensor)):
                self._class(type(each), self._called(type(each)))

    def _called(self, kind: type) -> set[str]:
        """The methods of a class that the code may call."""
        if not _is_users(kind):
            return set()
        held = [pair for each in filter(_is_users, kind.__mro__) for pair in vars(each).items()]
        methods = {name for name, value in held if isinstance(value, METHODS)}
        return {name for name in methods if name in self._names or (name[:2] == "__" and name not in NOT_CALLED)}

    def _class(self, kind: type, begin: Iterable[str]) -> None:
        """Take in the functions of a class that a call of these leads to, and what the class itself holds."""
        self._names.update(begin)
        for function in led_to(kind, begin):
            self._meet(function)
            self._names.update(name for code in codes(function.__code__) for name in _named_in(code))
        for each in filter(_is_users, kind.__mro__):
            self._kinds.setdefault(each, set()).update(begin)
            self._add(each, each.__name__, partial(_of_class, each, self._names))

    def _meet(self, function: FunctionType) -> None:
        if id(function) in self._functions or len(self._functions) >= FUNCTIONS:
            return
        if not is_installed(function.__code__) and not is_ours(function):
            self._functions[id(function)] = function

    def _function(self, function: FunctionType) -> None:
        """Take in what a function reads of its closure and of its module, and the functions there."""
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        for name, cell in cells.items():
            self._named((id(cell), name), name, partial(cell_of, cell))
        if function.__defaults__ or function.__kwdefaults__ or vars(function):
            self._named(id(function), function.__name__, lambda: function)
        there = function.__globals__
        every = {name for code in codes(function.__code__) for name in _named_in(code)}
        self._names |= every
        names = every if "globals" in every else read_of_module(function.__code__)
        for name in sorted(name for name in names if name in there and not name.startswith("__")):
            self._named((id(there), name), name, partial(there.get, name))

    def _named(self, key: object, name: str, read: Read) -> None:
        value = read()
        if isinstance(value, ModuleType):
            self._module(value)
        elif not isinstance(value, (torch.Tensor, nn.Module)):
            self._add(key, name, read)
            self._take(value)

    def _module(self, module: ModuleType) -> None:
        """Take in what the code may read of a module of Python's: of one that is installed, its dicts alone."""
        users = not is_installed_module(module)
        for name in sorted(self._names & vars(module).keys()):
            value = vars(module)[name]
            if users and not isinstance(value, ModuleType):
                self._named((id(vars(module)), name), name, partial(vars(module).get, name))
            elif isinstance(value, Mapping) and not isinstance(value, type):
                self._add((id(vars(module)), name), f"{module.__name__}.{name}", partial(dict, value))

    def _add(self, key: object, name: str, read: Read) -> None:
        self._reads.setdefault(key, (name, read))


def is_installed_module(module: ModuleType) -> bool:
    """Whether a module of Python's is no part of anybody's script."""
    return getattr(module, "__file__", None) is None or is_installed_file(str(module.__file__))


def led_to(kind: type, begin: Iterable[str] = ("forward", "__call__")) -> list[FunctionType]:
    """The functions of a class that a call of it, or of its methods ``begin``, leads to."""
    names, front, met = set[str](), [*begin], dict[FunctionType, None]()
    while front:
        held = inspect.getattr_static(kind, front.pop(), None)
        for function in within(getattr(held, "fget", held)):
            if function not in met and getattr(nn.Module, function.__name__, None) is not function:
                met[function] = None
                used = {name for code in codes(function.__code__) for name in code.co_names}
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
    own = (code for function in led_to(kind) for code in codes(function.__code__))
    return frozenset(each.argval for code in own for each in get_instructions(code) if each.opname == "STORE_ATTR")


def hooks_of_all() -> str:
    """The numbers of the hooks that every module of this process calls."""
    named = ("forward_pre", "forward", "backward_pre", "backward")
    return str([list(getattr(nn.modules.module, f"_global_{name}_hooks")) for name in named])


def within(thing: Any) -> Iterator[FunctionType]:
    """A function, and those that it is made of by decorators."""
    found: Any = inspect.unwrap(thing) if callable(thing) and not isinstance(thing, type) else None
    made = [getattr(found, "__func__", found)]
    made += [cell_of(cell) for cell in getattr(made[0], "__closure__", None) or ()]
    yield from (each for each in made if isinstance(each, FunctionType))


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


def is_ours(thing: type | FunctionType) -> bool:
    """Whether a class or a function is of this package, which may lie beside somebody's script."""
    return (thing.__module__ or "").startswith("shardfx.")


def _named_in(code: CodeType) -> Iterator[str]:
    """What code names, as a name or as a text."""
    yield from code.co_names
    yield from (each for each in code.co_consts if isinstance(each, str) and each.isidentifier())


def _is_users(kind: type) -> bool:
    """Whether a class is somebody's own, and not installed."""
    if kind not in USERS:
        module = sys.modules.get(kind.__module__)
        installed = module is not None and kind.__module__ != "__main__" and is_installed_module(module)
        USERS[kind] = not installed and not is_ours(kind)
    return USERS[kind]


USERS: weakref.WeakKeyDictionary[type, bool] = weakref.WeakKeyDictionary()


def _of_class(kind: type, names: Collection[str]) -> dict[str, object]:
    """What a class holds itself, of these names."""
    return {name: value for name, value in vars(kind).items() if name in names}


def _attribute(thing: object, name: str) -> object:
    return vars(thing).get(name)
