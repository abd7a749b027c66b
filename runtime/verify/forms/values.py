"""Values among arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from shardfx.runtime.verify.proof.elements import Elements


@dataclass(frozen=True)
class V:
    """A value among arguments."""

    number: int


@dataclass(frozen=True)
class Placed:
    """Elements of atoms, and their dtype."""

    elements: Elements
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return self.elements.shape


@dataclass(frozen=True)
class Each:
    """An op done element by element; ``mixed``: its tensors' dims, where dtypes differ, for these say what it is
    computed in."""

    op: Any
    args: tuple[Any, ...]
    mixed: tuple[int, ...] = ()


@dataclass(frozen=True)
class Alone:
    """A number: as it is, and as it is compared. Of 1, 1.0 and True, and of 0.0 and -0.0, none is another one."""

    number: Any = field(compare=False)
    compared: Any

    @staticmethod
    def of(number: Any) -> Alone:
        """Compared to the last digit."""
        return Alone(number, key_of(number))


def key_of(arg: Any) -> Any:
    """A nest of arguments as a key: 1, 1.0 and True differ, and 0.0 and -0.0."""
    if isinstance(arg, (list, tuple)):
        return tuple(key_of(each) for each in arg)
    if isinstance(arg, dict):
        return tuple(sorted((name, key_of(each)) for name, each in arg.items()))
    return arg if isinstance(arg, V) else (type(arg).__name__, repr(arg))


def values_in(nest: Any) -> Iterator[V]:
    """The values in a nest of arguments, in order."""
    if isinstance(nest, V):
        yield nest
    elif isinstance(nest, (list, tuple)):
        for each in nest:
            yield from values_in(each)
    elif isinstance(nest, dict):
        yield from values_in(list(nest.values()))


def put(nest: Any, new: Callable[[V], Any]) -> Any:
    """The same nest with something in the place of each value."""
    if isinstance(nest, V):
        return new(nest)
    if isinstance(nest, (list, tuple)):
        return type(nest)([put(each, new) for each in nest])
    if isinstance(nest, dict):
        return {name: put(each, new) for name, each in nest.items()}
    return nest
