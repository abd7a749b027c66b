"""iterations: a check that a batch can be split over loop axes; stored parameters are fetched in each iteration.

Where all iterations must have made something before any goes on (the statistics of a batch norm, the sum by which a
loss is divided), a loop of its own collects that. Of inputs alone it costs little. What takes parameters is a part of
the forward, done twice: that is said, and where it would be done over and over it is an error.

    %3 = comm.all_gather(%w, axes=[dp])       ->       %3 = comm.all_gather(%w, axes=[dp])  {each_iteration=True}
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from shardfx.ir.cost.flops import flops_of
from shardfx.ir.errors import Error, ShardfxWarning
from shardfx.ir.graph import Graph, InputKind, Node, OutputKind, Value
from shardfx.ir.ops import comm
from shardfx.ir.ops.sends import EACH_ITERATION
from shardfx.ir.ops.traits import is_heavy, uncast
from shardfx.ir.program.loops.loop_nest import PlannedLoop, crossing_use, loop_axes, loop_nest
from shardfx.ir.program.lower import select
from shardfx.passes.base import COMM_EXPLICIT, Pass, PassContext, derived

WORTH_SAYING = 0.01
"""Of all FLOPs that are done in loops, the share from which on what is done twice is said."""
TRAINED = (OutputKind.LOSS, OutputKind.GRADIENT, OutputKind.BUFFER, OutputKind.PARAMETER, OutputKind.STATE)


@dataclass(frozen=True)
class Loops(Pass):
    """Check that loops over parts of the batch need not repeat parts of the forward.

    With ``fetch`` stored parameters are gathered in each iteration, and not kept replicated from the first to the last.
    With ``strict`` nothing may be done twice.
    """

    name: ClassVar[str] = "loops"
    requires: ClassVar[frozenset[str]] = frozenset({COMM_EXPLICIT})

    fetch: bool = False
    strict: bool = False

    def run(self, graph: Graph, context: PassContext) -> bool:
        if not loop_axes(graph.mesh):
            return False
        stored, gathers = {inp.value for inp in graph.of_kind(InputKind.PARAMETER)}, []
        if self.fetch:
            gathers = [n for n in graph.nodes if n.op is comm.all_gather and {*map(uncast, n.operands)} <= stored]
        for node in gathers:
            node.attrs = {**node.attrs, EACH_ITERATION: True}
        trained = any(output.kind in TRAINED for output in graph.outputs)
        _, nodes, outputs = select(graph, TRAINED if trained else (OutputKind.RESULT,))
        self._check_nesting(graph, nodes)
        self._check(graph, loop_nest(nodes, outputs, graph.mesh), derived(graph, stored))
        return bool(gathers)

    def _check_nesting(self, graph: Graph, nodes: Sequence[Node]) -> None:
        """Raise where a shard of an inner iteration is needed across the outer ones.

        Raises:
            Error: naming who needs it, and who makes it.
        """
        found = crossing_use(nodes, graph.mesh)
        if found is not None:
            node, maker, around, inner = found
            raise Error(
                f"iterations of {inner!r} are within those of {around!r}, and a shard of one is needed beyond them",
                where=_line(node),
                expected=f"what is sharded over {inner!r} is sharded over {around!r} as well",
                got=f"{maker.where}, which makes it, and depends on {inner!r} alone",
                remedy=f"let {inner!r} stand in front of {around!r} in the mesh, or shard one by {around!r} too",
            )

    def _check(self, graph: Graph, steps: Sequence[Node | PlannedLoop], trained: set[Value]) -> None:
        """Raise, or warn, where iterations must be gone through more than once for what parameters go into.

        Raises:
            Error: naming where all of them must meet.
        """
        for axis in loop_axes(graph.mesh):
            loops = [step for step in steps if isinstance(step, PlannedLoop) and step.axis == axis]
            early = [loop for loop in loops[:-1] if any(trained & {*node.operands} for node in loop.nodes())]
            if early:
                self._check_repeated(axis, early, loops, graph, trained)
        for step in steps:
            if isinstance(step, PlannedLoop):
                self._check(graph, step.steps, trained)

    def _check_repeated(
        self, axis: str, early: Sequence[PlannedLoop], loops: Sequence[PlannedLoop], graph: Graph, trained: set[Value]
    ) -> None:
        ends = (node for node in early[0].nodes() if axis in node.kwargs.get("axes", ()))
        where = _line(next(node for node in ends if trained & {*node.operands}))
        work = {node: flops_of(node) for loop in loops for node in loop.nodes() if is_heavy(node)}
        once = sum(work.values())
        more = sum(work[node] for loop in loops for node in loop.nodes() if node in work) - once
        in_stages = graph.pipeline is not None  # whose schedule goes through each iteration once
        if more <= WORTH_SAYING * once and len(early) == 1 and not in_stages:
            return
        if len(early) > 1 or self.strict or in_stages:
            _check_rows(axis, graph)
            times = f"{len(early)} times" if len(early) > 1 else "once"
            raise Error(
                f"all micro-batches of {axis!r} must have come to this place {times} before any can go on",
                where=where,
                expected="micro-batches that need of one another what inputs alone decide, such as a count of targets",
                got=f"a value of the global batch that parameters go into; {more:.3g} FLOPs would be done again",
                remedy='of batch norms: Hints(batch_stats="microbatch"), its own statistics; of experts that sort the '
                "tokens of the global batch: ones that do not, in transformers "
                'model.set_experts_implementation("batched_mm"); else no micro-batches, or another axis of ranks',
            )
        text = (
            f"the loop {axis} runs twice: {more / max(once, 1):.0%} of the FLOPs are repeated, for "
            f"at {where} all of them must have come so far before any can go on"
        )
        graph.notes.append(text)
        warnings.warn(text, ShardfxWarning, stacklevel=2)


def _check_rows(axis: str, graph: Graph) -> None:
    """An input that is sharded has a row for each iteration of each rank: else all of them would need all of it.

    Raises:
        Error: naming the first that has not.
    """
    for inp in graph.of_kind(InputKind.ARGUMENT):
        for size, split in zip(inp.value.shape, inp.value.spec.dims if inp.value.spec else (), strict=False):
            parts = graph.mesh.extent(split.axes)
            if axis in split.axes and size < parts:
                kinds = {name: "micro-batches" if graph.mesh[name].loop else "ranks" for name in split.axes}
                each = " by ".join(f"{graph.mesh[name].size} {kind}" for name, kind in kinds.items())
                raise Error(
                    "a batch has too few rows to be done in micro-batches",
                    where=f"{inp.name}, sharded over {' and '.join(split.axes)}",
                    expected=f"at least {parts} rows, one for each of {each}",
                    got=f"{size} rows" if size != 1 else "1 row",
                    remedy="a larger batch, or fewer of them; for the last of an epoch: DataLoader(drop_last=True)",
                )


def _line(node: Node) -> str:
    return "  ".join(filter(None, (str(node.where), node.where.code)))
