"""A Python function on tensors as nodes of a graph: traced for the types at hand, in the forms that capture gives.

>>> traced = trace_function(lambda x: torch.relu(x) + 1, [TensorType((4,), torch.float32)])
>>> nodes, (result,) = splice(traced, [x], like=node, mesh=graph.mesh)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardfx.ir.builder import GraphBuilder, trace_on_meta
from shardfx.ir.errors import Error
from shardfx.ir.graph import Node, Value
from shardfx.ir.mesh import Mesh
from shardfx.ir.spec import TensorType

from .forms.canonical import convert_call


def trace_function(function: Callable[..., Any], types: Sequence[TensorType]) -> torch.fx.GraphModule:
    """The aten ops of ``function`` on tensors of these types, traced on ``meta``."""
    traced = trace_on_meta(function, types)
    for made in traced.graph.nodes:
        if made.kwargs.get("device") == torch.device("meta"):  # where it was traced, not where it will run
            made.kwargs = {**made.kwargs, "device": torch.device("cpu")}
    return traced


def splice(
    traced: torch.fx.GraphModule, values: Sequence[Value], *, like: Node, mesh: Mesh
) -> tuple[list[Node], list[Any]]:
    """The nodes of a traced function applied to ``values``, which are in no graph yet, and its results.

    Phase, source and stage are those of ``like``.

    Raises:
        Error: the function holds a constant tensor, or draws random numbers.
    """
    builder = GraphBuilder(mesh)
    builder.where, builder.phase = like.where, like.phase
    given = iter(values)
    results: Any = None
    for each in traced.graph.nodes:
        if each.op == "placeholder":
            builder.env[each] = next(given)
        elif each.op == "call_function":
            builder.env[each] = convert_call(builder, each)
        elif each.op == "get_attr":
            raise Error("a function that stands for an op holds a constant tensor", where=str(like.where))
        else:
            results = torch.fx.map_arg(each.args[0], builder.env.__getitem__)
    if builder.graph.inputs:
        raise Error("a function that stands for an op draws random numbers", where=str(like.where))
    given_back = list(results) if isinstance(results, (list, tuple)) else [results]
    read = {value for made in builder.graph.nodes for value in made.operands}.union(
        each for each in given_back if each is not None
    )
    for made in builder.graph.nodes:
        made.at = like.at
        if len(made.results) > 1:  # kernels differ in what they make of a result that nobody reads
            made.results = [value if value in read else None for value in made.results]
    return builder.graph.nodes, given_back
