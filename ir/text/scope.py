"""Scopes of a graph's text: names of values, files and mesh axes, written and read."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from shardfx.ir.errors import Error
from shardfx.ir.graph import Graph, Value, Where
from shardfx.ir.mesh import Link, Loop, Mesh
from shardfx.ir.reasons import ShardingDecision

from .lexer import T, TextLine

BARE_VALUE = re.compile(r"\w[\w./-]*")
BARE_NAME = re.compile(r"[^\W\d][\w.]*")
BARE_SOURCE = re.compile(r"[\w./<>-]+")
WHERE = re.compile(r'("(?:[^"\\]|\\.)*"|[^\s"#:]+)(?::(\d+))?(?:\s+|$)')


def quoted(name: str, bare: re.Pattern[str]) -> str:
    """The name as it is where it has the form ``bare``, else in quotes."""
    return name if bare.fullmatch(name) else json.dumps(name)


def unquoted(text: str) -> str:
    """The inverse of :func:`quoted`."""
    return str(json.loads(text)) if text.startswith('"') else text


class PrintScope:
    """What a graph's values and files are called in its text, and whether anything is placed."""

    def __init__(self, graph: Graph) -> None:
        self.tokens = _value_tokens(graph)
        self.labels = _file_labels([where.file for where in _sources(graph)])
        self.placed = any(value.spec is not None for value in graph.values())
        self.numbers: dict[ShardingDecision, int] = {}

    def use(self, value: Value) -> str:
        """The name of a value where it is used; a value that the graph does not define has a name in ``<>``."""
        return self.tokens.get(value) or f"%<{value.name or '?'}>"


@dataclass
class ReadScope:
    """What a text has said so far: its mesh, its files, and the values that may be used."""

    mesh: Mesh | None = None
    sizes: dict[str, int | Loop] = field(default_factory=dict)
    links: dict[str, Link] = field(default_factory=dict)
    placed: bool = True
    files: dict[str, str] = field(default_factory=dict)
    values: dict[str, Value] = field(default_factory=dict)
    behind: list[tuple[ShardingDecision, TextLine, list[int]]] = field(default_factory=list)
    """Decisions with the numbers of those that they are behind."""

    def define(self, line: TextLine, token: str, value: Value) -> None:
        """Let ``token`` stand for the value from here on."""
        if token in self.values:
            line.fail("a name that is new", f"{token}, which is defined already")
        value.name = unquoted(token[1:])
        self.values[token] = value

    def use(self, line: TextLine) -> Value:
        """The value that the token at hand stands for."""
        found = self.values.get(line.token)
        if found is None:
            line.fail("a value that is defined above", line.token)
        line.next()
        return found

    def mesh_axis(self, line: TextLine) -> str:
        """The mesh axis at hand."""
        if line.token not in self.sizes:
            line.fail(f"a mesh axis: {', '.join(self.sizes) or 'none, for there is no mesh line above'}")
        return line.next()


def checked(line: TextLine, make: Callable[[], T]) -> T:
    """Make something that checks itself; its error says the line too."""
    try:
        return make()
    except Error as error:
        where = f"line {line.number}: {line.text.strip()}"
        raise Error(error.what, where=where, expected=error.expected, got=error.got, remedy=error.remedy) from None


def _value_tokens(graph: Graph) -> dict[Value, str]:
    """The name of each value: of inputs by name, of the rest by name if all have one of their own, else by number."""
    tokens: dict[Value, str] = {}
    for inp in graph.inputs:
        bare = BARE_VALUE.fullmatch(inp.name) and not inp.name.isdigit()
        tokens[inp.value] = f"%{inp.name}" if bare else f"%{json.dumps(inp.name)}"
    made = dict.fromkeys(value for node in graph.nodes for value in node.outs)
    named = {value: f"%{value.name}" for value in made if BARE_VALUE.fullmatch(value.name)}
    if len({*tokens.values(), *named.values()}) < len(tokens) + len(made):
        named = {value: f"%{number}" for number, value in enumerate(made)}
    return {**named, **tokens}


def _sources(graph: Graph) -> list[Where]:
    """The sources of nodes and guards."""
    return [node.where for node in graph.nodes] + [o.guard.where for o in graph.outputs if o.guard is not None]


def _file_labels(files: Iterable[str]) -> dict[str, str]:
    """For each file the shortest end of its path that no other has: ``model.py``, or ``vision/model.py``."""
    labels: dict[str, str] = {}
    taken: set[str] = set()
    for file in sorted(dict.fromkeys(files), key=lambda file: "/" in file):
        parts = file.split("/")
        ends = ("/".join(parts[-count:]) for count in range(1, len(parts) + 1))
        labels[file] = next((end for end in ends if end and end not in taken), file)
        taken.add(labels[file])
    labels.pop("", None)
    return labels


def write_where(where: Where, scope: PrintScope) -> str | None:
    """`` layers.0  model.py:42``, None where nothing is known."""
    parts = [quoted(where.module, BARE_SOURCE)] if where.module else []
    if where.file:
        parts.append(f"{quoted(scope.labels.get(where.file, where.file), BARE_SOURCE)}:{where.line}")
    return f" {'  '.join(parts)}" if parts else None


def read_where(line: TextLine, scope: ReadScope) -> Where:
    """A module, a file with a line, or both."""
    module, file, number = "", "", 0
    line.at = line.start if line.kind else line.at
    while match := WHERE.match(line.text, line.at):
        line.at = match.end()
        name = unquoted(match[1])
        if match[2] is None:
            module = name
        else:
            file, number = scope.files.get(name, name), int(match[2])
    line.next()
    return Where(module, file, number)
