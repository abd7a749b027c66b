"""Errors for the user: what, where, expected, got, remedy."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class Error(Exception):
    """A mistake that the caller can mend.

    Example::

        raise Error("unknown mesh axis 'tq'", where="hint 'layers.*.w1.weight'",
                    expected="one of dp, tp", got="tq", remedy="spell it as in Mesh(...)")
    """

    def __init__(
        self,
        what: str,
        *,
        where: str | None = None,
        expected: object = None,
        got: object = None,
        remedy: str | None = None,
    ) -> None:
        self.what = what
        self.where = where = where or None
        self.expected = expected
        self.got = got
        self.remedy = remedy
        lines = [what]
        for label, value in (("where", where), ("expected", expected), ("got", got), ("remedy", remedy)):
            if value is not None:
                lines.append(f"  {label + ':':<10}{value}")
        super().__init__("\n".join(lines))

    def at(self, where: str | None) -> Error:
        """The same, said of a place."""
        return Error(self.what, where=where, expected=self.expected, got=self.got, remedy=self.remedy)

    def in_call(self, how: str) -> None:
        """Say it of a call that differs from the captured one."""
        got = f"{self.got}; the call differs from the captured one: {how}" if self.got is not None else f"a call: {how}"
        Error.__init__(self, self.what, where=self.where, expected=self.expected, got=got, remedy=self.remedy)


def did_you_mean(name: str, known: Iterable[str], otherwise: str | None = None, *, count: int = 1) -> str | None:
    """The remedy of an unknown name: up to ``count`` names that come near, or else another one."""
    near = difflib.get_close_matches(name, list(known), count, 0.6 if count == 1 else 0.5)
    return f"did you mean {' or '.join(map(repr, near))}?" if near else otherwise


class ShardfxWarning(UserWarning):
    """A warning about something that works, but not as well as the user may think."""


DOES_NOT_RUN = (RuntimeError, ArithmeticError, LookupError, TypeError, ValueError, AttributeError, AssertionError)
"""What a call raises that cannot be made of its arguments, whatever these are."""
