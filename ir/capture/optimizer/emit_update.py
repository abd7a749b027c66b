"""Emission of the update of all parameters behind the backward: nodes, states that go in, and what goes out.

    state %w.exp_avg : f32[8, 4]
    option %optimizer.0.lr : f64[]
    update:
      %30 = aten.lerp.Scalar(%w.exp_avg, %29, 0.1) : f32[8, 4]
      ...
    outputs:
      parameter w = %40 : [8, 4]
      state w.exp_avg = %30 : [8, 4]

Each distinct step (group, shape, dtype) is traced once (:mod:`.step_trace`). What depends on no parameter (a count of
steps, a bias correction) is computed once for the group, of one state that all its parameters name. Parameters of
blocks that a graph leaves out (:mod:`shardfx.ir.repeat`) are stepped as those of the block that they equal.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from shardfx.ir.builder import GraphBuilder
from shardfx.ir.capture.canonical.canonical_ops import convert_call
from shardfx.ir.errors import Error
from shardfx.ir.graph import Graph, InputKind, Output, OutputKind, Phase, Value, Where
from shardfx.ir.repeat import Repeat
from shardfx.ir.rewriter import dead_code
from shardfx.ir.spec import TensorType
from shardfx.ir.unfolding.regular import IrregularBlocks

from .initial_state import Recipe, recipe
from .optimizer_groups import Factory, OptimizerGroup, make_groups_of, numbers_of
from .optimizer_trial import OptimizerTrial, refusal
from .sparse_rows import sparse_lookups, step_rows
from .step_trace import WITH_NUMBERS, StepTraces, TracedStep, says_nothing
from .update_spec import CounterState, OptimizerState, UpdateGroup, UpdateSpec

aten = torch.ops.aten
NUMBER = TensorType((), torch.float64)


@dataclass(frozen=True, eq=False)
class StepVariant:
    """A distinct step: the trace of later steps, and of the first one if it differs."""

    recipe: Recipe
    later: TracedStep
    first: TracedStep | None
    shared: Mapping[str, str]
    """States that depend on no parameter, and how they change."""

    @property
    def traced(self) -> Sequence[TracedStep]:
        """All traced steps of the update."""
        return [self.later] if self.first is None else [self.later, self.first]


def write_update(
    graph: Graph, factory: Factory, model: Mapping[str, nn.Parameter], scheduled: Sequence[str] = ()
) -> UpdateSpec:
    """Emit the step of the optimizers that ``factory`` makes into a captured graph that has gradients.

    Args:
        graph: captured, with gradients.
        model: the model's parameters by their names, also of the blocks that the graph leaves out.
        scheduled: options of groups that are inputs, beside the rate.

    Raises:
        Error: the optimizer cannot be traced, or does something else than its trace.
        IrregularBlocks: the graph leaves out blocks that the optimizer tells apart from those that are there.
    """
    with FakeTensorMode():
        parameters = {
            name: nn.Parameter(torch.empty(p.shape, dtype=p.dtype), requires_grad=p.requires_grad)
            for name, p in model.items()
        }
    groups = make_groups_of(factory, parameters, scheduled)
    _check_scheduled(groups, scheduled)
    check_alike(groups, graph.repeats)
    trained = {output.name: output.value for output in graph.outputs if output.kind is OutputKind.GRADIENT}
    stepped = [name for group in groups for name in stepped_names(group, trained, graph.repeats)]
    writer = _UpdateWriter(graph, trained, OptimizerTrial(factory, parameters, groups, stepped, sparse_lookups(graph)))
    made = tuple(writer.group(group, parameters) for group in groups)
    dead_code(graph)
    graph.rename()
    return UpdateSpec(made, states_of_all(stepped, writer.states, graph.repeats), writer.counts)


def _check_scheduled(groups: Sequence[OptimizerGroup], scheduled: Sequence[str]) -> None:
    for name in scheduled:
        if all(not numbers_of(group.options, [name]) for group in groups):
            every = dict.fromkeys(key for group in groups for key in group.options if numbers_of(group.options, [key]))
            raise Error(
                f"no optimizer has a number {name!r}",
                where="Hints(scheduled_options=...)",
                expected=f"some of {', '.join(every)}",
                got=repr(name),
                remedy="name options of the optimizer's groups, as pm.optimizer.param_groups has them",
            )


class UpdateBuilder(GraphBuilder):
    """A builder that appends to the update of a graph; ``shared`` nodes are emitted once."""

    def __init__(self, graph: Graph) -> None:
        super().__init__(graph.mesh)
        self.graph, self.phase = graph, Phase.UPDATE
        self._constants: dict[tuple[fx.GraphModule, str], Value] = {}

    def constant(self, module: fx.GraphModule, name: str) -> Value:
        """A constant of a traced step: the same for all parameters that are stepped so."""
        if (module, name) not in self._constants:
            number, constant = len(self.graph.of_kind(InputKind.CONSTANT)), getattr(module, name)
            type = TensorType(tuple(constant.shape), constant.dtype)
            self._constants[module, name] = self.input(InputKind.CONSTANT, f"constant.{number}", type, constant)
        return self._constants[module, name]


class _UpdateWriter:
    def __init__(self, graph: Graph, trained: Mapping[str, Value], trial: OptimizerTrial) -> None:
        self.graph, self.trained, self.trial = graph, trained, trial
        self.builder, self.traces = UpdateBuilder(graph), StepTraces()
        self.states: dict[str, tuple[OptimizerState, ...]] = {}
        self.counts: dict[str, CounterState] = {}

    def group(self, group: OptimizerGroup, parameters: Mapping[str, nn.Parameter]) -> UpdateGroup:
        """Emit the step of one group."""
        names = [name for name in group.names if name in self.trained]
        numbers = {
            name: self.builder.input(InputKind.OPTION, f"optimizer.{group.number}.{name}", NUMBER)
            for name in (group.numbers if names else ())
        }
        alike: dict[Any, list[str]] = {}
        for name in names:
            p, sparse = parameters[name], name in self.trial.sparse
            alike.setdefault((tuple(p.shape), p.dtype, sparse), []).append(name)
        steps: dict[str, StepVariant] = {}
        for each in alike.values():
            steps.update(dict.fromkeys(each, self._step(group, each, parameters[each[0]])))
        shared: dict[str, Value | None] = dict.fromkeys(_agreed([*steps.values()]))
        for name in names:
            self._write(name, group, steps[name], [*numbers.values()], shared)
        stepped = stepped_names(group, self.trained, self.graph.repeats)
        decided = frozenset().union(*(each.decided for step in steps.values() for each in step.traced))
        return UpdateGroup(group.kind, group.options, stepped, {k: v.name for k, v in numbers.items()}, decided)

    def _step(self, group: OptimizerGroup, names: Sequence[str], like: nn.Parameter) -> StepVariant:
        """The step of some parameters, all of one shape."""
        found = recipe(self.trial, group.number, names)
        state = dict(group.optimizer.state.get(like, {}))
        try:
            later = self.traces.step(group, like.shape, like.dtype, state, found.options)
            first = None
            if found.once:
                first = self.traces.step(group, like.shape, like.dtype, state, found.options, first=True)
        except Exception as error:  # whatever the user's own code raises
            raise refusal(group, error) from error
        return StepVariant(found, later, first, shared_states(later) if first is None else {})

    def _write(
        self,
        name: str,
        group: OptimizerGroup,
        step: StepVariant,
        numbers: Sequence[Value],
        shared: dict[str, Value | None],
    ) -> None:
        """Emit the step of one parameter; ``shared`` are the states that it shares with others, once they are there."""
        parameter, later = self.graph.input(name), step.later
        states, ins = [], []
        for key in later.names:
            value, label = shared.get(key), f"{name}.{key}"
            if value is not None:
                known = self.graph.input(value.name)
                known.aliases = (*known.aliases, label)
            else:
                made = TensorType(later.shapes[key], later.dtypes[key])
                dim_order = parameter.dim_order if made.shape == parameter.value.shape else ()
                value = self.builder.input(InputKind.STATE, label, made, dim_order=dim_order)
                if key in shared:
                    shared[key] = value
            ins.append(value)
            states.append(OptimizerState(key, value.name, step.recipe.starts[key], later.kept[key]))
        self.states[name] = tuple(states)
        before = [parameter.value, self.trained[name], *numbers, *ins]
        new = self._apply(name, group, later, before, {*shared})
        if step.first is not None:
            began = self._apply(name, group, step.first, before, set())
            is_first = self._is_first(group)
            self.builder.where = Where(name.rpartition(".")[0], group.where.file, group.where.line)
            pairs = zip(began, new, strict=True)
            new = [self.builder.add(aten.where.self, (is_first, one, other)) for one, other in pairs]
        new = step_rows(self.builder, self.trial.sparse.get(name, ()), [parameter.value, *ins], new)
        self.graph.outputs.append(Output(OutputKind.PARAMETER, name, new[0]))
        for state, value, was in zip(states, new[1:], ins, strict=True):
            if state.name == f"{name}.{state.key}" and value is not was:
                self.graph.outputs.append(Output(OutputKind.STATE, state.name, value))

    def _is_first(self, group: OptimizerGroup) -> Value:
        """Whether the group was never stepped."""
        name = f"optimizer.{group.number}.steps"
        self.builder.shared = True
        self.builder.where = Where("optimizer", group.where.file, group.where.line)
        if name not in self.counts:
            self.counts[name] = CounterState(0.0, 1.0)
            count = self.builder.input(InputKind.STATE, name, NUMBER)
            more = self.builder.add(aten.add.Tensor, (count, 1))
            self.graph.outputs.append(Output(OutputKind.STATE, name, more))
        is_first: Value = self.builder.add(aten.eq.Scalar, (self.graph.input(name).value, 0))
        self.builder.shared = False
        return is_first

    def _apply(
        self, name: str, group: OptimizerGroup, traced: TracedStep, values: Sequence[Value], shared: set[str]
    ) -> list[Value]:
        """Emit a traced step on these values; returns the new ones."""
        builder, open_ = self.builder, depending(traced, shared)
        builder.env = dict(zip(traced.places, values, strict=True))
        for node in traced.module.graph.nodes:
            if node.op == "get_attr":
                builder.env[node] = builder.constant(traced.module, node.target)
            elif node.op == "call_function" and not says_nothing(node):
                builder.shared = node not in open_
                builder.where = _source(node, name.rpartition(".")[0] if node in open_ else "optimizer", group)
                builder.env[node] = _converted(builder, node)
        builder.shared = False
        return [builder.env[node] for node in traced.results]


def _converted(builder: GraphBuilder, node: fx.Node) -> Any:
    if node.target is aten.copy_.default:  # what functionalisation leaves of a change of an input
        return builder.env[node.args[1]]  # type: ignore[index]
    if node.target is aten._local_scalar_dense.default:
        used = ", ".join(str(user.target) for user in node.users)
        raise Error(
            f"{used} with a number that is read out of a tensor",
            where=str(builder.where),
            expected=f"products with the tensor itself; numbers in tensors for {', '.join(WITH_NUMBERS)}",
            got=used,
            remedy="multiply by the tensor itself",
        )
    return convert_call(builder, node)


def _agreed(steps: Sequence[StepVariant]) -> list[str]:
    """The states that all parameters of a group share."""
    found = []
    for key in steps[0].shared if steps else ():
        if len({(each.shared.get(key), each.recipe.starts.get(key)) for each in steps}) == 1:
            found.append(key)
    return found


def _source(node: fx.Node, module: str, group: OptimizerGroup) -> Where:
    """The line of the optimizer's own file that made a node."""
    line = str(node.meta.get("stack_trace") or "").strip()
    return Where(module, group.where.file, int(line) if line.isdigit() else group.where.line)


