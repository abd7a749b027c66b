"""Snapshots of the Python state of a model's code, restored after each capture.

    if n not in CACHE: CACHE[n] = torch.arange(n)        self.seen = x        @lru_cache def angles(n): ...

A forward that is traced puts fake tensors there, which a later call would take for what they stand for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from operator import eq
from types import CellType, FunctionType, ModuleType
from typing import Any

import torch
from torch import nn

from .bytecode import cell_of
from .python_state import PythonState
from .python_values import ATOMS, STATE, ValueReader, slots_of

MISSING = object()


@contextmanager
def state_restored(around: PythonState) -> Iterator[None]:
    """Within, code may change Python state (``around``), and the attributes and buffers of its modules; afterwards all
    of that is restored. Caches of functions are emptied before and after."""
    caches = around.caches()
    for cache in caches:
        cache.cache_clear()
    found = StateSnapshot(around)
    try:
        yield
    finally:
        found.restore()
        for cache in caches:
            cache.cache_clear()


class StateSnapshot:
    """The attributes and buffers of the modules of a model's code, and what these and variables hold."""

    def __init__(self, around: PythonState) -> None:
        modules = [*around.modules()]
        own = [(name, value) for each in modules for name, value in vars(each).items()]
        self._parts = [_of_dict(vars(each), STATE) for each in modules]
        inside = around.walk([value for name, value in own if name not in STATE])
        self._parts += [part for each in inside if (part := _of_value(each)) is not None]
        self._parts += [_of_dict(each._buffers) for each in modules]
        self._parts += [_of_dict(value) for name, value in own if "_hooks" in name and isinstance(value, dict)]
        self._parts += [_of_variable(place, name) for place, name in around.variables()]

    @property
    def changed(self) -> bool:
        """Whether something is not as it was."""
        return any(each.differs() for each in self._parts)

    def restore(self) -> None:
        """Write everything back."""
        for each in self._parts:
            each.restore()


class Snapshot:
    """The content of something mutable: how it is read, compared with what it was, and written back."""

    def __init__(
        self, read: Callable[[], Any], write: Callable[[Any], object], same: Callable[[Any, Any], bool] = eq
    ) -> None:
        self._read, self._write, self._same = read, write, same
        self._was = read()

    def differs(self) -> bool:
        """Whether the content is another one."""
        return not self._same(self._read(), self._was)

    def restore(self) -> None:
        """Write the content back, if it is another one."""
        if self.differs():
            self._write(self._was)


def _same_dict(now: dict[Any, Any], was: dict[Any, Any]) -> bool:
    return now.keys() == was.keys() and all(now[name] is value for name, value in was.items())


def _of_dict(thing: MutableMapping[Any, Any], but: frozenset[str] = frozenset()) -> Snapshot:
    """A snapshot of a dict, or of an object's attributes, without the keys of ``but``."""

    def read() -> dict[Any, Any]:
        return {name: value for name, value in thing.items() if name not in but}

    def write(was: dict[Any, Any]) -> None:
        for name in [name for name in thing if name not in was and name not in but]:
            del thing[name]
        for name, value in was.items():
            if thing.get(name, MISSING) is not value:
                thing[name] = value

    return Snapshot(read, write, _same_dict)


def _of_sequence(thing: Any) -> Snapshot:
    """A snapshot of a list, a set, or a deque."""

    def write(was: list[Any]) -> None:
        thing.clear()
        (thing.update if isinstance(thing, set) else thing.extend)(was)

    def same(now: list[Any], was: list[Any]) -> bool:
        return len(now) == len(was) and all(a is b for a, b in zip(now, was, strict=True))

    return Snapshot(lambda: [*thing], write, same)


def _of_slots(thing: object) -> Snapshot:
    def read() -> dict[str, Any]:
        return {name: getattr(thing, name, MISSING) for name in slots_of(type(thing))}

    def write(was: dict[str, Any]) -> None:
        for name, value in was.items():
            if value is not MISSING:
                object.__setattr__(thing, name, value)
            elif hasattr(thing, name):
                object.__delattr__(thing, name)

    return Snapshot(read, write, _same_dict)


def _of_variable(place: Any, name: str) -> Snapshot:
    """A snapshot of a variable of a closure, of a Python module, or of a class."""

    def read() -> object:
        if isinstance(place, CellType):
            return cell_of(place, MISSING)
        return (place if isinstance(place, dict) else vars(place)).get(name, MISSING)

    def write(value: object) -> None:
        if isinstance(place, dict):
            place.pop(name) if value is MISSING else place.__setitem__(name, value)
            return
        attribute = "cell_contents" if isinstance(place, CellType) else name
        delattr(place, attribute) if value is MISSING else setattr(place, attribute, value)

    return Snapshot(read, write, lambda now, was: now is was)


def _of_value(each: Any) -> Snapshot | None:
    if isinstance(each, (nn.Module, torch.Tensor, type, FunctionType, ModuleType, *ATOMS)):
        own = vars(each) if isinstance(each, FunctionType) else None
        return _of_dict(own) if own else None
    if isinstance(each, MutableMapping):
        return _of_dict(each)
    if isinstance(each, (list, set, deque)):
        return _of_sequence(each)
    if isinstance(own := getattr(each, "__dict__", None), dict):
        return _of_dict(own)
    if slots_of(type(each)):
        return _of_slots(each)
    view = _memory(each)
    if view is not None:
        return Snapshot(view.tobytes, lambda was: view.__setitem__(slice(None), was))
    kind: Any = type(each)
    pickled = kind.__reduce__ is not object.__reduce__ and not (callable(each) or isinstance(each, frozenset))
    if pickled or hasattr(each, "__next__"):  # a generator of random numbers, an iterator: these cannot be restored
        return Snapshot(lambda: ValueReader().said(each), lambda _: None)
    return None


def _memory(each: Any) -> memoryview | None:
    """The bytes of an array that may be written into."""
    try:
        view = memoryview(each)
    except (TypeError, ValueError, BufferError):
        return None
    fixed = view.readonly or not view.c_contiguous or "O" in view.format or not view.nbytes
    return None if fixed else view.cast("B")
