"""Where a program stops being what the model says."""

from __future__ import annotations

from dataclasses import dataclass

from shardfx.ir.graph import Node


@dataclass(frozen=True)
class Fault:
    """Where a program stops being what the model says, or being followed.

    ``certain``: the program is wrong, whatever goes in. Otherwise it may be right in a way that no rule knows.
    """

    what: str
    output: str = ""
    rank: int | None = None
    node: str = ""
    where: str = ""
    numbers: str = ""
    """What it gives, and what the model does, where that was run."""
    certain: bool = False
    seen: tuple[str, int] | None = None
    """At which node of which rank the proof ends, where ``node`` is one that somebody changed."""


def place(node: Node) -> str:
    """Where in the user's model a node comes from; communication that comes from no line: what it moves."""
    return str(node.where) or next((str(value.where) for value in node.operands), "")


class Failed(Exception):
    """Carries a fault."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.what)
        self.fault = fault
