"""The module that each node is drawn in: its own, or, where none is known, that of its neighbours.

Backward adds up the gradients of a value that is used more than once, and no module is known of such a sum. Were it
drawn outside of its block, every block would be torn apart there. The same goes for what a pass put behind it.
"""

from __future__ import annotations

from collections.abc import Iterable

from shardfx.ir.graph import Graph, Node, Phase
from shardfx.ir.ops.traits import base_name, is_own, is_view

from .adopt import adopt


def homes(graph: Graph) -> dict[Node, str]:
    """The path of the module that each node is drawn in."""
    found: dict[Node, str] = {}
    order = {node: i for i, node in enumerate(graph.nodes)}
    users = graph.users()

    def following(node: Node, depth: int = 3) -> list[str]:
        """The modules that use a node, seen through further sums."""
        paths = []
        for user in (user for value in node.outs for user in users[value] if user.phase is node.phase):
            if not is_lost(user):
                paths.append(user.where.module)
            elif depth:
                others = [found[v.node] for v in user.operands if v.node in found and v.node is not node]
                paths += others or following(user, depth - 1)
        return paths

    for node in graph.nodes:
        found[node] = node.where.module
        if is_lost(node):
            behind = [path for path in following(node) if path]
            sources = sorted({value.node for value in node.operands if value.node is not None}, key=order.__getitem__)
            if not sources:
                found[node] = common(behind)
                continue
            around = common(found[source] for source in sources)
            nearest = common([found[sources[-1]], behind[0]]) if behind else ""
            found[node] = max(around, nearest, key=_depth)
        elif is_view(node):
            found[node] = _shared_home(node, found, [user.where.module for v in node.outs for user in users[v]])
    adopt(graph, found)
    return found


def is_lost(node: Node) -> bool:
    """Whether a node has no module though it belongs to one."""
    is_sum = node.phase is Phase.BACKWARD and base_name(node) == "add" and len(node.operands) == 2
    return not node.where.module and (is_sum or is_own(node))


def _shared_home(node: Node, found: dict[Node, str], users: list[str]) -> str:
    """Where a view belongs that one block makes of an outer value, and all the other blocks use too."""
    own = found[node]
    shared = common([own, *users])
    sources = [found.get(value.node, "") if value.node is not None else "" for value in node.operands]
    return (
        shared
        if _depth(shared) < _depth(own) and all(_depth(common([s, own])) <= _depth(shared) for s in sources)
        else own
    )


def _depth(path: str) -> int:
    return path.count(".") + bool(path)


def common(paths: Iterable[str]) -> str:
    """The innermost module around some."""
    shared: list[str] = []
    for names in zip(*(path.split(".") for path in paths), strict=False):
        if len(set(names)) > 1:
            break
        shared.append(names[0])
    return ".".join(shared)
