"""A module that looks like another one: its attributes and methods, on the tensors and modules of its own."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

from torch import nn

from shardfx.ir.capture.python_state.bytecode import set_by_calls
from shardfx.ir.errors import Error

STATE = frozenset(vars(nn.Module()))
NUMBER = "@"
"""Begins the name of a module that holds one piece of a parameter, and has the number of the piece."""
WHOLE = ("generate", "save_pretrained", "push_to_hub")
"""Methods that want the weights of the model, whole."""


class Held(dict[str, Any]):
    """The parameters or buffers of a module that looks like another one: those that are sharded are not missing."""

    def __init__(self, owner: Like, held: Mapping[str, Any]) -> None:
        super().__init__(held)
        self._owner = owner

    def __missing__(self, name: str) -> NoReturn:
        self._owner._reject_in_pieces(name)
        raise KeyError(name)


class Like(nn.Module):
    """Has what its twin has: a copy of a module of the model without weights."""

    _twin: nn.Module

    def _show(self, twin: nn.Module) -> None:
        own = self.__dict__
        own["_twin"] = twin
        own |= {place: Held(self, own[place]) for place in ("_parameters", "_buffers")}

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
            self._reject_in_pieces(name)
            kind = type(self.__dict__["_twin"]).__name__
            raise AttributeError(f"neither a parallel module nor {kind!r} has an attribute {name!r}")
        return found.__get__(self, type(twin)) if hasattr(type(found), "__get__") else found

    def __getitem__(self, index: Any) -> Any:
        """As the twin's class has it: a part of a list or a dict of modules."""
        if isinstance(index, slice) and isinstance(self._twin, (nn.Sequential, nn.ModuleList)):
            return nn.ModuleList(list(self)[index])
        return self._as_twin("__getitem__", "is not subscriptable")(self, index)

    def __setitem__(self, index: Any, value: Any) -> None:
        self._refuse_item("__setitem__", "another module", "does not support item assignment")

    def __delitem__(self, index: Any) -> None:
        self._refuse_item("__delitem__", "one module less", "doesn't support item deletion")

    def _refuse_item(self, name: str, got: str, otherwise: str) -> None:
        self._as_twin(name, otherwise)
        raise Error(
            "the modules of a parallel module cannot be changed",
            where=f"{self.__dict__.get('_path') or 'pm'} ({type(self._twin).__name__})",
            expected="the model as it was parallelized",
            got=got,
            remedy="change the model, and parallelize it again",
        )

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

    def _reject_in_pieces(self, name: str) -> None:
        """No AttributeError: ``getattr(module, "weight", None)`` would say that there is none.

        Raises:
            Error: it is a parameter or a buffer that is sharded.
        """
        inside = {own: part for own, part in self._modules.items() if own.startswith(NUMBER) and part is not None}
        pieces = [own for own, part in inside.items() if name in part._parameters or name in part._buffers]
        if pieces:
            raise Error(
                f"{name!r} is in {len(pieces)} pieces here",
                where=f"{self.__dict__.get('_path') or 'pm'} ({type(self.__dict__['_twin']).__name__})",
                expected=f"{', '.join(f'{own}.{name}' for own in pieces)}, or the whole: pm.full_state_dict()",
                got=f"the whole {name!r} asked for",
                remedy="what is to change a module (a parametrization, pruning) is put on the model before parallelize",
            )


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
