"""Where in the model something stands, as the end of a line says it: ``layers.0  model.py:42``."""

from __future__ import annotations

import re

from shardfx.ir.graph import Where

from .lexer import Line
from .scope import BARE_SOURCE, PrintScope, ReadScope, quoted, unquoted

WHERE = re.compile(r'("(?:[^"\\]|\\.)*"|[^\s"#:]+)(?::(\d+))?(?:\s+|$)')


def write_where(where: Where, scope: PrintScope) -> str | None:
    """`` layers.0  model.py:42``, None where nothing is known."""
    parts = [quoted(where.module, BARE_SOURCE)] if where.module else []
    if where.file:
        parts.append(f"{quoted(scope.labels.get(where.file, where.file), BARE_SOURCE)}:{where.line}")
    return f" {'  '.join(parts)}" if parts else None


def read_where(line: Line, scope: ReadScope) -> Where:
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
