"""Does a comm op have the keywords that it takes, and lead from its operand's placement to its result's?"""

from __future__ import annotations

from shardfx.ir.errors import Error
from shardfx.ir.graph import Node, Value
from shardfx.ir.mesh import Mesh
from shardfx.ir.ops.table import OwnOp, carried

from .complaint import Complaint


def check_comm(node: Node, op: OwnOp, operands: list[Value], mesh: Mesh, wrong: Complaint) -> None:
    """The keywords are the op's own, the axes the mesh's, and operand k becomes result k."""
    _keywords(node, op, mesh, wrong)
    results = node.outs
    if len(results) != (1 if op.joins else len(operands)) or not operands:
        got = f"{len(operands)} operands, {len(results)} results"
        expected = "one" if op.joins else "as many"
        wrong.fail(f"{op} does not have a result for each operand", node, expected=expected, got=got)
    for value, result in carried(node):
        if value.type != result.type:
            what = f"{op} changes the type of {wrong.name(value)}"
            wrong.fail(what, node, expected=value.type, got=result.type)
        if value.spec is None or result.spec is None:
            continue
        try:
            made = op.place(value.spec, value.shape, mesh, **node.kwargs)
        except Error as error:
            what = f"{op} cannot start from {wrong.name(value)}"
            wrong.fail(what, node, expected=error.expected, got=error.got)
        if made != result.spec:
            what = f"{op} does not lead to {wrong.name(result)}"
            wrong.fail(what, node, expected=made.text(value.shape), got=result.spec.text(result.shape))


def _keywords(node: Node, op: OwnOp, mesh: Mesh, wrong: Complaint) -> None:
    axes = tuple(node.kwargs.get("axes", ()))
    speaks = "axes" in op.keywords
    if speaks and (not axes or len(set(axes)) != len(axes) or any(axis not in mesh.names for axis in axes)):
        known = ", ".join(mesh.names)
        got = ", ".join(map(str, axes)) or "none"
        wrong.fail(f"the axes of {op} are not this mesh's", node, expected=f"axes=[...] of {known}", got=got)
    needed = {name for name, keyword in op.keywords.items() if keyword.needed}
    possible = op.keywords.keys() - needed
    for what, names in (
        ("does not take", [key for key in node.kwargs if key not in needed | possible]),
        ("needs", sorted(needed - node.kwargs.keys())),
    ):
        if names:
            takes = f"{', '.join(sorted(needed))}; perhaps {', '.join(sorted(possible)) or 'no other'}"
            got = ", ".join(node.kwargs)
            wrong.fail(f"{op} {what} the keyword {', '.join(names)}", node, expected=takes, got=got)
