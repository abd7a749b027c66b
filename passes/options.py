"""Values of options as text, and whether a value fits a declared type."""

from __future__ import annotations

import ast
import enum
import re
import types
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any, Literal, Union, get_args, get_origin

BARE = re.compile(r"[\w.*/+-]+")
NOT_FINITE = ("inf", "-inf", "nan")
NO_LITERAL = (ValueError, SyntaxError, TypeError, MemoryError, RecursionError)


def literal(text: str) -> Any:
    """The Python literal that ``text`` is; raises one of ``NO_LITERAL`` where it is none."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.literal_eval(text)


def fits(value: Any, hint: Any) -> bool:
    """Whether a value is of a declared type; to a type that is none of the usual ones anything fits."""
    origin, args = get_origin(hint), get_args(hint)
    if hint is Any:
        return True
    if hint is None or hint is type(None):
        return value is None
    if origin in (Union, types.UnionType):
        return any(fits(value, each) for each in args)
    if origin is Literal:
        return any(type(value) is type(each) and value == each for each in args)
    if origin is tuple:
        if not isinstance(value, tuple):
            return False
        inner = [args[0]] * len(value) if len(args) == 2 and args[1] is Ellipsis else args
        return len(value) == len(inner) and all(map(fits, value, inner))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return isinstance(value, Mapping) and all(fits(k, args[0]) and fits(v, args[1]) for k, v in value.items())
    if isinstance(origin, type) and issubclass(origin, Iterable):
        kinds = (origin,) if origin in (list, set, frozenset) else (list, tuple)
        return isinstance(value, kinds) and all(fits(each, args[0]) for each in value)
    if hint in (bool, int, float, str):
        return type(value) is hint
    return isinstance(value, hint) if isinstance(hint, type) else True


def value_text(value: Any) -> str:
    """A value as it is written in a pass: a string bare, where nothing else is written so."""
    if isinstance(value, enum.Enum):
        return value_text(value.value)
    if isinstance(value, float) and str(value) in NOT_FINITE:
        return str(value)
    if not isinstance(value, str) or not BARE.fullmatch(value) or value in NOT_FINITE:
        return repr(value)
    try:
        literal(value)
    except NO_LITERAL:
        return value
    return repr(value)


def named(hint: Any) -> str:
    """A type as one would write it."""
    if isinstance(hint, type) and not get_args(hint):
        return hint.__name__
    return str(hint).replace("collections.abc.", "").replace("typing.", "")


def options_of(each: Any) -> str:
    """The options of a pass as text, ``{mb=25.0}``: the fields of the dataclass; nothing where it has none."""
    options = ",".join(f"{f.name}={value_text(getattr(each, f.name))}" for f in fields(each) if f.init)
    return f"{{{options}}}" if options else ""
