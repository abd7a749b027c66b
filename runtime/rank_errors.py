"""Error messages of rank programs that raise."""

from __future__ import annotations

from typing import Any

from torch import fx

from shardfx.ir.errors import Error
from shardfx.ir.graph import Node


def failed(rank: int, node: fx.Node | None, error: Exception) -> Error:
    """The error for a rank whose program raised; one that is an :class:`Error` already stays what it is."""
    if isinstance(error, Error):
        return error
    return Error(
        "a rank's program failed",
        where=place(rank, node),
        expected="every rank's program to come to its end",
        got=f"{type(error).__name__}: {str(error).strip()[:800]}",
        remedy="all ranks are ended; mend the line that is named, or what goes into it",
    )


def place(rank: int, node: fx.Node | None) -> str:
    """``rank 1; node 'mm_3'; layers.0.w1  model.py:42  `x @ self.w`; backward``."""
    if node is None:
        return f"rank {rank}"
    parts = [f"rank {rank}", f"node {node.name!r} ({target_name(node)})"]
    made = node.meta.get("shardfx")
    if isinstance(made, Node):
        code = f"  `{made.where.code.strip()}`" if made.where.code else ""
        parts += [f"{made.where}{code}".strip() or "no line of the model", made.phase.value]
    return "; ".join(parts)


def target_name(node: fx.Node) -> str:
    """``aten.mm.default``, ``all_reduce``, ``layout.pack``."""
    target: Any = node.target
    name = str(target) if not callable(target) or hasattr(target, "_schema") else target.__qualname__
    return name.removeprefix("_c10d_functional.").removesuffix(".default")
