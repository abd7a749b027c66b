"""pipeline: assignment of nodes to stages, and sends of values that another stage needs.

    %3 = aten.relu(%2)      @ layers.0        %3 = aten.relu(%2)      at{0}  @ layers.0
    %4 = aten.mm(%3, %w1)   @ layers.1   ->   %4 = comm.send(%3, axes=[pp], origin=0, places=[1], tag=0)  at{1}
                                              %5 = aten.mm(%4, %w1)   at{1}  @ layers.1

All stages are one graph. Skips over stages, weights that several stages share, a loss in the middle are values that are
needed elsewhere than where they are made, like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from shardfx.ir.cost.flops import flops_of
from shardfx.ir.errors import Error
from shardfx.ir.graph import Graph, Node, Output, Phase, Strategy, Value
from shardfx.ir.ops import comm
from shardfx.ir.ops.table import OwnOp
from shardfx.ir.rewriter import Rewriter
from shardfx.ir.rules.book import RuleBook
from shardfx.ir.schedule import COSTS, Costs, Pipelined, Schedule, check_schedule
from shardfx.ir.schedule.actions import WORD as ACTION
from shardfx.passes.base import COMM_EXPLICIT, Pass, PassContext
from shardfx.passes.pass_text import check_options

from .assignment import OF_WEIGHTS, Assignment, At
from .make_schedule import check_live, make_schedule
from .stage_blocks import AsPlanned, ModelBlocks, SearchedCounts, Stages

aten = torch.ops.aten
STAGED = "STAGED"
"""The invariant that each node is assigned to stages, and values between stages are sent."""
WHERE = "Hints(pipeline=...)"
Maker = Callable[[int, int, int, Costs], Schedule]


@dataclass(frozen=True)
class Pipeline(Pass):
    """Assign nodes to pipeline stages, and send values between them.

    Args:
        axis: the mesh axis whose ranks have the stages.
        microbatches: the loop axis of micro-batches; empty for none.
        schedule: the name of one (:func:`shardfx.schedules.make_schedule`), a :class:`Schedule` or its text (a row for
            each rank), or a function ``(stages, iterations, ranks, costs) -> Schedule``.
        stages_per_rank: the number of stages per rank.
        stages: None for stages balanced by cost, within the memory of ranks
            (``Hints(memory=...)``); the number of blocks of each, ``(1, 3)``; their first modules,
            ``("layers.0", "layers.2")``; or patterns of the modules of each, ``(("emb", "layers.0"), ("layers.1",))``.
        max_in_flight: the maximum number of in-flight micro-batches of a rank, counted for each of its stages; None: no
            limit, but with schedule ``"auto"`` as many as fit in the memory of ``Hints(memory=...)`` or ``machine``.

    Example::

        mesh = sx.Mesh(pp=2, dp=2, mb=sx.Loop(8))
        sx.Hints(args=(x,), loss=loss, targets=(y,), specs={"args.0": "mb dp, -"}, pipeline=sx.Pipeline())
    """

    name: ClassVar[str] = "pipeline"
    requires: ClassVar[frozenset[str]] = frozenset({COMM_EXPLICIT})
    establishes: ClassVar[frozenset[str]] = frozenset({STAGED})

    axis: str = "pp"
    microbatches: str = "mb"
    schedule: str | Maker = "1f1b"
    stages_per_rank: int = 1
    stages: Stages = None
    max_in_flight: int | None = None

    def __post_init__(self) -> None:
        value: object = self.schedule
        if isinstance(value, Schedule):
            object.__setattr__(self, "schedule", str(value))
        check_options(self, stages_per_rank=1, max_in_flight=1)

    def run(self, graph: Graph, context: PassContext) -> bool:
        self._check(graph)
        count = graph.mesh[self.axis].size * self.stages_per_rank
        own = ModelBlocks(graph).stage_of(self.stages, count)
        told = self.stages is not None and not isinstance(self.stages, (AsPlanned, SearchedCounts))
        assigned = Assignment(graph, own, count - 1, told=told)
        if self.microbatches and reduce_before_stages(graph, assigned.at, self.microbatches, context.rules):
            assigned = Assignment(graph, own, count - 1, told=told)
        if isinstance(self.stages, AsPlanned):
            keep_homes(graph, assigned, self.stages.stages_of, context.rules)
        if missing := set(range(count)).difference(*assigned.at.values()):
            what, remedy = f"stage {min(missing)} has nothing to do", "give it modules that the forward calls"
            raise Error(what, where=WHERE, expected="work for each", got=self.stages, remedy=remedy)
        for node in graph.nodes:
            node.at = assigned.at[node]
        for inp in graph.inputs:
            inp.at = assigned.inputs[inp.value]
        graph.pipeline = Pipelined(self.axis, self.microbatches, self._schedule(graph, count))
        _Sends(graph, graph.pipeline, assigned).write()
        return True

    def _check(self, graph: Graph) -> None:
        mesh = graph.mesh
        for what, axis, loop in (("axis", self.axis, False), ("microbatches", self.microbatches, True)):
            if (axis or not loop) and (axis not in mesh.names or mesh[axis].loop is not loop):
                raise Error(
                    f"the mesh has no axis {axis!r} of {'micro-batches' if loop else 'ranks'}",
                    where=f"Pipeline({what}={axis!r})",
                    expected=f"Mesh({axis}={'sx.Loop(8)' if loop else '2'}, ...)",
                    got=repr(mesh),
                    remedy="add it to the mesh" + (", and to the specs of inputs: 'mb dp, -'" if loop else ""),
                )
        for value in graph.values():
            if value.spec and self.axis in (*value.spec.axes, *value.spec.partial_axes):
                raise Error(
                    f"a value is sharded over {self.axis!r}, the axis of stages",
                    where=str(value.where),
                    expected="shardings over other axes",
                    got=str(value.spec),
                    remedy=f"take {self.axis!r} out of specs, strategies and zero_axis",
                )

    def _schedule(self, graph: Graph, count: int) -> Schedule:
        ranks, iterations = graph.mesh[self.axis].size, graph.mesh[self.microbatches].size if self.microbatches else 1
        costs = stage_costs(graph, count)
        if callable(self.schedule):
            value: object = self.schedule(count, iterations, ranks, costs)
            if not isinstance(value, Schedule):
                what, where = "a function makes no schedule", f"Pipeline(schedule={self.schedule!r:.100})"
                expected, got = "an sx.schedules.Schedule", f"{value!r:.100} of type {type(value).__name__}"
                remedy = "return sx.schedules.make_schedule(...)"
                raise Error(what, where=where, expected=expected, got=got, remedy=remedy)
            made = value
        elif not ACTION.match(self.schedule.strip()):
            homes = self.stages.homes if isinstance(self.stages, AsPlanned) else None
            return make_schedule(
                self.schedule,
                stages=count,
                microbatches=iterations,
                ranks=ranks,
                costs=costs,
                max_in_flight=self.max_in_flight,
                homes=homes,
            )
        else:
            made = Schedule.parse(self.schedule)
        if len(made.rows) != ranks:
            raise Error(
                "a schedule has a row for each rank",
                where=WHERE,
                expected=f"{ranks} rows, for the ranks along {self.axis!r}",
                got=len(made.rows),
                remedy=f"write {ranks} rows, or Mesh({self.axis}={len(made.rows)}, ...)",
            )
        report = check_schedule(made, stages=count, microbatches=iterations)
        if self.max_in_flight is not None:
            check_live("the schedule", report, self.max_in_flight)
        return made


def stage_costs(graph: Graph, count: int) -> Costs:
    """The FLOPs of each stage, forward and backward, in units of the most expensive forward."""
    forward, backward = [0.0] * count, [0.0] * count
    for node in graph.nodes:
        kind = backward if node.phase is Phase.BACKWARD else forward
        for stage in node.at if node.phase is not Phase.UPDATE else ():
            kind[stage] += flops_of(node)
    if not any(backward):
        return COSTS
    unit = max(forward) or 1.0
    first, second = (tuple(max(cost, unit / 1e3) / unit for cost in kind) for kind in (forward, backward))
    halves = tuple(cost / 2 for cost in second)
    return {"F": first, "B": second, "I": halves, "W": halves, "U": 0.0}


def keep_homes(graph: Graph, assigned: Assignment, stages: Mapping[str, At], rules: RuleBook) -> None:
    """Let each weight be in the stages where it is ``held``, by name; what another stage needs of it is sent there.

    %3 = aten.t(%emb)      at{1}              %2 = aten.alias(%emb)                     at{0}
                                      ->      %3 = comm.send(%2, origin=0, places=[1])  at{1}
                                              %4 = aten.t(%3)                           at{1}

    Programs of other specializations (evaluation, results) run on what training stores.
    """
    users = graph.users()
    rewriter = Rewriter(graph, rules)
    for inp in graph.inputs:
        homes = stages.get(inp.name, ()) if inp.kind in OF_WEIGHTS else ()
        if not homes:
            continue
        away = [node for node in users[inp.value] if not set(assigned.at[node]) <= set(homes)]
        assigned.inputs[inp.value] = homes
        if away:
            made = rewriter.before(away[0], rewriter.call(aten.alias.default, inp.value, like=away[0]))
            made.why = f"{inp.name} is stored in stage {', '.join(map(str, homes))}"
            assigned.at[made] = homes[:1]
            rewriter.replace(inp.value, made.outs[0], users=away)
    rewriter.apply()


def reduce_before_stages(graph: Graph, at: Mapping[Node, tuple[int, ...]], time: str, rules: RuleBook) -> bool:
    """Sum gradients to which several stages contribute over micro-batches first, and then over the stages.

    %5 = aten.add(%3, %4) : [64, 8] +{mb}         %5 = comm.all_reduce(%3, axes=[mb])    at{0}
    %6 = comm.all_reduce(%5, axes=[mb])      ->   %6 = comm.all_reduce(%4, axes=[mb])    at{1}
                                                  %7 = aten.add(%5, %6)

    So a tied weight's gradient is sent once a step. Says whether there were any.
    """
    users = graph.users()
    rewriter = Rewriter(graph, rules)
    for node in graph.nodes:
        makers = [value.node for value in node.operands]
        if node.op is not aten.add.Tensor or node.kwargs or len(makers) != 2 or node.phase is not Phase.BACKWARD:
            continue
        apart = len({at[maker] for maker in makers if maker is not None}) > 1
        way = list(_reductions(node.outs[0], users, graph, time)) if apart else []
        if not way or time not in way[-1].kwargs["axes"]:
            continue
        parts = []
        for value in node.operands:
            for step in way:
                made = rewriter.comm(step.op, value, like=value.node, **step.kwargs)
                (value,) = rewriter.before(way[-1], made).outs
            parts.append(value)
        total = rewriter.before(way[-1], rewriter.call(aten.add.Tensor, *parts, like=node))
        total.why = "each stage sums its share over the micro-batches first"
        rewriter.replace(way[-1].outs[0], total.outs[0])
        for gone in (node, *way):
            rewriter.erase(gone)
    return rewriter.apply()


def _reductions(value: Value, users: Mapping[Value, list[Node]], graph: Graph, time: str) -> Iterator[Node]:
    """The reductions of a partial value with no other use, up to the one over the micro-batches."""
    while len(users[value]) == 1 and not any(output.value is value for output in graph.outputs):
        (user,) = users[value]
        if not isinstance(user.op, OwnOp) or user.op not in (comm.all_reduce, comm.reduce_scatter):
            return
        yield user
        if time in user.kwargs["axes"]:
            return
        (value,) = user.outs


Asked = dict[Value, dict[tuple[int, ...], tuple[At, list[Node | Output]]]]
"""Needed transfers by value and coordinates: the stages, and the users there."""


class _Sends:
    """Inserts the sends between stages."""

    def __init__(self, graph: Graph, pipeline: Pipelined, assigned: Assignment) -> None:
        self.graph, self.pipeline, self.assigned = graph, pipeline, assigned
        self.rewriter, self.tags, self.wanted = Rewriter(graph), 0, Asked()

    def write(self) -> None:
        """Replace uses on other stages by sent copies."""
        for node in self.graph.nodes:
            for value in dict.fromkeys(node.operands):
                self._ask(value, node.at, node)
        for output in self.graph.outputs:
            self._ask(output.value, self.assigned.wanted(output), output)
        for value, groups in self.wanted.items():
            for there, (at, users) in groups.items():
                self.rewriter.replace(value, self._sent(value, there, at), users)
        self.rewriter.apply()
        self.graph.rename()

    def _ask(self, value: Value, at: At, user: Node | Output) -> None:
        there = self.pipeline.places(at)
        if value.node is not None and not set(there) <= set(self.pipeline.places(value.node.at)):
            groups = self.wanted.setdefault(value, {})
            known, users = groups.get(there, (at, []))
            groups[there] = tuple(sorted({*known, *at})) if at else (), [*users, user]

    def _sent(self, value: Value, there: tuple[int, ...], at: At) -> Value:
        maker, axis = value.node, self.pipeline.axis
        assert maker is not None and value.spec is not None
        origin = self.pipeline.homes[maker.at[0]]
        kwargs = {"axes": [axis], "origin": origin, "places": list(there), "tag": self.tags}
        node = Rewriter.make(comm.send, (value,), value.type, like=maker, kwargs=kwargs)
        self.tags += 1
        (result,) = node.outs
        result.spec, node.at = value.spec, at
        node.strategy = Strategy((value.spec,), (value.spec,))
        node.why = f"stage {maker.at[0]} makes it, for stage {', '.join(map(str, at)) if at else '*'}"
        self.rewriter.after(maker, node)
        return result
