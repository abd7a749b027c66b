"""The placement that each output of a graph must have."""

from __future__ import annotations

from shardfx.ir.graph import Graph, Output
from shardfx.ir.spec import Spec


def output_specs(graph: Graph) -> dict[Output, Spec]:
    """The placement that each output must have: gradients and buffers as their input, a loss whole, results as made."""
    stored = {given.name: given.value.spec for given in graph.inputs}
    result: dict[Output, Spec] = {}
    for output in graph.outputs:
        kind = output.kind.value
        spec = stored.get(output.name) if kind in ("gradient", "buffer") else None
        if spec is None:
            made = output.value.spec
            spec = Spec.whole(output.value.type.ndim) if kind == "loss" or made is None else made.reduced()
        result[output] = spec
    return result
