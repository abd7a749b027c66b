"""What a picture says when one points at something."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from shardfx.ir.cost.traffic import over_time, traffic
from shardfx.ir.graph import Node, Value, op_name
from shardfx.ir.mesh import Mesh
from shardfx.ir.ops.sends import is_comm
from shardfx.ir.text.printer import size_text
from shardfx.visualize.scene.boxes import TIMES, Box, Kind

from .style import stage_text, type_text

MOST_OPS = 24


def box_text(box: Box, mesh: Mesh) -> str:
    """Where a box comes from, why it is as it is, and the ops in it."""
    if box.kind in (Kind.INPUT, Kind.OUTPUT):
        return "\n".join([f"{box.note} {box.title}", *(type_text(value) for value in box.tags)])
    lines = []
    if box.kind in (Kind.OPEN, Kind.CLOSED):
        nodes = box.inside if box.kind is Kind.CLOSED else [node for leaf in box.leaves() for node in leaf.nodes]
        lines.append(
            f"{box.path or box.title}: {len(nodes)} ops"
            + (f", drawn once for {box.count} equal blocks" if box.count > 1 else "")
            + "".join(f", done in each of {mesh[axis].size} turns of {axis}" for axis in box.turns)
        )
        lines += [_counts(nodes), *_source(nodes[:1])]
        if box.kind is Kind.CLOSED:
            lines += ["", *_ops(box.nodes, mesh)]
    else:
        lines += [*_ops(box.nodes, mesh), "", *_source([box.main])]
    lines += _reasons(box.nodes)
    return "\n".join(lines).strip()


def wire_text(values: Sequence[Value], targets: Iterable[Box]) -> str:
    """What goes along a line, and from where to where."""
    lines = []
    for value in values[:MOST_OPS]:
        lines.append(f"%{value.name}  {type_text(value)}")
        lines.append(f"  from {op_name(value.node.op)}  {value.node.where}" if value.node else "  an input")
        if value.node is not None and value.node.why:
            lines.append(f"  why: {value.node.why}")
    if len(values) > MOST_OPS:
        lines.append(f"… and {len(values) - MOST_OPS} more")
    goals = Counter(f"{target.label} {target.title}".strip() for target in targets)
    lines.append(f"to {', '.join(list(goals)[:6])}" + (" …" if len(goals) > 6 else ""))
    return "\n".join(lines)


def _counts(nodes: Iterable[Node]) -> str:
    counts = Counter(op_name(node.op) for node in nodes).most_common(12)
    return ", ".join(f"{number} {TIMES} {name}" if number > 1 else name for name, number in counts)


def _ops(nodes: Sequence[Node], mesh: Mesh) -> list[str]:
    lines = []
    for node in nodes[:MOST_OPS]:
        results = ", ".join(f"%{value.name} {type_text(value)}" for value in node.outs)
        lines.append(f"{op_name(node.op)} → {results}")
        if is_comm(node):
            one = traffic(node, mesh)
            turns = f", {one.turns} times" if one.turns > 1 else ""
            members = "turns" if over_time(node, mesh) else "ranks"
            reduce = node.kwargs.get("reduce")
            lines.append(
                f"  over {', '.join(one.axes)} ({mesh.extent(one.axes)} {members})"
                + (f", {reduce}" if reduce else "")
                + f": {size_text(one.nbytes)} sent per rank{turns}"
            )
    if len(nodes) > MOST_OPS:
        lines.append(f"… and {len(nodes) - MOST_OPS} more")
    return lines


def _source(nodes: Iterable[Node]) -> list[str]:
    lines = []
    for node in nodes:
        where = node.where
        lines.append(f"at {where}" if str(where) else "")
        if where.code:
            lines.append(f"  {where.code.strip()}")
        if node.at:
            lines.append(stage_text(node.at))
    return [line for line in lines if line]


def _reasons(nodes: Iterable[Node]) -> list[str]:
    """What passes said of the nodes: why, which pass made them, and its own remarks."""
    nodes = list(nodes)
    lines = [f"why: {why}" for why in list(dict.fromkeys(node.why for node in nodes if node.why))[:6]]
    makers = dict.fromkeys(node.made_by for node in nodes if node.made_by)
    lines += [f"made by pass {', '.join(makers)}"] if makers else []
    remarks = dict.fromkeys(f"{key}={value}" for node in nodes for key, value in node.attrs.items())
    return lines + ([f"remarks: {', '.join(list(remarks)[:6])}"] if remarks else [])
