"""The registry of ops that are not torch's: rows of graphs and of rank programs, ours and those of plug-ins alike.

    %5 = comm.all_reduce(%4, axes=[tp])        an ``OwnOp`` of :mod:`shardfx.ir.ops.table`, found by its name
    take = pack.take(x, [8, 4], 0, 0, 4)       a ``LocalOp``, found by its function, or by its name

Our modules call :func:`register` when they are imported; for the rows of a plug-in's entry point ``shardfx.ops`` it is
called before a plan is made or read.
"""

from __future__ import annotations

from typing import Any

import torch

from .errors import Error


class GraphOp:
    """An op of graphs that is not torch's: an ``OwnOp``."""


GRAPH_OPS: dict[str, Any] = {}
"""The ops of graphs, by name."""
PROGRAM_OPS: dict[str, Any] = {}
"""The calls of rank programs, by name."""
BY_FUNCTION: dict[Any, Any] = {}
"""The calls of rank programs, by function."""


def register(*rows: Any) -> None:
    """Add rows to the registry: parser, validation, lowering, cost, proof and pictures then know them.

    Raises:
        Error: another row has this name or function.
    """
    for row in rows:
        function = None if isinstance(row, GraphOp) else row.function
        table = GRAPH_OPS if function is None else PROGRAM_OPS
        known = table.get(row.name, row) if function is None else BY_FUNCTION.get(key_of(function), row)
        if known is not row or table.get(row.name, row) is not row:
            raise Error(f"two ops are called {row.name!r}", expected="a name and a function of its own", got=repr(row))
        table[row.name] = row
        if function is not None:
            BY_FUNCTION[key_of(function)] = row


def unregister(*rows: Any) -> None:
    """Take rows out of the registry."""
    for row in rows:
        GRAPH_OPS.pop(row.name, None)
        PROGRAM_OPS.pop(row.name, None)
        BY_FUNCTION.pop(key_of(getattr(row, "function", None)), None)


def key_of(function: Any) -> Any:
    """What a function is found by: of a torch op what hashes without calling Python."""
    return function._op if isinstance(function, torch._ops.OpOverload) else function
