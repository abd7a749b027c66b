"""Order of the update with offloaded optimizer states: each parameter as soon as its gradient is final.

    backward:                                        backward:
      %7 = aten.mm(%6, %x)       gradient of w         %7 = aten.mm(%6, %x)
      %8 = aten.mm(%6, %w)       last read of w        %8 = aten.mm(%6, %w)
      %9 = aten.mm(%8, %y)                      ->   update:
    update:                                            %9 = aten.lerp(%w.m, %7)
      %10 = aten.lerp(%w.m, %7)                        %10 = aten.sub(%w, %9)
      %11 = aten.sub(%w, %10)                        backward:
                                                       %11 = aten.mm(%8, %y)

So states are fetched and stored during the backward of earlier layers, and a gradient is freed by its update. What
depends on all gradients (clipping by a norm of all, a loss scale that skips) stays behind the backward; with a guard
all of it, for nothing may be stored before. A gradient that ranks reduce is final where ``UNDER_WAY`` later ones are
sent, so that nobody waits for it. New content that ranks gather is gathered at the end.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from shardfx.ir.graph import Graph, Input, InputKind, Node, OutputKind, Phase, Value
from shardfx.ir.ops.sends import sends
from shardfx.ir.ops.traits import gives_alias, is_cast, is_view

UNDER_WAY = 2
"""The number of later gradients that are sent before one is waited for."""


@dataclass
class ParameterUpdate:
    """The update of one parameter: its nodes in order, up to the gather of new content; and its offloaded states, with
    their bytes on the rank that stores most."""

    nodes: list[Node] = field(default_factory=list)
    states: list[Input] = field(default_factory=list)
    nbytes: int = 0


def updates_of(graph: Graph, states: Iterable[Input]) -> list[ParameterUpdate]:
    """The updates that use some states, in graph order."""
    found: dict[str, ParameterUpdate] = {}
    owners: dict[Value, str | None] = {inp.value: inp.name for inp in graph.of_kind(InputKind.PARAMETER)}
    for inp in states:
        owner = owners[inp.value] = inp.name.rpartition(".")[0]
        update = found.setdefault(owner, ParameterUpdate())
        update.states.append(inp)
        update.nbytes += inp.value.local_bytes(graph.mesh)
    for node in graph.nodes:
        names = {owners[value] for value in node.operands if value in owners} if node.phase is Phase.UPDATE else set()
        if names:
            alone = len(names) == 1 and not sends(node, graph.mesh)  # else several, or what is gathered
            name = names.pop() if alone else None
            owners.update(dict.fromkeys(node.outs, name))
            if name in found:
                found[name].nodes.append(node)
    place = {node: i for i, node in enumerate(graph.nodes)}
    return sorted((each for each in found.values() if each.nodes), key=lambda each: place[each.nodes[0]])


def update_early(graph: Graph, states: Iterable[Input]) -> None:
    """Move the updates of some states to where their gradients are final, and their parameters are no longer read."""
    if any(output.guard is not None or output.kind is OutputKind.OVERFLOW for output in graph.outputs):
        return
    now = {node: i for i, node in enumerate(graph.nodes)}
    ready = _ready(graph, now)
    at: dict[Node, float] = {}
    for update in updates_of(graph, states):
        place = max(ready[node] for node in update.nodes)
        if place < math.inf:
            at.update((node, place + 0.5) for node in update.nodes)
    users = graph.users()
    for node in reversed(graph.nodes):  # what they are computed from stands with the first of them
        if node.phase is Phase.UPDATE and ready[node] < math.inf:
            places = [at[user] for value in node.outs for user in users[value] if user in at]
            if places:
                at[node] = min([at.get(node, math.inf), *places])
    graph.nodes.sort(key=lambda node: (at.get(node, now[node]), now[node]))


def _ready(graph: Graph, now: Mapping[Node, int]) -> dict[Node, float]:
    """The earliest position of each node of the update; infinite: it is not moved."""
    shown: dict[Value, Value] = {inp.value: inp.value for inp in graph.of_kind(InputKind.PARAMETER)}
    """The parameter behind each of its views, and itself."""
    read: dict[Value, int] = {}
    found: dict[Node, float] = {}
    final = _final(graph, now)

    def there(value: Value) -> float:
        made = value.node
        if made is None:
            return read.get(value, 0)
        return found[made] if made in found else max(now[made], final.get(value, 0))

    for i, node in enumerate(graph.nodes):
        if node.phase is Phase.UPDATE:
            found[node] = max([math.inf if sends(node, graph.mesh) else 0, *map(there, node.operands)])
            continue
        for value in node.operands:
            if value in shown:
                read[shown[value]] = i
                if gives_alias(node.op):
                    shown.update(dict.fromkeys(node.outs, shown[value]))
    return found


def _final(graph: Graph, now: Mapping[Node, int]) -> dict[Value, float]:
    """The positions at which reduced gradients are final."""
    reduced: dict[Value, Node] = {}
    for node in graph.nodes:
        for value in node.operands if node.phase is Phase.UPDATE else ():
            made = value.node
            while made is not None and made.phase is Phase.BACKWARD and (is_view(made) or is_cast(made)):
                made = made.operands[0].node
            if made is not None and made.phase is Phase.BACKWARD and sends(made, graph.mesh):
                reduced[value] = made
    sent = sorted({now[node] for node in reduced.values()})
    later = dict(zip(sent, sent[UNDER_WAY:], strict=False))
    return {value: later.get(now[node], math.inf) for value, node in reduced.items()}