def like(name: str, repeats: Iterable[Repeat]) -> str:
    """The parameter of a present block that one of a left-out block equals; any other itself."""
    for repeat in repeats:
        if repeat.within(name) in repeat.left_out:
            return repeat.moved(name, repeat.first - 1)
    return name


def stepped_names(group: OptimizerGroup, trained: Container[str], repeats: Iterable[Repeat]) -> tuple[str, ...]:
    """The names of a group's parameters that have gradients, in its order, also of those that are left out."""
    return tuple(name for name in group.names if like(name, repeats) in trained)


def check_alike(groups: Sequence[OptimizerGroup], repeats: Iterable[Repeat]) -> None:
    """Check that parameters of left-out blocks are in the groups of those that they equal.

    Raises:
        IrregularBlocks: the optimizer tells blocks apart.
    """
    number = {name: group.number for group in groups for name in group.names}
    for repeat in repeats:
        for name in (name for name in number if repeat.within(name) in repeat.left_out):
            other = repeat.moved(name, repeat.first - 1)
            if number[name] != number.get(other):
                raise IrregularBlocks(
                    "equal blocks are stepped differently",
                    where=f"repeat {repeat}",
                    expected=f"{name!r} and {other!r} in one group of the optimizer",
                    got=f"groups {number[name]} and {number.get(other)}",
                )


