"""pipeline: which stage does what; what another stage needs is sent there.

    %3 = aten.relu(%2)      @ layers.0        %3 = aten.relu(%2)      at{0}  @ layers.0
    %4 = aten.mm(%3, %w1)   @ layers.1   ->   %4 = comm.send(%3, axes=[pp], origin=0, places=[1], tag=0)  at{1}
                                              %5 = aten.mm(%4, %w1)   at{1}  @ layers.1

All stages are one graph. Skips over stages, weights that several stages share, a loss in the middle are values that are
needed elsewhere than where they are made, like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from shardfx.ir.cost.flops import flops_of
from shardfx.ir.errors import Error
from shardfx.ir.graph import Graph, Node, Output, Phase, Strategy, Value
from shardfx.ir.mesh import Mesh
from shardfx.ir.ops import comm
from shardfx.ir.rewriter import Rewriter
from shardfx.ir.schedule import COSTS, Costs, Pipelined, Schedule, check_schedule
from shardfx.ir.schedule.actions import WORD as ACTION
from shardfx.passes.base import COMM_EXPLICIT, Context, Pass
from shardfx.passes.loops import check_live, make_schedule

from .assignment import Assignment, At, places
from .homes import keep_homes
from .shared_sums import sum_behind_iterations
from .stage_blocks import AsPlanned, Blocks, Found, Stages

STAGED = "STAGED"
"""Each node is in the stages of a pipeline, and what goes between them is sent."""
WHERE = "Hints(pipeline=...)"
Maker = Callable[[int, int, int, Costs], Schedule]


def _is_count(given: Any) -> bool:
    return type(given) is int and given >= 1


FIELDS: dict[str, tuple[Callable[[Any], bool], str, str]] = {
    "axis": (lambda given: isinstance(given, str) and given != "", "the name of an axis of the mesh", 'axis="pp"'),
    "microbatches": (
        lambda given: isinstance(given, str),
        "the name of a loop axis; empty: no iterations",
        'time="mb"',
    ),
    "schedule": (
        lambda given: isinstance(given, str) or callable(given),
        "a name, a text (a row for each rank), or a function (stages, microbatches, ranks, costs) -> Schedule",
        'schedule="1f1b"; of an sx.schedules.Schedule its text: schedule=str(made)',
    ),
    "stages_per_rank": (
        _is_count,
        "an int of at least 1",
        "chunks=1, or 2 for schedules with several stages on a rank",
    ),
    "stages": (
        lambda given: given is None or (isinstance(given, Sequence) and not isinstance(given, str)),
        "None, or a tuple with an entry for each stage",
        'stages=(1, 3), or ("layers.0", "layers.1"), or (("emb", "layers.0"), ("layers.1", "head"))',
    ),
    "max_in_flight": (lambda given: given is None or _is_count(given), "an int of at least 1, or None", "leave it out"),
}
"""Of each option what fits, in words, and a remedy."""


@dataclass(frozen=True)
class Pipeline(Pass):
    """Shard the graph into stages.

    Args:
        axis: of the mesh, the ranks that stages lie on.
        microbatches: the loop axis of micro-batches; empty: there are none.
        schedule: the name of one (:func:`shardfx.schedules.make_schedule`), its text (a row for each rank), or a
            function ``(stages, iterations, ranks, costs) -> Schedule``.
        stages_per_rank: how many stages a rank has.
        stages: None, for stages that cost about the same, or as near to it as ranks may hold
            (``Hints(memory=...)``); how many blocks each has, ``(1, 3)``; their first modules,
            ``("layers.0", "layers.2")``; or patterns of the modules of each, ``(("emb", "layers.0"), ("layers.1",))``.
        max_in_flight: how many micro-batches may be in flight on a rank, each counted for every stage of it; None: any
            number, but with schedule ``"auto"`` as many as fit, where ``Hints(memory=...)`` or ``machine`` says so.

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
        for name, (fits, expected, remedy) in FIELDS.items():
            given = getattr(self, name)
            if not fits(given):
                raise Error(
                    f"Pipeline({name}=...) is of another kind",
                    where=f"Pipeline({name}=...)",
                    expected=expected,
                    got=f"{given!r:.100} of type {type(given).__name__}",
                    remedy=remedy,
                )

    def run(self, graph: Graph, context: Context) -> bool:
        self._check(graph)
        count = graph.mesh[self.axis].size * self.stages_per_rank
        own = Blocks(graph).stage_of(self.stages, count)
        told = self.stages is not None and not isinstance(self.stages, (AsPlanned, Found))
        assigned = Assignment(graph, own, count - 1, told=told)
        if self.microbatches and sum_behind_iterations(graph, assigned.at, self.microbatches, context.rules):
            assigned = Assignment(graph, own, count - 1, told=told)
        if isinstance(self.stages, AsPlanned):
            keep_homes(graph, assigned, self.stages.held, context.rules)
        if missing := set(range(count)) - places(assigned.at):
            raise Error(
                f"stage {min(missing)} has nothing to do",
                where=WHERE,
                expected="work for each",
                got=self.stages,
                remedy="give it modules that the forward calls",
            )
        for node in graph.nodes:
            node.at = assigned.at[node]
        for given in graph.inputs:
            given.at = assigned.inputs[given.value]
        graph.pipeline = Pipelined(self.axis, self.microbatches, self._schedule(graph, count))
        _Sends(graph, graph.pipeline, assigned).write()
        return True

    def _check(self, graph: Graph) -> None:
        mesh = graph.mesh
        for what, axis, time in (("axis", self.axis, False), ("microbatches", self.microbatches, True)):
            if axis and (axis not in mesh.names or mesh[axis].loop is not time):
                kind = "micro-batches" if time else "ranks"
                raise Error(
                    f"the mesh has no axis {axis!r} of {kind}",
                    where=f"Pipeline({what}={axis!r})",
                    expected=f"Mesh({axis}={'sx.Loop(8)' if time else '2'}, ...)",
                    got=repr(mesh),
                    remedy="add it to the mesh" + (", and to the specs of inputs: 'mb dp, -'" if time else ""),
                )
        if self.microbatches and mesh[self.microbatches].interleave:
            raise Error(
                f"the iterations of {self.microbatches!r} are those of stages, whose order a schedule says",
                where=f"Pipeline(microbatches={self.microbatches!r})",
                expected=f"Mesh({self.microbatches}=sx.Loop({mesh[self.microbatches].size}), ...)",
                got=repr(mesh),
                remedy="interleave iterations of another axis, within these",
            )
        split = next((v for v in graph.values() if v.spec and self.axis in (*v.spec.axes, *v.spec.partial_axes)), None)
        if split is not None:
            raise Error(
                f"a value is split over {self.axis!r}, the axis of stages",
                where=str(split.where),
                expected="splits over other axes",
                got=str(split.spec),
                remedy=f"take {self.axis!r} out of specs, strategies and zero_axis",
            )

    def _schedule(self, graph: Graph, count: int) -> Schedule:
        mesh: Mesh = graph.mesh
        ranks, iterations = mesh[self.axis].size, mesh[self.microbatches].size if self.microbatches else 1
        costs = stage_costs(graph, count)
        if callable(self.schedule):
            made = _called(self.schedule, count, iterations, ranks, costs)
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


