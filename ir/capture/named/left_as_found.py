"""What a model's code keeps beside the model is left as it was found, whatever a capture has it do.

    if n not in CACHE: CACHE[n] = torch.arange(n)        self.seen = x        @lru_cache def angles(n): ...

A forward that is traced puts fake tensors there, which a later call would take for what they stand for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from types import CellType
from typing import Any

import torch
from torch import nn

from shardfx.ir.capture.intake.contents import STATE
from shardfx.ir.capture.intake.surroundings import Surroundings

Held = dict[int, tuple[Any, Any]]
MISSING = object()


@contextmanager
def left_as_found(around: Surroundings) -> Iterator[None]:
    """Within, code may change what it reads beside parameters (``around``), and the attributes and buffers of its
    modules; behind, all of that is as it was. Caches of functions are empty then, and before."""
    caches = around.caches()
    for cache in caches:
        cache.cache_clear()
    modules = [(vars(module), {n: v for n, v in vars(module).items() if n not in STATE}) for module in around.modules()]
    held = _held(around, [value for _, own in modules for value in own.values()])
    buffers = [(module._buffers, dict(module._buffers)) for module in around.modules()]
    hooks = [(own[n], dict(own[n])) for own, _ in modules for n in own if "_hooks" in n and isinstance(own[n], dict)]
    variables = [(place, name, _variable(place, name)) for place, name in around.variables()]
    try:
        yield
    finally:
        for own, was in modules:
            _put_back(own, was, STATE)
        for each, were in (*buffers, *hooks):
            _put_back(each, were)  # as is what says that they are there
        for thing, content in held.values():
            _restore(thing, content)
        for place, name, value in variables:
            _set_variable(place, name, value)
        for cache in caches:
            cache.cache_clear()


def _held(around: Surroundings, values: list[object]) -> Held:
    """What there is that may be written into, and a copy of what it holds."""
    found: Held = {}
    for each in around.walk(values):
        if isinstance(each, (nn.Module, torch.Tensor, type)) or id(each) in found:
            continue
        if isinstance(each, (MutableMapping, list, set, deque)):
            found[id(each)] = each, (dict(each) if isinstance(each, MutableMapping) else [*each])
        elif isinstance(own := getattr(each, "__dict__", None), dict):
            found[id(each)] = own, dict(own)
    return found


def _restore(thing: Any, content: Any) -> None:
    if isinstance(thing, MutableMapping):
        _put_back(thing, content)
    elif len(thing) != len(content) or any(a is not b for a, b in zip(thing, content, strict=True)):
        thing.clear()
        (thing.update if isinstance(thing, set) else thing.extend)(content)


def _put_back(now: MutableMapping[Any, Any], was: dict[Any, Any], but: frozenset[str] = frozenset()) -> None:
    """Have a dict hold what it did; keys of ``but`` are none of it."""
    for name in [name for name in now if name not in was and name not in but]:
        del now[name]
    for name, value in was.items():
        if now.get(name, MISSING) is not value:
            now[name] = value


def _variable(place: Any, name: str) -> object:
    if isinstance(place, CellType):
        try:
            return place.cell_contents
        except ValueError:
            return MISSING
    return place.get(name, MISSING) if isinstance(place, dict) else vars(place).get(name, MISSING)


def _set_variable(place: Any, name: str, value: object) -> None:
    """Give a variable of a closure, of a module of Python's, or of a class its value again."""
    if _variable(place, name) is value:
        return
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