def states_of_all(
    names: Iterable[str], states: Mapping[str, tuple[OptimizerState, ...]], repeats: Sequence[Repeat]
) -> dict[str, tuple[OptimizerState, ...]]:
    """The states of the parameters ``names``, of which those are known that are there."""
    found = {}
    for name in names:
        known = like(name, repeats)
        own = {each.key: replace(each, name=f"{name}.{each.key}") for each in states[known]}
        found[name] = tuple(own[s.key] if s.name == f"{known}.{s.key}" else s for s in states[known])
    return found


def depending(traced: TracedStep, shared: Container[str]) -> set[fx.Node]:
    """The nodes that depend on a parameter, its gradient, or a state of its own."""
    states = zip(traced.places[2 + len(traced.inputs) :], traced.names, strict=True)
    found = {*traced.places[:2], *(place for place, key in states if key not in shared)}
    for node in traced.module.graph.nodes:
        if not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


def shared_states(traced: TracedStep) -> dict[str, str]:
    """The states that depend on no parameter, and how each changes, as a text that is the same where that is."""
    new = dict(zip(traced.names, traced.results[1:], strict=True))
    names = dict(zip(traced.places, ("p", "grad", *traced.inputs, *traced.names), strict=True))
    fewer, shared = {key for key in traced.names if traced.shapes[key] == ()}, set[str]()
    while fewer != shared:
        shared, open_ = fewer, depending(traced, fewer)
        fewer = {key for key in shared if new[key] not in open_}
    return {key: _said(new[key], names) for key in shared}


def _said(node: fx.Node, names: Mapping[fx.Node, str]) -> str:
    if node in names:
        return names[node]
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda each: _said(each, names))
    return f"{node.target}{args}{kwargs}"
