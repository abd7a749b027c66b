"""Are a node's results what its op gives for these operands?"""

from __future__ import annotations

import torch

from shardfx.ir.builder import infer
from shardfx.ir.graph import Node, op_name
from shardfx.ir.spec import TensorType

from .complaint import Complaint


def check_types(node: Node, wrong: Complaint) -> None:
    """Run the op on ``meta`` and compare the number, shapes and dtypes of its results.

    A result that the graph leaves out may be one that the op gives. Ops that are not torch's, and those that have no
    kernel for ``meta``, are taken as they stand.
    """
    if not isinstance(node.op, torch._ops.OpOverload):
        return
    name = op_name(node.op)
    try:
        found = infer(node.op, node.args, node.kwargs)
    except NotImplementedError:
        return
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        wrong.fail(f"{name} does not take these arguments", node, expected=str(node.op._schema), got=reason)
    made = found if isinstance(found, list) else [found]
    if len(made) != len(node.results):
        wrong.fail(
            f"{name} has another number of results", node, expected=f"{len(made)}", got=f"{len(node.results)} results"
        )
    for index, (given, value) in enumerate(zip(made, node.results, strict=True)):
        if value is not None and value.type != given:
            got = _text(value.type)
            wrong.fail(f"result {index} is not what {name} gives", node, expected=_text(given), got=got)


def _text(type: TensorType | None) -> str:
    return "no tensor" if type is None else f"{list(type.shape)} of {type.dtype}"
