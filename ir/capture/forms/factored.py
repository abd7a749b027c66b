"""Ops of torch.linalg whose results hang on how a matrix lies in memory.

Of a matrix that lies row by row, ``det``, ``slogdet`` and ``solve`` factor the transposed one, which costs no copy;
their gradients are written down for the one or the other. So every such matrix lies row by row: when it is traced, by a
call before the op, and in a rank's program, as the op's rule says.
"""

from __future__ import annotations

import torch

from shardfx.ir.errors import Error

aten = torch.ops.aten
CALLED = (
    aten.det.default,
    aten.linalg_det.default,
    aten.linalg_slogdet.default,
    aten.linalg_solve.default,
    aten.linalg_solve_ex.default,
    aten.linalg_tensorsolve.default,
    aten.logdet.default,
    aten.slogdet.default,
)
FACTORING = (aten._linalg_det.default, aten._linalg_slogdet.default, aten._linalg_solve_ex.default)


def lay_row_by_row(exported: torch.fx.GraphModule) -> None:
    """Have the matrices that an exported program factors lie row by row."""
    for node in exported.graph.nodes:
        if node.target in CALLED:
            with exported.graph.inserting_before(node):
                matrix = exported.graph.call_function(aten.contiguous.default, (node.args[0],))
                matrix.meta = dict(node.meta)
            node.args = (matrix, *node.args[1:])
    exported.recompile()


def check_rows(node: torch.fx.Node, where: str) -> None:
    """Check that a call of a traced graph factors no other matrix.

    Raises:
        Error: it does.
    """
    given = node.args[0] if node.target in FACTORING else None
    matrix = given.meta.get("val") if isinstance(given, torch.fx.Node) else None
    if matrix is not None and not matrix.is_contiguous() and not matrix.is_complex():
        raise Error(
            f"{node.target} factors a matrix that does not lie row by row, and its gradient hangs on that",
            where=where,
            expected="a matrix that is contiguous",
            got=f"strides {tuple(matrix.stride())} of shape {tuple(matrix.shape)}",
            remedy="call .contiguous() on the matrix first",
        )
