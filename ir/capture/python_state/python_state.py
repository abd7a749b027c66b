"""Python state of a model and its loss: what their code reads beside inputs and parameters (a number in a closure, a
global or a class, a field of a configuration, the defaults of a function, which function it calls). A program has it as
it was when it was captured.

Looked at is what the code *names*, in its own words or as a text (``getattr(self, "scale")``): a record of losses,
which no code of the model names, may grow. Where names are made when the code runs, all attributes count. Code that is
installed is not looked into, but for the model's classes.
"""

from __future__ import annotations

import builtins
import copy
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from operator import attrgetter
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import nn

from shardfx.ir.capture.frontend.loss_module import OwnLoss

from .bytecode import (
    CodeNames,
    FirstTime,
    cell_of,
    codes,
    led_to,
    named_in,
    names_at_run_time,
    read_of_module,
    set_by_calls,
    set_in_module,
    within,
)
from .python_modules import (
    answers,
    hooks_of_all,
    imported,
    is_installed,
    is_installed_module,
    is_ours,
    is_users_class,
    of_process,
    reaches_its_module,
)
from .python_values import ATOMS, STATE, ValueReader, is_fixed, number

ASKS_FOR_GRADIENTS = frozenset(("is_grad_enabled", "requires_grad", "grad_fn", "is_leaf"))
"""Names of code that may depend on whether gradients are enabled."""
FUNCTIONS = 1000
"""The maximum number of functions that are followed."""
NOT_CALLED = frozenset(
    f"__{name}__"
    for name in (
        "init new del repr str reduce reduce_ex getstate setstate init_subclass class_getitem set_name dir sizeof"
    ).split()
)
"""Special methods that no operator calls; ``__init__`` is called where the code names the class."""
HELD = (list, tuple, dict, set, frozenset, partial)
METHODS = (FunctionType, property, classmethod, staticmethod)
READABLE = (*ATOMS, *HELD, FunctionType, type)
Read = Callable[[], object]


