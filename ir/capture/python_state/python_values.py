"""Python values as text: equal texts are equal contents.

A number is itself; a list, a dict or an object is what it holds; a function is its code, its defaults and its closure;
an array is its bytes; of any other thing it is what a copy would be made of. Of tensors it is that there is one:
they are inputs, parameters and buffers, or refused.
"""

from __future__ import annotations

import warnings
import weakref
from argparse import Namespace
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from contextvars import ContextVar
from dataclasses import is_dataclass
from enum import Enum
from functools import partial
from itertools import count
from types import CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import nn

from .bytecode import CodeNames, cell_of
from .python_modules import is_installed

ATOMS = (bool, int, float, complex, str, bytes, type(None), range, torch.dtype, torch.device)
EXACT = frozenset(ATOMS)
STATE = frozenset(vars(nn.Module()))
LONG = 16
"""Longer lists and dicts of numbers and texts are hashed."""
DEEP = 200
PICKLED = ("func", "args", "state", "items", "entries")
Fields = list[tuple[str, Any]]

_numbers: dict[int, tuple[Callable[[], object], int]] = {}
_count = count()


def number(thing: object) -> int:
    """A number that identifies an object, also once it is gone."""
    known = _numbers.get(id(thing))
    if known is not None and known[0]() is thing:
        return known[1]
    try:
        found: Callable[[], object] = weakref.ref(thing)
    except TypeError:  # of such a kind there are few, which are kept alive
        found = partial(_itself, thing)
    _numbers[id(thing)] = found, next(_count)
    return _numbers[id(thing)][1]


def _itself(thing: object) -> object:
    return thing


def is_configuration(value: object) -> bool:
    """Whether a value is a configuration: an object that is its fields."""
    return isinstance(value, (SimpleNamespace, Namespace)) or (
        not isinstance(value, (type, nn.Module)) and (is_dataclass(value) or hasattr(type(value), "to_dict"))
    )


def is_fixed(value: object) -> bool:
    """Whether a value is a tuple of numbers and texts."""
    return isinstance(value, tuple) and {*map(type, value)} <= EXACT


def is_apart(value: object) -> bool:
    """Whether a value holds no tensor and no module, so that it need not be copied with a model."""
    return not any(isinstance(each, (torch.Tensor, nn.Module)) for each in ValueReader().walk(value))


class ValueReader:
    """Reads values. Of an object that is no configuration, the fields that the code names count; modules ``known`` are
    read elsewhere.

    Args:
        names: what the code names; None: all fields count, and tensors by how often they were written into.
        known: ``id`` of each such module.
    """

    def __init__(self, names: CodeNames | None = None, known: Collection[int] = ()) -> None:
        self._names, self._known = names, known

    def said(self, value: object) -> str:
        """A value as text."""
        return repr(value) if type(value) in EXACT else self._said(value, {}, 0)

    def walk(self, value: object) -> Iterator[object]:
        """A value, and all that it holds."""
        front, met = [value], dict[int, object]()
        while front:
            each = front.pop()
            if type(each) in EXACT or id(each) in met:
                continue
            met[id(each)] = each
            yield each
            if not _plain(each) and not isinstance(fields := self.fields(each), str):
                front += [inside for _, inside in fields]

    def _said(self, value: Any, met: dict[int, Any], depth: int) -> str:
        kind = type(value)
        if kind in EXACT:
            return repr(value)
        if id(value) in met or depth > DEEP:
            return f"{kind.__qualname__} again"
        if _plain(value):
            text = repr(value)
            return f"{kind.__qualname__} {len(value)} {text if len(value) <= LONG else hash(text)}"
        met[id(value)] = value  # kept alive, so that no other object gets its id
        fields = self.fields(value)
        if isinstance(fields, str):
            return fields
        inside = [f"{name}: {self._said(each, met, depth + 1)}" for name, each in fields]
        return f"{kind.__qualname__}({', '.join(sorted(inside) if isinstance(value, Set) else inside)})"

    def fields(self, value: Any) -> Fields | str:
        """The contents of a value, by name; or its text, where it has none."""
        kind = type(value)
        if kind is list or kind is tuple:
            return [("", each) for each in value]
        if kind is dict:
            return [(repr(key), each) for key, each in value.items()]
        if isinstance(value, torch.Tensor):
            return kind.__qualname__ if self._names is not None else f"tensor {number(value)} {_written(value)}"
        if isinstance(value, (*ATOMS, Enum)):
            return f"{kind.__qualname__} {value!r}"
        if isinstance(value, (type, CodeType, ModuleType)):
            return f"{getattr(value, '__name__', kind.__name__)} {number(value)}"
        if isinstance(value, nn.Module):
            return self._module(value)
        if isinstance(value, FunctionType):
            return f"{value.__qualname__} {number(value)}" if is_installed(value.__code__) else _function(value)
        if isinstance(value, MethodType):
            return [("of", value.__self__), ("function", value.__func__)]
        if isinstance(value, partial):
            return [("func", value.func), ("args", value.args), ("keywords", value.keywords)]
        if isinstance(value, ContextVar):
            return [("value", value.get(None))]
        if isinstance(value, weakref.ref):
            return [("to", value())]
        if isinstance(value, torch.Generator):
            return f"Generator {value.device} {value.initial_seed()}"  # what is drawn of it in forward is refused
        if (data := _bytes(value)) is not None:
            return data
        return self._object(value)

    def _module(self, module: nn.Module) -> Fields | str:
        """The attributes, mode and submodules of a module that is not the model's."""
        if id(module) in self._known:
            return type(module).__qualname__
        own = [(name, value) for name, value in vars(module).items() if name not in STATE]
        return [*own, ("training", module.training), *((n, m) for n, m in module._modules.items() if m is not None)]

    def _object(self, value: Any) -> Fields | str:
        items: Fields | None = None
        if isinstance(value, Mapping):
            items = [(repr(key), each) for key, each in value.items()]
        elif isinstance(value, (Sequence, Set)):
            items = [("", each) for each in value]
        elif (pickled := _pickled(value)) is not None:
            return pickled
        fields = _fields(value)
        if self._names is not None and not is_configuration(value):
            fields = {name: fields[name] for name in self._names.of(value, fields)}
        if items is None and not fields:
            return f"{type(value).__qualname__} {number(value)}"
        return [*(items or ()), *fields.items()]


