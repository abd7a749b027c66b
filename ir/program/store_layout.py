"""Layout of stored tensors: which are contiguous neighbors, and which kept buffers are reused.

Parameters that are gathered together are contiguous, so that nothing is copied before a gather; so does what
an optimizer steps together, so that its step is one call. Buffers that are kept between steps may be larger than what
is asked for, up to twice: the segments of parameters that are gathered in sequence differ a little.

    >>> choose(100, [80, 150, 120])
    BufferChoice(take=2, drop=None)
    >>> choose(100, [80, 300])                  # 80 is dropped: what is allocated now serves in its place
    BufferChoice(take=None, drop=0)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from shardfx.ir.graph import Graph, Input, InputKind, Node, OutputKind, Phase, Value
from shardfx.ir.ops.comm import all_gather, all_reduce, reduce_scatter


def contiguous_parameters(nodes: Iterable[Node], inputs: Iterable[Input]) -> list[tuple[Input, ...]]:
    """The parameters that stores keep contiguous, for the gathers among planned nodes, each listed once."""
    stored = {inp.value: inp for inp in inputs if inp.kind is InputKind.PARAMETER and not inp.dim_order}
    found: list[tuple[Input, ...]] = []
    placed: set[str] = set()
    for node in nodes:
        if node.op is not all_gather or len(node.operands) == 1:
            continue
        together = tuple(stored[value] for value in node.operands if value in stored)
        names = {inp.name for inp in together}
        if len(names) == len(node.operands) and not names & placed:
            found.append(together)
            placed |= names
    return found


def stepped_groups(graph: Graph) -> list[tuple[Input, ...]]:
    """The parameters, and for each kind of state the states, whose gradients are reduced together, in that order, but
    for those of :func:`contiguous_parameters`; nothing where the program steps none."""
    if all(output.kind is not OutputKind.PARAMETER for output in graph.outputs):
        return []
    inputs = {inp.name: inp for inp in graph.inputs}
    owned: dict[str, dict[str, Input]] = {}
    for inp in graph.of_kind(InputKind.STATE):
        parameter, _, key = inp.name.rpartition(".")
        owned.setdefault(parameter, {})[key] = inp
    placed = {inp.name for together in contiguous_parameters(graph.nodes, graph.inputs) for inp in together}
    made = {as_made(o.value): o.name for o in graph.outputs if o.kind is OutputKind.GRADIENT and o.name in inputs}
    found = []
    for node in graph.nodes:
        if node.op in (all_reduce, reduce_scatter):
            names = [made[value] for value in node.outs if value in made]
            keys = dict.fromkeys(key for name in names for key in owned.get(name, ()))
            states = [[owned[name][key] for name in names if key in owned.get(name, ())] for key in keys]
            for stepped in ([inputs[name] for name in names], *states):
                plain = [each for each in stepped if each.value.shape and not (each.pool or each.dim_order)]
                apart = [each for each in plain if each.name not in placed]
                alike = tuple(each for each in apart if each.value.type.dtype == apart[0].value.type.dtype)
                if len(alike) > 1:
                    found.append(alike)
                    placed |= {each.name for each in alike}
    return found


def as_made(gradient: Value) -> Value:
    """A gradient before the step changes it or gathers it, as the backward makes it."""
    while (node := gradient.node) is not None and (node.phase is Phase.UPDATE or node.op is all_gather):
        gradient = node.operands[node.outs.index(gradient) if node.op is all_gather else 0]
    return gradient


def contiguous_tensors(shapes: Sequence[Sequence[int]], dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    """Contiguous memory for tensors of these shapes."""
    sizes = [torch.Size(shape).numel() for shape in shapes]
    flat = torch.empty(sum(sizes), dtype=dtype, device=device)
    return [part.view(list(shape)) for shape, part in zip(shapes, flat.split(sizes), strict=True)]


SLACK = 2


class BufferChoice(NamedTuple):
    """Which free buffer is reused (None: a new one is allocated), and which one is dropped."""

    take: int | None
    drop: int | None = None


def choose_buffer(nbytes: int, free: Sequence[int]) -> BufferChoice:
    """The buffer for ``nbytes`` among those of ``free`` bytes that are kept and unused."""
    fits = [(size, i) for i, size in enumerate(free) if nbytes <= size <= SLACK * nbytes]
    if fits:
        return BufferChoice(min(fits)[1])
    smaller = [(size, -i) for i, size in enumerate(free) if nbytes <= SLACK * size < SLACK * nbytes]
    return BufferChoice(None, -max(smaller)[1] if smaller else None)