class PythonState:
    """The values that are read, by the names that a user knows."""

    def __init__(self, model: nn.Module, loss: object = None) -> None:
        self._of = model, loss
        self._states: dict[tuple[str, ...], int] = {}
        self._reads: dict[Any, tuple[str, Read]] = {}
        self._names = CodeNames()
        self._functions = dict[int, FunctionType]()
        self._kinds = dict[type, set[str]]()
        self._met = FirstTime()
        self._contents = ValueReader(self._names, {id(module) for module in model.modules()})
        self._look()

    def __deepcopy__(self, memo: dict[int, Any]) -> PythonState:
        made = PythonState(*copy.deepcopy(self._of, memo))
        made._states = dict(self._states)
        now = self._states.get(tuple(self._said()))
        if now is not None:  # a copied object is another one
            made._states.setdefault(tuple(made._said()), now)
        return made

    def state(self) -> tuple[int, tuple[str, ...]]:
        """The number of the current state, in the order in which states were seen, and the names of
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

    @property
    def names(self) -> CodeNames:
        """The names in the code."""
        return self._names

    def settle(self, state: int) -> None:
        """Take what there is now as this state: a capture may have filled caches."""
        if isinstance(self._of[1], OwnLoss):
            self._of[1].settle()
        self._states.setdefault(tuple(self._said()), state)

    def walk(self, values: Iterable[object] = ()) -> Iterator[object]:
        """The values that are read, ``values``, and all that they contain."""
        yield from self._contents.walk([*values, *(read() for _, read in self._reads.values())])

    def tensors(self) -> list[str]:
        """The names of values that contain a tensor."""
        every = (pair for pair in self._reads.values() if not isinstance(pair[1](), (type, FunctionType)))
        return [name for name, read in every if any(isinstance(e, torch.Tensor) for e in self._contents.walk(read()))]

    def modules(self) -> Iterator[nn.Module]:
        """The modules of the model, and of the loss if it is one."""
        for each in self._of:
            yield from each.modules() if isinstance(each, nn.Module) else ()

    def variables(self) -> Iterator[tuple[Any, str]]:
        """The variables that the code may set: of closures, Python modules and classes."""
        for function in self._functions.values():
            for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
                yield cell, name
            for name in sorted(set_in_module(function.__code__)):
                yield function.__globals__, name
        for kind in self._kinds:
            yield from ((kind, name) for name in sorted(set_by_calls(kind) & {*self._names.named}))

    def caches(self) -> list[Any]:
        """The functions of the user's code that have a cache."""
        name = "cache_clear"  # of a class, or a function's own: some objects answer to any name
        return [e for e in self.walk() if hasattr(type(e), name) or (isinstance(e, FunctionType) and name in vars(e))]

    def named(self) -> dict[str, str]:
        """The current values as text, by name."""
        found: dict[str, str] = {}
        for (name, _), said in zip(self._reads.values(), self._said(), strict=True):
            found[name] = found.get(name, "") + said
        return found

    def _said(self) -> Iterator[str]:
        """The current values as text; each object once."""
        known: dict[int, tuple[object, str]] = {}
        for _, read in self._reads.values():
            value = read()
            if id(value) not in known:
                known[id(value)] = value, self._contents.said(value)
            yield known[id(value)][1]

    # ---- discovery --------------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Find the values that are read: names lead to values, these to code, and that to further names."""
        model, loss = self._of
        self._add("hooks", "hooks of all modules", hooks_of_all)
        self._add("codes", "the code of functions", self._codes)
        self._add("dtype", "torch.get_default_dtype()", torch.get_default_dtype)
        before: object = None
        while before != (now := (self._names.size, len(self._reads), len(self._functions))):
            before = now
            self._met.clear()  # a module or class is looked at once in a round: names met later make another one
            for kind in {type(module) for module in model.modules()}:
                self._class(kind, ("forward", "__call__"))
            for path, module in model.named_modules():
                self._attributes(module, path)
            self._loss(loss)
            for function in [*self._functions.values()]:
                self._function(function)
            for name, read in of_process(self._names.named):
                self._add(name, name, read)
            if self._names.named & ASKS_FOR_GRADIENTS:
                self._add("gradients", "torch.is_grad_enabled()", torch.is_grad_enabled)
            for kind, called in [*self._kinds.items()]:
                for name, value in _of_class(kind, self._names).items():
                    if name in called or not isinstance(value, FunctionType):
                        self._take(value)

    def _codes(self) -> list[int]:
        """The code of functions, which an editor that loads it again replaces."""
        return [number(function.__code__) for function in self._functions.values()]

    def _attributes(self, thing: object, path: str) -> None:
        for name in sorted(self._names.of(thing, vars(thing).keys() - STATE)):
            value = vars(thing)[name]
            if not isinstance(value, (*ATOMS, torch.Tensor, nn.Module)) and not is_fixed(value):
                self._add((id(thing), name), f"{path}.{name}" if path else name, partial(_attribute, thing, name))
                self._take(value)

    def _loss(self, loss: object) -> None:
        if isinstance(loss, nn.Module):
            for path, module in loss.named_modules():
                self._class(type(module), ("forward", "__call__"))
                for name in sorted(self._names.of(module, vars(module).keys() - STATE)):
                    said = ".".join(part for part in ("loss", path, name) if part)
                    self._add((id(module), name), said, partial(_attribute, module, name))
        elif loss is not None:
            if not isinstance(loss, FunctionType):
                self._add("loss", "loss", lambda: loss)
            self._take(loss)

    def _take(self, value: object) -> None:
        """Take in the code that a value, and what it holds, may lead to."""
        for each in self._contents.walk(value):
            if isinstance(each, FunctionType) or hasattr(each, "__wrapped__"):
                for function in within(each):
                    self._meet(function)
            elif isinstance(each, attrgetter):
                self._names.named.update(name for path in each.__reduce__()[1] for name in path.split("."))
            elif isinstance(each, type):
                if is_users_class(each):
                    self._class(each, self._called(each) | {"__init__"})
            elif not isinstance(each, (nn.Module, torch.Tensor)):
                self._class(type(each), self._called(type(each)))

    def _called(self, kind: type) -> set[str]:
        """The methods of a class that the code may call."""
        if not is_users_class(kind):
            return set()
        members = [pair for each in filter(is_users_class, kind.__mro__) for pair in vars(each).items()]
        methods = {name for name, value in members if isinstance(value, METHODS)}
        named = {name for name in self._names.of(kind, methods) if name[:2] != "__"}
        return named | {name for name in methods if name[:2] == "__" and name not in NOT_CALLED}

    def _class(self, kind: type, begin: Iterable[str]) -> None:
        """Take in the functions of a class that a call of these leads to, and what the class itself holds."""
        begin = frozenset(begin)
        if not self._met.take((kind, begin)):
            return
        self._names.named.update(begin)
        for function in led_to(kind, begin):
            self._meet(function, owned=True)
            self._names.named.update(name for code in codes(function.__code__) for name in named_in(code))
            if names_at_run_time(function).own:
                self._names.all_of(kind)
        if is_users_class(type(kind)):
            self._class(type(kind), self._called(type(kind)))
        for each in filter(is_users_class, kind.__mro__):
            self._kinds.setdefault(each, set()).update(begin)
            self._add(each, each.__name__, partial(_of_class, each, self._names))

    def _meet(self, function: FunctionType, owned: bool = False) -> None:
        """Take in a function of a script; ``owned``: it is a method of a class that is known."""
        if id(function) in self._functions or len(self._functions) >= FUNCTIONS:
            return
        if not is_installed(function.__code__) and not is_ours(function):
            self._functions[id(function)] = function
            made = names_at_run_time(function)
            self._names.every |= made.others or (made.own and not owned)

    def _function(self, function: FunctionType) -> None:
        """Take in what a function reads of its closure and of its module, and the functions there."""
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        for name, cell in cells.items():
            self._named((id(cell), name), name, partial(cell_of, cell))
        if function.__defaults__ or function.__kwdefaults__ or vars(function):
            self._named(id(function), function.__name__, lambda: function)
        there = function.__globals__
        every = {name for code in codes(function.__code__) for name in named_in(code)}
        self._names.named |= every
        names = every if "globals" in every else read_of_module(function.__code__)
        if names_at_run_time(function).globals or reaches_its_module(function):
            names |= {name for name, value in there.items() if isinstance(value, (*ATOMS, *HELD, FunctionType))}
        for place in (vars(builtins), there):
            kinds = object if place is there else (*ATOMS, *HELD)
            for name in sorted(name for name in names if name[:2] != "__" and isinstance(place.get(name, self), kinds)):
                self._named((id(place), name), name, partial(place.get, name))
        for name, read in answers(function):
            self._named((id(there), name, "of modules"), name, read)
        for module in imported(function):
            self._module(module)

    def _named(self, key: object, name: str, read: Read) -> None:
        value = read()
        if isinstance(value, ModuleType):
            self._module(value)
        elif isinstance(value, nn.Module):
            if next(value.parameters(), None) is None:  # with some it is a part of the model, or is refused
                self._add(key, name, read)
                for each in value.modules():
                    self._class(type(each), ("forward", "__call__"))
        elif not isinstance(value, torch.Tensor):
            self._add(key, name, read)
            self._take(value)

    def _module(self, module: ModuleType) -> None:
        """Take in what the code may read of a module of Python's: of one that is installed, its dicts alone."""
        if not self._met.take(id(module)):
            return
        users = not is_installed_module(module)
        for name in sorted(self._names.of(module, vars(module))):
            value = vars(module)[name]
            if name[:2] == "__" or (name not in self._names.named and not isinstance(value, READABLE)):
                continue
            if users and not isinstance(value, ModuleType):
                self._named((id(vars(module)), name), name, partial(vars(module).get, name))
            elif isinstance(value, Mapping) and not isinstance(value, type) and value is not sys.modules:
                self._add((id(vars(module)), name), f"{module.__name__}.{name}", partial(dict, value))

    def _add(self, key: object, name: str, read: Read) -> None:
        self._reads.setdefault(key, (name, read))


def _of_class(kind: type, names: CodeNames) -> dict[str, object]:
    """The attributes of a class itself that count."""
    return {name: vars(kind)[name] for name in names.of(kind, vars(kind))}


def _attribute(thing: object, name: str) -> object:
    return vars(thing).get(name)
