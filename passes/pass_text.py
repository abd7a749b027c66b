"""Passes as text: ``bucket-comm{mb=25.0}`` is ``BucketComm(mb=25.0)``.

A value is a Python literal (``25.0``, ``None``, ``[["a.*", "b"]]``), or a bare word for a string (``auto``,
``8GiB``, ``layers.*.w1``). What a pass prints, :func:`parse_pass` reads::

    >>> parse_pass("bucket-comm{mb=2}", {"bucket-comm": BucketComm}.__getitem__)
    BucketComm(mb=2.0)
"""

from __future__ import annotations

import ast
import re
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, fields
from functools import cache
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from shardfx.ir.errors import Error, did_you_mean

HEAD = re.compile(r"\s*([\w.-]+)\s*(?:\{(.*)\}\s*)?", re.DOTALL)
BARE = re.compile(r"[\w.*/+-]+")
VALUE = re.compile(r"""('(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*")|(?<==)\s*([\w.*/+-]+)\s*(?=,|$)""", re.DOTALL)
"""A string in quotes, or a bare value."""
NOT_FINITE = ("inf", "-inf", "nan")
NO_LITERAL = (ValueError, SyntaxError, TypeError, MemoryError, RecursionError)
Made = TypeVar("Made")
types_of: Callable[[Any], dict[str, Any]] = cache(get_type_hints)


def parse_pass(text: str, find: Callable[[str], type[Made]]) -> Made:
    """The pass that ``text`` says; ``find`` gives the class of a name (and raises for one that it does not know).

    Raises:
        Error: the text has another form, an option is unknown, missing or given twice, or a value does not fit.
    """
    match = HEAD.fullmatch(text)
    if match is None:
        expected = "a name, and options in braces: bucket-comm{mb=25.0}"
        raise Error("this text is not a pass", where="Hints(passes=...)", expected=expected, got=repr(text))
    kind = find(match[1])
    hints = types_of(kind)
    known = {each.name: each for each in fields(kind) if each.init}  # type: ignore[arg-type]
    options = _options(match[2] or "", text)
    for name, value in options.items():
        if name not in known:
            what, expected = f"pass {match[1]!r} has no option {name!r}", ", ".join(known) or "no options"
            raise _wrong(text, what, expected, name, did_you_mean(name, known))
        if not fits(value, hints[name]) and (type(value) is int or value in NOT_FINITE) and fits(0.0, hints[name]):
            options[name] = value = float(value)
        if not fits(value, hints[name]):
            raise _wrong(text, f"option {name!r} has a value of another type", _named(hints[name]), repr(value))
    try:
        return kind(**options)
    except (TypeError, ValueError) as error:
        raise _wrong(text, f"pass {match[1]!r} cannot be made: {error}", options_text(kind), text) from None


def options_of(each: Any) -> str:
    """The options of a pass as text, ``{mb=25.0}``: the fields of the dataclass; nothing where it has none."""
    options = ",".join(f"{f.name}={_value_text(getattr(each, f.name))}" for f in fields(each) if f.init)
    return f"{{{options}}}" if options else ""


def options_text(kind: type[Any], between: str = ", ") -> str:
    """The options of a pass with their types and defaults: ``mb: float = 25.0``."""
    hints = types_of(kind)
    return between.join(
        f"{each.name}: {_named(hints[each.name])}{_default(each)}" for each in fields(kind) if each.init
    )


def check_options(each: Any, where: str = "", **least: int) -> None:
    """Check the options of a pass by their declared types, and numbers by the ``least`` that they may be.

    Raises:
        Error: naming the option, what fits, and what was given.
    """
    hints, kind = types_of(type(each)), type(each).__name__
    for name in (option.name for option in fields(each)):
        value = getattr(each, name)
        if not fits(value, hints[name]) or (name in least and value is not None and value < least[name]):
            raise Error(
                f"{kind}({name}=...) is not valid",
                where=where or f"{kind}({name}=...)",
                expected=_named(hints[name]).replace("tuple[Any, ...]", "a tuple, such as (x,)")
                + (f", {least[name]} or more" if name in least else ""),
                got=f"{value!r:.100} of type {type(value).__name__}",
                remedy=f"see help({type(each).__module__}.{kind})",
            )


def fits(value: Any, hint: Any) -> bool:
    """Whether a value is of a declared type; to a type that is none of the usual ones anything fits."""
    origin, args = get_origin(hint), get_args(hint)
    if hint is Any:
        return True
    if origin in (Union, types.UnionType):
        return any(fits(value, each) for each in args)
    if origin is Literal:
        return any(type(value) is type(each) and value == each for each in args)
    if origin in (tuple, list, Sequence):
        kinds, inner = (list, tuple) if origin is Sequence else origin, [arg for arg in args if arg is not ...]
        return isinstance(value, kinds) and all(any(fits(each, arg) for arg in inner) for each in value)
    if origin is Mapping:
        return isinstance(value, Mapping) and all(all(map(fits, pair, args)) for pair in value.items())
    if hint in (bool, int, float, str):
        return type(value) is hint
    if origin is Callable:
        return callable(value)
    return isinstance(value, hint) if isinstance(hint, type) else True


def _options(text: str, full: str) -> dict[str, Any]:
    """The options of a text, read as arguments of a call in which bare words stand in quotes."""

    def quoted(match: re.Match[str]) -> str:
        return match[0] if match[1] or _is_literal(match[2]) else repr(match[2])

    try:
        call = ast.parse(f"_({VALUE.sub(quoted, text)})", mode="eval").body
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and not call.args:
            options = {str(each.arg): ast.literal_eval(each.value) for each in call.keywords}
            if len(options) == len(call.keywords):
                return options
    except NO_LITERAL:
        pass
    expected = "option=value, each option once; a value is a Python literal, or a bare word"
    raise _wrong(full, "the options cannot be read", expected, text)


def _is_literal(text: str) -> bool:
    """Whether a text is a Python literal."""
    try:
        ast.literal_eval(text)
    except NO_LITERAL:
        return False
    return True


def _value_text(value: Any) -> str:
    """A value as it is written in a pass: a string bare, where nothing else is written so."""
    bare = isinstance(value, str) and BARE.fullmatch(value) and not _is_literal(value)
    return str(value) if bare else repr(value)


def _named(hint: Any) -> str:
    """A type as one would write it."""
    if get_origin(hint) is Literal:
        return " | ".join(map(repr, get_args(hint)))
    if get_origin(hint) is Union:
        return " | ".join(map(_named, get_args(hint)))
    if isinstance(hint, type) and not get_args(hint):
        return hint.__name__
    return str(hint).replace("collections.abc.", "").replace("typing.", "")


def _default(option: Field[Any]) -> str:
    """`` = 25.0``; nothing where the option must be given."""
    if option.default is not MISSING:
        return f" = {_value_text(option.default)}"
    return f" = {_value_text(option.default_factory())}" if option.default_factory is not MISSING else ""


def _wrong(text: str, what: str, expected: str, got: object, remedy: str | None = None) -> Error:
    return Error(what, where=f"pass {text!r}", expected=expected, got=got, remedy=remedy)
