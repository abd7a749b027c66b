"""What a model does between the blocks of a list belongs to the blocks.

    for block in self.blocks:
        x = x + block(x)          # the sum is an op of the model, not of the block

Were the sums drawn outside, no block could be folded. So what follows every block in the same way is drawn in it.
"""

from __future__ import annotations

from shardfx.ir.graph import Graph, Node


def adopt(graph: Graph, home: dict[Node, str]) -> None:
    """Change ``home`` so that ops which follow every block of a list alike stand in that block."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    block_of: dict[Node, str] = {}
    after: dict[tuple[str, str], dict[str, list[Node]]] = {}
    for node in graph.nodes:
        sources = [v.node for v in node.operands if v.node is not None and v.node.phase is node.phase]
        last = max(sources, key=order.__getitem__, default=None)
        if last is None:
            continue
        block = block_of.get(last) or first_block(home[last], home[node])
        if block and not (home[node] + ".").startswith(block + "."):
            place = block.rpartition(".")[0]
            if place == home[node] or is_inside(place, home[node]):
                block_of[node] = block
                after.setdefault((place, node.phase), {}).setdefault(block, []).append(node)
    for blocks in after.values():
        ordered = list(blocks.values())
        if len(ordered) < 2:
            continue
        shared = _common_length(ordered[:-1] if len(ordered) > 2 else ordered)
        for block, nodes in blocks.items():
            for node in nodes[:shared]:
                home[node] = block


def is_inside(path: str, around: str) -> bool:
    """Whether a module lies in another."""
    return not around or path.startswith(around + ".")


def first_block(path: str, around: str) -> str:
    """The outermost numbered module around ``path`` that is inside ``around``, such as ``blocks.3``."""
    if not is_inside(path, around):
        return ""
    parts = path.split(".")
    for i in range(around.count(".") + bool(around), len(parts)):
        if parts[i].isdigit() and i:
            return ".".join(parts[: i + 1])
    return ""


def _common_length(lists: list[list[Node]]) -> int:
    """How many nodes at the start are the same ops in all lists."""
    length = 0
    for nodes in zip(*lists, strict=False):
        if len({(node.op, tuple(value.type for value in node.outs)) for node in nodes}) > 1:
            break
        length += 1
    return length
