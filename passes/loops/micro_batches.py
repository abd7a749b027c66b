"""iterations: what a rank does in iterations can be done, and what of it twice; stored parameters are fetched in each.

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
from shardfx.passes.base import COMM_EXPLICIT, Context, Pass

WORTH_SAYING = 0.01
"""Of all arithmetic that is done in iterations, the share from which on what is done twice is said."""
TRAINED = (OutputKind.LOSS, OutputKind.GRADIENT, OutputKind.BUFFER, OutputKind.PARAMETER, OutputKind.STATE)


@dataclass(frozen=True)
class Loops(Pass):
    """Check that what is done in iterations can be, without doing the forward over and over.

    With ``fetch`` stored parameters are gathered in each iteration, and not held whole from the first to the last. With
    ``strict`` nothing may be done twice.
    """

    name: ClassVar[str] = "loops"
    requires: ClassVar[frozenset[str]] = frozenset({COMM_EXPLICIT})

    fetch: bool = False
    strict: bool = False

    def run(self, graph: Graph, context: Context) -> bool:
        if not loop_axes(graph.mesh):
            return False
        changed = self.fetch and self._fetch(graph)
        trained = any(output.kind in TRAINED for output in graph.outputs)
        kinds = TRAINED if trained else (OutputKind.RESULT,)
        _, nodes, outputs = select(graph, kinds)
        self._nested(graph, nodes)
        self._check(graph, loop_nest(nodes, outputs, graph.mesh))
        return changed

    def _nested(self, graph: Graph, nodes: Sequence[Node]) -> None:
        """Raise where a piece of an inner iteration is needed across the outer iterations.

        Raises:
            Error: naming who needs it, and who makes it.
        """
        found = crossing_use(nodes, graph.mesh)
        if found is None:
            return
        node, maker, around, within = found
        raise Error(
            f"iterations of {within!r} lie within those of {around!r}, and a piece of one is needed beyond them",
            where="  ".join(filter(None, (str(node.where), node.where.code))),
            expected=f"what is sharded over {within!r} is sharded over {around!r} as well",
            got=f"{maker.where}, which makes it, and hangs on {within!r} alone",
            remedy=f"let {within!r} stand in front of {around!r} in the mesh, or sharded one of both by {around!r} too",
        )

    def _fetch(self, graph: Graph) -> bool:
        """Gather what is stored in pieces anew in each iteration."""
        stored = {given.value for given in graph.of_kind(InputKind.PARAMETER)}
        gathers = [n for n in graph.nodes if n.op is comm.all_gather and all(uncast(v) in stored for v in n.operands)]
        for node in gathers:
            node.attrs = {**node.attrs, EACH_ITERATION: True}
        return bool(gathers)

    def _check(self, graph: Graph, steps: Sequence[Node | PlannedLoop]) -> None:
        """Raise, or warn, where iterations must be gone through more than once.

        Raises:
            Error: naming where all iterations must meet.
        """
        for axis in loop_axes(graph.mesh):
            loops = [step for step in steps if isinstance(step, PlannedLoop) and step.axis == axis]
            early = [loop for loop in loops[:-1] if any(_takes(node, graph) for node in loop.nodes())]
            if early:
                self._again(axis, early, loops, graph)
        for step in steps:
            if isinstance(step, PlannedLoop):
                self._check(graph, step.steps)

    def _again(self, axis: str, early: Sequence[PlannedLoop], loops: Sequence[PlannedLoop], graph: Graph) -> None:
        meeting = _meeting(axis, early[0], graph)
        where = "  ".join(filter(None, (str(meeting.where), meeting.where.code)))
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
                f"all iterations of {axis!r} must have come to this place {times} before any can go on",
                where=where,
                expected="iterations that need of one another what inputs alone decide, such as how many targets count",
                got=f"a value of the whole batch that parameters go into; {more:.3g} FLOPs would be done again",
                remedy='of batch norms: Hints(batch_stats="microbatch"), its own statistics; of experts that sort '
                "the tokens of the whole batch: ones that do not, in transformers "
                'model.set_experts_implementation("batched_mm"); else no iterations, or another axis of ranks',
            )
        text = (
            f"the loop {axis} runs twice: {more / max(once, 1):.0%} of the arithmetic is computed again, for "
            f"at {where} all of them must have come so far before any can go on"
        )
        graph.notes.append(text)
        warnings.warn(text, ShardfxWarning, stacklevel=2)


def _check_rows(axis: str, graph: Graph) -> None:
    """An input that is sharded has a row for each iteration of each rank: else all iterations would need all of it.

    Raises:
        Error: naming the first that has not.
    """
    for given in graph.of_kind(InputKind.ARGUMENT):
        for size, sharding in zip(given.value.shape, given.value.spec.dims if given.value.spec else (), strict=False):
            parts = graph.mesh.extent(sharding.axes)
            if axis in sharding.axes and size < parts:
                each = (
                    f"{graph.mesh[name].size} {'iterations' if graph.mesh[name].loop else 'ranks'}"
                    for name in sharding.axes
                )
                raise Error(
                    "a batch has too few rows to be done in iterations",
                    where=f"{given.name}, sharded over {' and '.join(sharding.axes)}",
                    expected=f"at least {parts} rows, one for each of {' by '.join(each)}",
                    got=f"{size} rows" if size != 1 else "1 row",
                    remedy="a larger batch, or fewer iterations; for the last batch: DataLoader(drop_last=True)",
                )


def _meeting(axis: str, loop: PlannedLoop, graph: Graph) -> Node:
    """The first node of a loop that makes a value of all iterations of what parameters go into."""
    ends = [node for node in loop.nodes() if axis in node.kwargs.get("axes", ())]
    return next(node for node in ends if _takes(node, graph))


def _takes(node: Node, graph: Graph) -> bool:
    """Whether a parameter goes into a node."""
    behind: set[Node] = set()
    todo: list[Value] = list(node.operands)
    stored = {given.value for given in graph.of_kind(InputKind.PARAMETER)}
    while todo:
        value = todo.pop()
        if value in stored:
            return True
        if value.node is not None and value.node not in behind:
            behind.add(value.node)
            todo += value.node.operands
    return False