def _called(make: Maker, stages: int, iterations: int, ranks: int, costs: Costs) -> Schedule:
    """What somebody's function makes.

    Raises:
        Error: it raises, or makes something else.
    """
    where, remedy = f"Pipeline(schedule={getattr(make, '__name__', make)})", "return sx.schedules.make_schedule(...)"
    expected = f"an sx.schedules.Schedule of {stages} stages and {iterations} turns on {ranks} ranks"
    try:
        made: object = make(stages, iterations, ranks, costs)
    except Error:
        raise
    except Exception as error:
        raise Error(
            "the function that is to make a schedule raises",
            where=where,
            expected=f"a function (stages, iterations, ranks, costs) that gives {expected}",
            got=f"{type(error).__name__}: {error}",
            remedy=f"see its traceback above; or {remedy}",
        ) from error
    if not isinstance(made, Schedule):
        got = f"{made!r:.100} of type {type(made).__name__}"
        raise Error("a function makes no schedule", where=where, expected=expected, got=got, remedy=remedy)
    return made


def stage_costs(graph: Graph, count: int) -> Costs:
    """The operations of each stage, forward and backward, in units of the dearest forward."""
    forward, backward = [0.0] * count, [0.0] * count
    for node in graph.nodes:
        kind = backward if node.phase is Phase.BACKWARD else forward
        for stage in node.at if node.phase is not Phase.UPDATE else ():
            kind[stage] += flops_of(node)
    unit = max(forward) or 1.0
    if not any(backward):
        return COSTS
    halves = tuple(max(cost, unit / 1e3) / unit / 2 for cost in backward)
    return {
        "F": tuple(max(cost, unit / 1e3) / unit for cost in forward),
        "B": tuple(2 * half for half in halves),
        "I": halves,
        "W": halves,
        "U": 0.0,
    }


class _Sends:
    """Writes what goes between stages."""

    def __init__(self, graph: Graph, pipeline: Pipelined, assigned: Assignment) -> None:
        self.graph, self.pipeline, self.assigned = graph, pipeline, assigned
        self.rewriter, self.tags = Rewriter(graph), 0

    def write(self) -> None:
        """Give each user that is elsewhere a copy that was sent there."""
        wanted: dict[Value, dict[tuple[int, ...], tuple[At, list[Node | Output]]]] = {}
        for node in self.graph.nodes:
            for value in dict.fromkeys(node.operands):
                self._ask(wanted, value, node.at, node)
        for output in self.graph.outputs:
            self._ask(wanted, output.value, self.assigned.wanted(output), output)
        for value, groups in wanted.items():
            for there, (at, users) in groups.items():
                self.rewriter.replace(value, self._sent(value, there, at), users)
        self.rewriter.apply()
        self.graph.rename()

    def _ask(
        self,
        wanted: dict[Value, dict[tuple[int, ...], tuple[At, list[Node | Output]]]],
        value: Value,
        at: At,
        user: Node | Output,
    ) -> None:
        there = self.pipeline.places(at)
        if value.node is None or set(there) <= set(self.pipeline.places(value.node.at)):
            return
        known, users = wanted.setdefault(value, {}).setdefault(there, (at, []))
        users.append(user)
        wanted[value][there] = tuple(sorted({*known, *at})) if at else (), users

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
        users = ("stage " if len(at) == 1 else "stages ") + ", ".join(map(str, at)) if at else "all stages"
        node.why = f"stage {maker.at[0]} makes it, for {users}"
        self.rewriter.after(maker, node)
        return result
