"""Functions that are others now: by another code of the same function, as an editor that reloads does it, or as another
function under the same name, in installed code that a model calls and that nobody looks into.

    function.__code__ = ...      torch.nn.functional.linear = ...      nn.Linear.forward = ...
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import reduce
from types import CodeType, FunctionType, ModuleType
from typing import Any

from shardfx.ir.capture.intake.contents import number
from shardfx.ir.errors import Error

from .code_names import codes, led_to, read_of_module
from .installed import is_installed, is_installed_module, is_users_class
from .reached import reached

BEGIN = ("forward", "__call__")


class Replaced:
    """The functions that code leads to, as they were when they were first met."""

    def __init__(self) -> None:
        self._codes = dict[int, tuple[FunctionType, CodeType]]()
        self._places = dict[tuple[int, str], tuple[Mapping[str, object], object]]()

    def meet(self, functions: Iterable[FunctionType], kinds: Iterable[type]) -> None:
        """Take in functions of a script, and what classes of modules call."""
        for function in functions:
            self._codes.setdefault(id(function), (function, function.__code__))
            self._take(_of_modules(function))
        for kind in kinds:
            for each in kind.__mro__:
                if not is_users_class(each):
                    self._take((vars(each), name) for name in BEGIN if name in vars(each))
            for function in led_to(kind, BEGIN):
                if is_installed(function.__code__):
                    self._take(_of_modules(function))
                    self._take((function.__globals__, name) for name in read_of_module(function.__code__))

    def _take(self, places: Iterable[tuple[Mapping[str, object], str]]) -> None:
        for there, name in places:
            value = there.get(name)
            if callable(value):
                self._places.setdefault((id(there), name), (there, value))

    def said(self) -> list[str]:
        """The functions that have another code now."""
        return [f"{f.__qualname__} {number(f.__code__)}" for f, code in self._codes.values() if f.__code__ is not code]

    def check(self) -> None:
        """Raise if another function stands where one was that a model calls and nobody looks into.

        Torch's own functions call themselves by their names in their modules: with another one there, what is traced
        is not what is called.

        Raises:
            Error: naming the first one.
        """
        for (_, name), (there, value) in self._places.items():
            if there.get(name) is not value:
                now = getattr(there.get(name), "__qualname__", None) or repr(there.get(name))
                raise Error(
                    f"{name!r} was replaced since the model was parallelized, whose programs do what it did before",
                    where=str(there.get("__name__") or there.get("__module__")),
                    expected=getattr(value, "__qualname__", repr(value)),
                    got=now,
                    remedy="put it back; or parallelize the model again, with the other one there",
                )


def _of_modules(function: FunctionType) -> Iterator[tuple[Mapping[str, object], str]]:
    """The namespaces of installed modules, and the names there, that a function's code reaches."""
    for code in codes(function.__code__):
        found = reached(code)
        for chain in found.chains | found.called:
            holder: Any = function.__globals__.get(chain[0])
            if len(chain) > 1 and isinstance(holder, ModuleType):
                held: object = reduce(_inside, chain[1:-1], holder)
                if isinstance(held, ModuleType) and is_installed_module(held):
                    yield vars(held), chain[-1]


def _inside(holder: Any, name: str) -> Any:
    return getattr(holder, name, None)
