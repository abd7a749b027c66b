"""Checking a plan by running it: every value of every rank against the whole program on one device.

The IR keeps global shapes, so that a graph after all passes can also be run *whole*: a ``comm`` op then does nothing.
Run the ranks' programs beside that, join what they hold, and the first value that differs names the node at fault.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from shardfx.ir.capture.compared.whole_run import Draw, run_whole
from shardfx.ir.graph import Graph, Node, Output, OutputKind, Value
from shardfx.ir.mesh import Mesh
from shardfx.ir.program.lower import lower
from shardfx.ir.rules.book import RuleBook
from shardfx.ir.shards import cut_local, wide
from shardfx.ir.spec import Spec
from shardfx.runtime.virtual.collectives import reduce
from shardfx.runtime.virtual.virtual_engine import VirtualEngine


@dataclass(frozen=True)
class Difference:
    """A value that some rank does not hold as the whole program says."""

    value: Value
    node: Node | None
    rank: int
    error: float


def run_ranks(graph: Graph, rules: RuleBook, inputs: Mapping[str, torch.Tensor]) -> dict[Value, list[torch.Tensor]]:
    """Every value of the graph as each rank holds it."""
    copy = graph.copy()
    copy.outputs = [Output(OutputKind.RESULT, v.name, v) for node in copy.nodes for v in node.outs]
    programs = {rank: lower(copy, rank, rules, {OutputKind.RESULT}) for rank in range(graph.mesh.size)}
    given = {
        rank: [cut_local(inputs[g.name], _spec(g.value), graph.mesh, rank) for g in program.inputs]
        for rank, program in programs.items()
    }
    outs = VirtualEngine(graph.mesh).run(programs, given)
    values = [v for node in graph.nodes for v in node.outs]
    return {value: [outs[rank][i] for rank in programs] for i, value in enumerate(values)}


def first_difference(
    graph: Graph, rules: RuleBook, inputs: Mapping[str, torch.Tensor], tolerance: float = 1e-9, draw: Draw | None = None
) -> Difference | None:
    """The first value, in program order, that a rank holds otherwise than the whole program says."""
    whole, ranks = run_whole(graph, inputs, draw), run_ranks(graph, rules, inputs)
    for node in graph.nodes:
        for value in node.outs:
            expected = whole[value]
            held = joined(ranks[value], _spec(value), graph.mesh)
            for rank in range(graph.mesh.size):
                mine = cut_local(expected, _spec(value).reduced(), graph.mesh, rank)
                error = distance(held[rank], mine)
                if not error <= tolerance:
                    return Difference(value, node, rank, error)
    return None


def joined(pieces: Sequence[torch.Tensor], spec: Spec, mesh: Mesh) -> list[torch.Tensor]:
    """What each rank holds once partial sums are reduced."""
    held = list(pieces)
    for axis, kind in spec.partial:
        held = [reduce([held[r] for r in mesh.group(rank, (axis,))], kind) for rank in range(mesh.size)]
    return held


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest difference, relative to the largest finite element of ``b`` (1e-3 at least); infinite where shape,
    dtype or integers differ."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return float("inf")
    if a.numel() == 0:
        return 0.0
    if not (a.dtype.is_floating_point or a.dtype.is_complex):
        return 0.0 if torch.equal(a, b) else float("inf")
    both = torch.isclose(a, b, rtol=0, atol=0, equal_nan=True)
    scale = float(b[torch.isfinite(b)].abs().max()) if torch.isfinite(b).any() else 1.0
    return float(torch.where(both, 0.0, (a - b).abs()).max()) / max(scale, 1e-3)


def apart_at(got: torch.Tensor, wanted: torch.Tensor, seed: int) -> str:
    """Where two tensors differ most, in numbers; ``seed`` is that of the inputs."""
    if got.shape != wanted.shape or got.dtype != wanted.dtype:
        return f"it is {tuple(got.shape)} of {got.dtype}, and {tuple(wanted.shape)} of {wanted.dtype} of the model"
    same = torch.isclose(got, wanted, rtol=0, atol=0, equal_nan=True)
    apart = torch.where(same, 0.0, (wide(got) - wide(wanted)).abs())
    at = int(torch.nan_to_num(apart, nan=torch.inf).reshape(-1).argmax())
    place = ", ".join(map(str, torch.unravel_index(torch.tensor(at), got.shape))) if got.dim() else ""
    mine, theirs = wanted.reshape(-1)[at].item(), got.reshape(-1)[at].item()
    digits = next((n for n in (6, 9, 12) if f"{theirs:.{n}g}" != f"{mine:.{n}g}"), 17)
    told = f"{theirs:.{digits}g}, and {mine:.{digits}g} of the model"
    return f"element [{place}] is {told}, on random inputs (seed {seed})"


def _spec(value: Value) -> Spec:
    return value.spec if value.spec is not None else Spec.whole(value.type.ndim)
