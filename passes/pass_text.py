"""Passes as text: ``bucket-comm{mb=25.0}`` is ``BucketComm(mb=25.0)``.

A value is a Python literal (``25.0``, ``None``, ``[["a.*", "b"]]``), or a bare word for a string (``auto``,
``8GiB``, ``layers.*.w1``). What a pass prints, :func:`parse_pass` reads::

    >>> parse_pass("bucket-comm{mb=2}", {"bucket-comm": BucketComm}.__getitem__)
    BucketComm(mb=2.0)
"""

from __future__ import annotations

import ast
import difflib
import re
import types
import warnings
from collections.abc import Callable, Sequence
from dataclasses import MISSING, Field, fields
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from shardfx.ir.errors import Error

HEAD = re.compile(r"\s*([\w.-]+)\s*(?:\{(.*)\}\s*)?", re.DOTALL)
BARE = re.compile(r"[\w.*/+-]+")
TOKEN = re.compile(r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|.""", re.DOTALL)
"""A string, or any other character."""
NOT_FINITE = ("inf", "-inf", "nan")
NO_LITERAL = (ValueError, SyntaxError, TypeError, MemoryError, RecursionError)
Made = TypeVar("Made")


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
    hints = get_type_hints(kind)
    known = {each.name: each for each in fields(kind) if each.init}  # type: ignore[arg-type]
    options: dict[str, Any] = {}
    for item in _items(match[2] or "", text):
        name, equals, value = (part.strip() for part in item.partition("="))
        if not equals:
            raise _wrong(text, "an option has no value", "option=value", repr(item.strip()))
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            what, expected = f"pass {match[1]!r} has no option {name!r}", ", ".join(known) or "no options"
            raise _wrong(text, what, expected, item, f"did you mean {near[0]!r}?" if near else None)
        if name in options:
            raise _wrong(text, f"option {name!r} is given twice", "each option once", text)
        options[name] = _read(value, hints.get(name, Any), known[name], text)
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
    hints = get_type_hints(kind)
    return between.join(
        f"{each.name}: {_named(hints[each.name])}{_default(each)}" for each in fields(kind) if each.init
    )


def check_options(each: Any, where: str = "", **least: int) -> None:
    """Check the options of a pass by their declared types, and numbers by the ``least`` that they may be.

    Raises:
        Error: naming the option, what fits, and what was given.
    """
    hints, kind = get_type_hints(type(each)), type(each).__name__
    for name in (option.name for option in fields(each)):
        given = getattr(each, name)
        if not fits(given, hints[name]) or (name in least and given is not None and given < least[name]):
            raise Error(
                f"{kind}({name}=...) is of another kind",
                where=where or f"{kind}({name}=...)",
                expected=_named(hints[name]) + (f", {least[name]} or more" if name in least else ""),
                got=f"{given!r:.100} of type {type(given).__name__}",
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
    if hint in (bool, int, float, str):
        return type(value) is hint
    if origin is Callable:
        return callable(value)
    return isinstance(value, hint) if isinstance(hint, type) else True


def _items(text: str, full: str) -> list[str]:
    """The items between those commas that stand in no brackets or quotes."""
    items, depth, tokens = [""], 0, TOKEN.findall(text)
    for token in tokens:
        depth += (token in ("(", "[", "{")) - (token in (")", "]", "}"))
        if token == "," and not depth:
            items.append("")
        else:
            items[-1] += token
    if depth or not {"'", '"'}.isdisjoint(tokens):
        raise _wrong(full, "a quote or bracket is not closed", "each quote and bracket closed", full)
    return items if items[-1].strip() else items[:-1]


def _read(text: str, hint: Any, option: Field[Any], full: str) -> Any:
    """The value of an option, checked against the type that the pass declares."""
    value: Any
    try:
        value = _literal(text)
    except NO_LITERAL:
        if not BARE.fullmatch(text):
            what = f"option {option.name!r} has a value that cannot be read"
            raise _wrong(full, what, _named(hint), text) from None
        value = float(text) if text in NOT_FINITE and fits(0.0, hint) else text
    if type(value) is int and not fits(value, hint) and fits(float(value), hint):
        value = float(value)
    if not fits(value, hint):
        raise _wrong(full, f"option {option.name!r} has a value of another type", _named(hint), text)
    return value


def _literal(text: str) -> Any:
    """The Python literal that ``text`` is; raises one of ``NO_LITERAL`` where it is none."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.literal_eval(text)


def _value_text(value: Any) -> str:
    """A value as it is written in a pass: a string bare, where nothing else is written so."""
    if isinstance(value, float) and str(value) in NOT_FINITE:
        return str(value)
    if not isinstance(value, str) or not BARE.fullmatch(value) or value in NOT_FINITE:
        return repr(value)
    try:
        _literal(value)
    except NO_LITERAL:
        return value
    return repr(value)


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
