"""Conversion of calls of torch's functions and Python's operators, in a program that a user changed, to ATen calls.

product = operator.matmul(x, w)                 product = aten.mm.default(x, w)
sum = operator.add(product, bias)        ->     sum = aten.add.Tensor(product, bias)
out = F.gelu(sum)                               out = aten.gelu.default(sum)
"""

from __future__ import annotations

import operator
from collections.abc import Hashable
from functools import cache
from itertools import chain
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from shardfx.ir.cost.replay import values
from shardfx.ir.errors import DOES_NOT_RUN, Error
from shardfx.ir.ops.local_ops import row_of
from shardfx.ir.ops.pack import IDENTITY
from shardfx.ir.program.rank_program import RankProgram

from .data_movement import PACKING


@cache
def _functions() -> frozenset[Any]:
    """torch's functions of tensors, and Python's operators, that :func:`as_aten_calls` traces."""
    of_torch = chain(*torch.overrides.get_overridable_functions().values())
    known = {*PACKING, *IDENTITY, operator.getitem}
    return frozenset(each for each in (*of_torch, *vars(operator).values()) if callable(each)) - known


def as_aten_calls(program: RankProgram) -> RankProgram:
    """The same program with the ATen calls that ``F.gelu``, ``torch.sigmoid`` or ``operator.add`` dispatch to in their
    place."""
    if not any(isinstance(each.target, Hashable) and each.target in _functions() for each in program.graph.nodes):
        return program
    made = program.copy()
    try:
        known = values(program)
        for node in list(made.graph.nodes):
            if node.op == "call_function" and node.target in _functions() and row_of(node.target) is None:
                _trace(made.graph, node, known)
    except (Error, *DOES_NOT_RUN):  # which is said where the program is run on shapes
        return program
    return made


def _trace(graph: fx.Graph, node: fx.Node, known: dict[str, Any]) -> None:
    operands = node.all_input_nodes

    def function(*tensors: torch.Tensor) -> Any:
        of = dict(zip(operands, tensors, strict=True))
        return node.target(*fx.map_arg(node.args, of.__getitem__), **fx.map_arg(node.kwargs, of.__getitem__))  # type: ignore[operator]

    traced = make_fx(function)(*(known[each.name] for each in operands)).graph
    inside = dict(zip((each for each in traced.nodes if each.op == "placeholder"), operands, strict=True))
    with graph.inserting_before(node):
        result = graph.graph_copy(traced, inside)
    if not isinstance(result, fx.Node):
        raise TypeError(f"{node.target} gives several tensors")
    if "shardfx" in node.meta:
        result.meta["shardfx"] = node.meta["shardfx"]
    known[result.name] = known[node.name]
    node.replace_all_uses_with(result)
    graph.erase_node(node)
