"""Passes as text: ``bucket-comm{mb=25.0}`` is ``BucketComm(mb=25.0)``.

A value is a Python literal (``25.0``, ``None``, ``[["a.*", "b"]]``), or a bare word for a string (``auto``,
``8GiB``, ``layers.*.w1``). What a pass prints, :func:`parse_pass` reads::

    >>> parse_pass("bucket-comm{mb=2}", {"bucket-comm": BucketComm}.__getitem__)
    BucketComm(mb=2.0, groups=())
"""

from __future__ import annotations

import difflib
import enum
import re
from collections.abc import Callable
from dataclasses import MISSING, Field, fields
from typing import TYPE_CHECKING, Any, TypeVar, get_args, get_type_hints

from shardfx.ir.errors import Error

from .options import BARE, NO_LITERAL, NOT_FINITE, fits, literal, named, value_text

if TYPE_CHECKING:
    pass

HEAD = re.compile(r"\s*([\w.-]+)\s*(?:\{(.*)\}\s*)?", re.DOTALL)


Made = TypeVar("Made")


def parse_pass(text: str, find: Callable[[str], type[Made]]) -> Made:
    """The pass that ``text`` says; ``find`` gives the class of a name (and raises for one that it does not know).

    Raises:
        Error: the text has another form, an option is unknown, missing or given twice, or a value does not fit.
    """
    match = HEAD.fullmatch(text)
    if match is None:
        raise Error(
            "this text is not a pass",
            where="Hints(passes=...)",
            expected="a name, and options in braces: bucket-comm{mb=25.0}",
            got=repr(text),
        )
    kind = find(match[1])
    hints = get_type_hints(kind)
    known = {each.name: each for each in fields(kind) if each.init}  # type: ignore[arg-type]
    options: dict[str, Any] = {}
    for item in split(match[2] or "", text):
        name, equals, value = (part.strip() for part in item.partition("="))
        if not equals:
            raise _wrong(text, "an option has no value", "option=value", repr(item.strip()))
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            remedy = f"did you mean {near[0]!r}?" if near else None
            raise _wrong(
                text, f"pass {match[1]!r} has no option {name!r}", ", ".join(known) or "no options", item, remedy
            )
        if name in options:
            raise _wrong(text, f"option {name!r} is given twice", "each option once", text)
        options[name] = read_value(value, hints.get(name, Any), known[name], text)
    try:
        return kind(**options)
    except (TypeError, ValueError) as error:
        raise _wrong(text, f"pass {match[1]!r} cannot be made: {error}", options_text(kind), text) from None


def split(text: str, whole: str) -> list[str]:
    """The items between those commas that stand in no brackets or quotes."""
    items, depth, quote, start, at = [], 0, "", 0, 0
    while at < len(text):
        letter = text[at]
        if quote:
            at += letter == "\\"
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        elif letter in "([{":
            depth += 1
        elif letter in ")]}":
            depth -= 1
        elif letter == "," and depth == 0:
            items.append(text[start:at])
            start = at + 1
        at += 1
    if quote or depth:
        raise _wrong(whole, "a quote or bracket is not closed", "each quote and bracket closed", whole)
    return items if not text[start:].strip() else [*items, text[start:]]


def read_value(text: str, hint: Any, option: Field[Any], whole: str) -> Any:
    """The value of an option, checked against the type that the pass declares."""
    value: Any
    try:
        value = literal(text)
    except NO_LITERAL:
        if not BARE.fullmatch(text):
            raise _wrong(whole, f"option {option.name!r} has a value that cannot be read", named(hint), text) from None
        value = float(text) if text in NOT_FINITE and fits(0.0, hint) else text
    for kind in (hint, *get_args(hint)):
        if isinstance(kind, type) and issubclass(kind, enum.Enum) and value in [each.value for each in kind]:
            return kind(value)
    if type(value) is int and not fits(value, hint) and fits(float(value), hint):
        value = float(value)
    if not fits(value, hint):
        raise _wrong(whole, f"option {option.name!r} has a value of another type", named(hint), text)
    return value


def options_text(kind: type[Any], between: str = ", ") -> str:
    """The options of a pass with their types and defaults: ``mb: float = 25.0``."""
    hints = get_type_hints(kind)
    return between.join(f"{each.name}: {named(hints[each.name])}{default(each)}" for each in fields(kind) if each.init)


def default(option: Field[Any]) -> str:
    """`` = 25.0``; nothing where the option must be given."""
    if option.default is not MISSING:
        return f" = {value_text(option.default)}"
    return f" = {value_text(option.default_factory())}" if option.default_factory is not MISSING else ""


def _wrong(text: str, what: str, expected: str, got: object, remedy: str | None = None) -> Error:
    return Error(what, where=f"pass {text!r}", expected=expected, got=got, remedy=remedy)
