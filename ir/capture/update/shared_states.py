"""Which states of a traced step depend on no parameter (a count of steps): a group has each of them once."""

from __future__ import annotations

from collections.abc import Container, Mapping

from torch import fx

from .step_trace import Traced


def depending(traced: Traced, shared: Container[str]) -> set[fx.Node]:
    """The nodes that depend on a parameter, its gradient, or a state of its own."""
    places = [node for node in traced.module.graph.nodes if node.op == "placeholder"]
    held = places[2 + len(traced.inputs) :]
    own = [place for place, key in zip(held, traced.names, strict=True) if key not in shared]
    found = {*places[:2], *own}
    for node in traced.module.graph.nodes:
        if not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


def shared_states(traced: Traced) -> dict[str, str]:
    """The states that depend on no parameter, and how each changes, as a text that is the same where that is."""
    (output,) = (node for node in traced.module.graph.nodes if node.op == "output")
    new = dict(zip(traced.names, output.args[0][1:], strict=True))
    shared = {key for key in traced.names if traced.shapes[key] == ()}
    while True:
        open_ = depending(traced, shared)
        fewer = {key for key in shared if new[key] not in open_}
        if fewer == shared:
            places = [node for node in traced.module.graph.nodes if node.op == "placeholder"]
            names = dict(zip(places, ("p", "grad", *traced.inputs, *traced.names), strict=True))
            return {key: _said(new[key], names) for key in shared}
        shared = fewer


def _said(node: fx.Node, names: Mapping[fx.Node, str]) -> str:
    if node in names:
        return names[node]
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda each: _said(each, names))
    return f"{node.target}{args}{kwargs}"
