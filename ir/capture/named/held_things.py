"""Things that may be written into, with what they held: dicts, lists, sets, objects, arrays, variables; and iterators,
which go on by themselves, and cannot be set back."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, MutableMapping
from types import CellType, FunctionType, ModuleType
from typing import Any, Protocol

import torch
from torch import nn

from shardfx.ir.capture.intake.contents import ATOMS, Contents, slots_of
from shardfx.ir.capture.intake.surroundings import Surroundings

MISSING = object()


class Thing(Protocol):
    """A thing that may be written into."""

    def differs(self) -> bool:
        """Whether it holds something else."""

    def put_back(self) -> None:
        """Have it hold what it did."""


class Dict:
    """A dict, or the attributes of an object; keys of ``but`` are none of it."""

    def __init__(self, thing: MutableMapping[Any, Any], but: frozenset[str] = frozenset()) -> None:
        self._thing, self._but = thing, but
        self._was = {name: value for name, value in thing.items() if name not in but}

    def differs(self) -> bool:
        """Whether a value is another one, or a key is there or not."""
        now = self._thing
        other = any(now.get(name, MISSING) is not value for name, value in self._was.items())
        return other or any(name not in self._was and name not in self._but for name in now)

    def put_back(self) -> None:
        """The same values for the same keys."""
        now = self._thing
        for name in [name for name in now if name not in self._was and name not in self._but]:
            del now[name]
        for name, value in self._was.items():
            if now.get(name, MISSING) is not value:
                now[name] = value


class Row:
    """A list, a set, or a deque."""

    def __init__(self, thing: Any) -> None:
        self._thing, self._was = thing, [*thing]

    def differs(self) -> bool:
        """Whether an element is another one."""
        now, was = self._thing, self._was
        return len(now) != len(was) or any(a is not b for a, b in zip(now, was, strict=True))

    def put_back(self) -> None:
        """The same elements."""
        if self.differs():
            self._thing.clear()
            (self._thing.update if isinstance(self._thing, set) else self._thing.extend)(self._was)


class Slots:
    """An object whose class has slots."""

    def __init__(self, thing: object) -> None:
        self._thing, self._was = thing, {name: getattr(thing, name, MISSING) for name in slots_of(type(thing))}

    def differs(self) -> bool:
        """Whether one holds something else."""
        return any(getattr(self._thing, name, MISSING) is not value for name, value in self._was.items())

    def put_back(self) -> None:
        """The same in each."""
        for name, value in self._was.items():
            if getattr(self._thing, name, MISSING) is value:
                continue
            if value is MISSING:
                object.__delattr__(self._thing, name)
            else:
                object.__setattr__(self._thing, name, value)


class Array:
    """An array of numbers that may be written into: of numpy's, or of bytes."""

    def __init__(self, view: memoryview) -> None:
        self._view, self._was = view.cast("B"), view.tobytes()

    def differs(self) -> bool:
        """Whether a number is another one."""
        return self._view != self._was

    def put_back(self) -> None:
        """The same numbers."""
        if self.differs():
            self._view[:] = self._was


class Closed:
    """A thing that hides what it holds, as an iterator does."""

    def __init__(self, thing: object) -> None:
        self._thing, self._was = thing, Contents().said(thing)

    def differs(self) -> bool:
        """Whether a copy would be another one."""
        return Contents().said(self._thing) != self._was

    def put_back(self) -> None:
        """Nothing: it cannot be set back."""


class Variable:
    """A variable of a closure, of a module of Python's, or of a class."""

    def __init__(self, place: Any, name: str) -> None:
        self._place, self._name = place, name
        self._was = self._now()

    def differs(self) -> bool:
        """Whether it is another value."""
        return self._now() is not self._was

    def put_back(self) -> None:
        """The same value."""
        if not self.differs():
            return
        place, name, value = self._place, self._name, self._was
        if isinstance(place, CellType):
            if value is MISSING:
                del place.cell_contents
            else:
                place.cell_contents = value
        elif isinstance(place, dict):
            if value is MISSING:
                del place[name]
            else:
                place[name] = value
        elif value is MISSING:
            delattr(place, name)
        else:
            setattr(place, name, value)

    def _now(self) -> object:
        place, name = self._place, self._name
        if isinstance(place, CellType):
            try:
                return place.cell_contents
            except ValueError:
                return MISSING
        return place.get(name, MISSING) if isinstance(place, dict) else vars(place).get(name, MISSING)


def held_things(around: Surroundings, values: Iterable[object]) -> list[Thing]:
    """What there is among what code reads, and ``values``, that may be written into."""
    return [thing for each in around.walk(values) if (thing := _thing(each)) is not None]


def _thing(each: Any) -> Thing | None:
    if isinstance(each, (nn.Module, torch.Tensor, type, FunctionType, ModuleType, *ATOMS)):
        own = vars(each) if isinstance(each, FunctionType) else None
        return Dict(own) if own else None
    if isinstance(each, MutableMapping):
        return Dict(each)
    if isinstance(each, (list, set, deque)):
        return Row(each)
    if isinstance(own := getattr(each, "__dict__", None), dict):
        return Dict(own)
    if slots_of(type(each)):
        return Slots(each)
    return _array(each) or (Closed(each) if hasattr(each, "__next__") else None)


def _array(each: Any) -> Array | None:
    try:
        view = memoryview(each)
    except (TypeError, ValueError, BufferError):
        return None
    return None if view.readonly or not view.c_contiguous or "O" in view.format or not view.nbytes else Array(view)