def _plain(value: object) -> bool:
    """Whether a value is a list, tuple or dict of numbers and texts."""
    kind = type(value)
    if kind is list or kind is tuple:
        return {*map(type, value)} <= PLAIN  # type: ignore[call-overload]
    return kind is dict and {*map(type, value), *map(type, value.values())} <= PLAIN  # type: ignore[call-overload, attr-defined]


PLAIN = frozenset((bool, int, float, complex, str, bytes, type(None)))


def _written(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _function(function: FunctionType) -> Fields:
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    values = {"defaults": function.__defaults__, "keywords": function.__kwdefaults__, "attributes": vars(function)}
    own: Fields = [(name, each) for name, each in values.items() if each]
    return [("code", function.__code__), *own, *((name, cell_of(cell)) for name, cell in cells)]


def _bytes(value: Any) -> str | None:
    """The content of an array of numbers; None of other values."""
    try:
        view = memoryview(value)
    except (TypeError, ValueError, BufferError):
        return None
    if "O" in view.format:
        return None
    return f"{type(value).__qualname__} {view.format} {view.shape} {hash(view.tobytes())}"


def _fields(value: object) -> dict[str, object]:
    """The attributes of an object, those in slots too."""
    slots, own = slots_of(type(value)), getattr(value, "__dict__", {})
    return {name: getattr(value, name) for name in slots if hasattr(value, name)} | own


def slots_of(kind: type) -> tuple[str, ...]:
    """The slots of a class."""
    if kind not in SLOTS:
        SLOTS[kind] = tuple(name for each in kind.__mro__ for name in _slots(each))
    return SLOTS[kind]


SLOTS: weakref.WeakKeyDictionary[type, tuple[str, ...]] = weakref.WeakKeyDictionary()
"""The slots of classes that were met."""


def _slots(kind: type) -> tuple[str, ...]:
    slots = vars(kind).get("__slots__", ())
    return tuple(name for name in ((slots,) if isinstance(slots, str) else slots) if not name.startswith("__"))


def _pickled(value: object) -> Fields | str | None:
    """The pickled state of a value without fields (a generator of random numbers, an iterator), or that customises it;
    its identity, where it cannot be pickled. None of an object with fields."""
    kind = type(value)
    usual = kind.__reduce__ is object.__reduce__ and kind.__reduce_ex__ is object.__reduce_ex__
    if usual and (hasattr(value, "__dict__") or any(map(_slots, kind.__mro__))):
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made = value.__reduce_ex__(2)
    except Exception:  # whatever says that it cannot be
        return f"{kind.__qualname__} {number(value)}" if usual else None
    if isinstance(made, str):
        return made
    named = zip(PICKLED, made, strict=False)
    return [(name, [*each] if name in PICKLED[3:] and each else each) for name, each in named]
