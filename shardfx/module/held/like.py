"""A module that looks like another one: its attributes and methods, on the tensors and modules of its own."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

from torch import nn

from shardfx.ir.capture.named.code_names import set_by_calls
from shardfx.ir.errors import Error

STATE = frozenset(vars(nn.Module()))
NUMBER = "@"
"""Begins the name of a module that holds one piece of a parameter, and has the number of the piece."""
WHOLE = ("generate", "save_pretrained", "push_to_hub")
"""Methods that want the weights of the model, whole."""


class Like(nn.Module):
    """Has what its twin has: a copy of a module of the model without weights."""

    _twin: nn.Module

    def _show(self, twin: nn.Module) -> None:
        self.__dict__["_twin"] = twin

    @property
    def _shown(self) -> Mapping[str, Any]:
        """The twin's own attributes."""
        twin = self.__dict__.get("_twin")
        return {} if twin is None else {name: value for name, value in vars(twin).items() if name not in STATE}

    def __getattr__(self, name: str) -> Any:
        held = self.__dict__
        for place in ("_parameters", "_buffers", "_modules"):
            if name in held.get(place, ()):
                return held[place][name]
        twin = held.get("_twin")
        if twin is None or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        if name in vars(twin) and name not in STATE:
            if name in set_by_calls(type(twin)):
                raise Error(
                    f"{name!r} is set by the model's forward, and no program sets attributes",
                    where=f"pm.{name}",
                    expected="what forward returns, parameters and buffers",
                    got=f"an attribute of {type(twin).__name__}",
                    remedy="return it with the results, or make it a buffer that forward writes into",
                )
            return vars(twin)[name]
        if name in WHOLE and hasattr(twin, name):
            return lambda *args, **kwargs: refuse_whole(name)
        found = inspect.getattr_static(type(twin), name, held)
        if found is held:
            raise AttributeError(self._lacks(name))
        return found.__get__(self, type(twin)) if hasattr(type(found), "__get__") else found

    def __getitem__(self, index: Any) -> Any:
        """As the twin's class has it: a part of a list or a dict of modules."""
        if isinstance(index, slice) and isinstance(self._twin, (nn.Sequential, nn.ModuleList)):
            return nn.ModuleList(list(self)[index])
        return self._as_twin("__getitem__", "is not subscriptable")(self, index)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._as_twin("__iter__", "is not iterable")(self))

    def __len__(self) -> int:
        return int(self._as_twin("__len__", "has no len()")(self))

    def __contains__(self, key: Any) -> bool:
        return bool(self._as_twin("__contains__", "is no container")(self, key))

    def __bool__(self) -> bool:
        return True

    def _as_twin(self, name: str, otherwise: str) -> Callable[..., Any]:
        """What the twin's class does in the place of an operator.

        Raises:
            TypeError: nothing, as the twin itself says.
        """
        kind = type(self.__dict__.get("_twin"))
        if not hasattr(kind, name):
            raise TypeError(f"{kind.__name__!r} object {otherwise}")
        return getattr(kind, name)  # type: ignore[no-any-return]

    def __dir__(self) -> list[str]:
        twin = self.__dict__.get("_twin")
        return [*super().__dir__(), *(dir(twin) if twin is not None else ())]  # type: ignore[no-untyped-call]

    def _lacks(self, name: str) -> str:
        inside = {own: part for own, part in self._modules.items() if own.startswith(NUMBER) and part is not None}
        pieces = [own for own, part in inside.items() if name in part._parameters or name in part._buffers]
        if pieces:
            return f"{name!r} is in {len(pieces)} pieces here: {', '.join(f'{own}.{name}' for own in pieces)}"
        return f"neither a parallel module nor {type(self.__dict__['_twin']).__name__!r} has an attribute {name!r}"


def refuse_whole(name: str) -> NoReturn:
    """Refuse a method that wants whole weights.

    Raises:
        Error: always.
    """
    raise Error(
        f"{name}() wants the model with whole weights, and here they may be pieces",
        where=f"pm.{name}(...)",
        expected="the model itself",
        got="a parallel module",
        remedy=f"with pm.gathered() as model: model.{name}(...)",
    )
