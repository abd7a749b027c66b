"""The lexer of a graph's text, and errors with the position where reading stopped."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import NoReturn, TypeVar

from shardfx.ir.errors import Error

T = TypeVar("T")

TOKEN = re.compile(
    r"""(?P<space>\s+|\#.*)
      | (?P<value>%(?:"(?:[^"\\]|\\.)*"|\w[\w./-]*))
      | (?P<string>"(?:[^"\\]|\\.)*")
      | (?P<number>-?(?:\d+(?:\.\d*)?(?:[eE][+-]?\d+)?|inf\b|nan\b))
      | (?P<word>[^\W\d][\w.]*)
      | (?P<mark>.)""",
    re.VERBOSE,
)


class TextLine:
    """The tokens of a line, read from left to right; ``kind`` is that of the next one, '' at the end."""

    def __init__(self, text: str, number: int) -> None:
        self.text, self.number, self.at = text, number, 0
        self.kind = self.token = ""
        self.next()

    def next(self) -> str:
        """Step over the token at hand; gives its text."""
        gone = self.token
        while True:
            match = TOKEN.match(self.text, self.at)
            if match is None:
                self.kind, self.token = "", "the end of the line"
                return gone
            self.start, self.at = self.at, match.end()
            if match.lastgroup != "space":
                self.kind, self.token = match.lastgroup or "", match.group()
                return gone

    def fail(self, expected: str, got: object = None) -> NoReturn:
        """Refuse the line. ``got`` is the token at hand, if not given.

        Raises:
            Error: always, with the line's number and text.
        """
        where = f"line {self.number}: {self.text.strip()}"
        raise Error("the text of a graph cannot be read", where=where, expected=expected, got=got or self.token)

    def accept(self, token: str) -> bool:
        """Step over the token if it is this one."""
        if self.kind == "string" or self.token != token:
            return False
        self.next()
        return True

    def expect(self, token: str) -> None:
        """Go past this token, or refuse the line."""
        if not self.accept(token):
            self.fail(repr(token))

    def take(self, kind: str, what: str) -> str:
        """The next token, which must be of a kind: ``what`` says in words what is expected."""
        if self.kind != kind:
            self.fail(what)
        return self.next()

    def word(self, what: str) -> str:
        """The next token, which must be a word."""
        return self.take("word", what)

    def name(self, what: str) -> str:
        """A word, or anything in quotes."""
        return json.loads(self.next()) if self.kind == "string" else self.word(what)

    def number_of(self, type: Callable[[str], T], what: str) -> T:
        """The next token as a number of a type (``int``, ``float``), or the line is refused."""
        text = self.take("number", what)
        try:
            return type(text)
        except ValueError:
            self.fail(what, text)

    def many(self, item: Callable[[], T], end: str) -> list[T]:
        """Items with commas between (and one after, if you like) up to ``end``; without an ``end`` at least one."""
        found: list[T] = []
        while not (end and self.accept(end)):
            found.append(item())
            if not self.accept(","):
                if end:
                    self.expect(end)
                break
        return found
