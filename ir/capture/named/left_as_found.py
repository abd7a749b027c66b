"""What a model's code keeps beside the model is left as it was found, whatever a capture has it do.

    if n not in CACHE: CACHE[n] = torch.arange(n)        self.seen = x        @lru_cache def angles(n): ...

A forward that is traced puts fake tensors there, which a later call would take for what they stand for.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from shardfx.ir.capture.intake.contents import STATE
from shardfx.ir.capture.intake.surroundings import Surroundings

from .held_things import Dict, Thing, Variable, held_things


@contextmanager
def left_as_found(around: Surroundings) -> Iterator[None]:
    """Within, code may change what it reads beside parameters (``around``), and the attributes and buffers of its
    modules; behind, all of that is as it was. Caches of functions are empty then, and before."""
    caches = around.caches()
    for cache in caches:
        cache.cache_clear()
    found = Found(around)
    try:
        yield
    finally:
        found.put_back()
        for cache in caches:
            cache.cache_clear()


class Found:
    """What code was found with: the attributes and buffers of its modules, what these and variables hold."""

    def __init__(self, around: Surroundings) -> None:
        modules = [*around.modules()]
        own = [(name, value) for each in modules for name, value in vars(each).items()]
        self._things: list[Thing] = [Dict(vars(each), STATE) for each in modules]
        self._things += held_things(around, [value for name, value in own if name not in STATE])
        self._things += [Dict(each._buffers) for each in modules]
        self._things += [Dict(value) for name, value in own if "_hooks" in name and isinstance(value, dict)]
        self._things += [Variable(place, name) for place, name in around.variables()]

    @property
    def changed(self) -> bool:
        """Whether it is something else now."""
        return any(each.differs() for each in self._things)

    def put_back(self) -> None:
        """Have everything as it was."""
        for each in self._things:
            each.put_back()
