"""Name patterns of hints, and which values leave a module."""

from __future__ import annotations

import re

from .graph import Graph, Node, Phase, Value


def pattern(text: str) -> re.Pattern[str]:
    """``*`` is one part of a dotted name, ``**`` any number of them."""
    parts = re.split(r"(\*\*|\*)", text)
    return re.compile("".join({"**": ".*", "*": "[^.]*"}.get(p, re.escape(p)) for p in parts))


def module_outputs(graph: Graph) -> dict[str, list[Value]]:
    """For every module path the forward values that leave the module: per call the last one."""
    forward = [node for node in graph.nodes if node.phase is Phase.FORWARD]
    users: dict[Value, list[Node]] = {}
    for node in forward:
        for value in node.operands:
            users.setdefault(value, []).append(node)
    results = {output.value for output in graph.outputs if output.kind.value in ("result", "loss")}
    found: dict[str, list[Value]] = {}
    last: dict[str, int] = {}
    for i, node in enumerate(forward):
        for path in prefixes(node.where.module):
            for value in node.outs:
                outside = value in results or any(not within(u.where.module, path) for u in users.get(value, ()))
                if outside and value.type.dtype.is_floating_point:
                    since = forward[last[path] + 1 : i] if path in last else []
                    left = any(not within(each.where.module, path) and each.where.module for each in since)
                    if path not in last or left:  # the program left the module, and calls it once more
                        found.setdefault(path, []).append(value)
                    else:
                        found[path][-1] = value
                    last[path] = i
    return found


def prefixes(path: str) -> list[str]:
    """The module at the path and those around it, outermost first: ``a.b`` gives ``a``, ``a.b``."""
    parts = path.split(".") if path else []
    return [".".join(parts[: i + 1]) for i in range(len(parts))]


def block_of(module: str) -> str:
    """The block that a module lies in: up to the first part of its path that is a number; empty where none is. The
    numbers of a weight's parametrizations count none. ``encoder.block.3.layer.0`` lies in ``encoder.block.3``."""
    parts = module.partition(".parametrizations.")[0].split(".")
    at = next((i for i, part in enumerate(parts) if part.isdigit()), None)
    return ".".join(parts[: at + 1]) if at is not None else ""


def within(module: str, path: str) -> bool:
    """Whether a module is the one at ``path``, or lies in it."""
    return module == path or module.startswith(path + ".")
