"""The update of all parameters, written behind the backward: nodes, states that go in, and what goes out.

    state %w.exp_avg : f32[8, 4]
    option %optimizer.0.lr : f64[]
    update:
      %30 = aten.lerp.Scalar(%w.exp_avg, %29, 0.1) : f32[8, 4]
      ...
    outputs:
      parameter w = %40 : [8, 4]
      state w.exp_avg = %30 : [8, 4]

Each distinct step (group, shape, dtype) is traced once (:mod:`.traces`). What depends on no parameter (a count of
steps, a bias correction) is computed once for the whole group, of one state that all its parameters name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from shardfx.ir.builder import GraphBuilder
from shardfx.ir.capture.forms.canonical import convert_call
from shardfx.ir.errors import Error
from shardfx.ir.graph import Graph, InputKind, Output, OutputKind, Phase, Value, Where
from shardfx.ir.rewriter import dead_code
from shardfx.ir.spec import TensorType

from .left_out import check_alike, states_of_all, stepped_names
from .made_groups import Factory, Group, make_groups_of, numbers_of
from .numbers import call_with_numbers, unknown_numbers
from .shared_states import depending, shared_states
from .started import Recipe, Start, recipe
from .step_trace import Traced, says_nothing
from .stepped import Count, HeldState, Update, UpdateGroup
from .traces import Traces
from .trial.refusal import refusal
from .trial.small_parameters import Small

aten = torch.ops.aten


@dataclass(frozen=True, eq=False)
class Step:
    """A distinct step: traced for later ones, and for the first if that is another."""

    recipe: Recipe
    later: Traced
    first: Traced | None
    kept: Mapping[str, Any]
    shared: Mapping[str, str]
    """States that depend on no parameter, and how they change."""

    @property
    def traced(self) -> Sequence[Traced]:
        """All that was traced of it."""
        return [self.later] if self.first is None else [self.later, self.first]


def write_update(
    graph: Graph, factory: Factory, model: Mapping[str, nn.Parameter], scheduled: Sequence[str] = ()
) -> Update:
    """Write the step of the optimizers that ``factory`` makes into a captured graph that has gradients.

    Args:
        graph: captured, with gradients.
        model: the model's parameters by their names, also of the blocks that the graph leaves out.
        scheduled: options of groups that are inputs, beside the rate.

    Raises:
        Error: the optimizer cannot be traced, or does something else than its trace.
        Irregular: the graph leaves out blocks that the optimizer tells apart from those that are there.
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
    small = Small(factory, parameters, groups, stepped)
    writer = _Writer(graph, trained, small)
    made = tuple(writer.group(group, parameters) for group in groups)
    dead_code(graph)
    graph.rename()
    return Update(made, states_of_all(stepped, writer.states, graph.repeats), writer.counts)


def _check_scheduled(groups: Sequence[Group], scheduled: Sequence[str]) -> None:
    for name in scheduled:
        if all(not numbers_of(group.options, [name]) for group in groups):
            every = dict.fromkeys(key for group in groups for key in group.options if numbers_of(group.options, [key]))
            raise Error(
                f"no optimizer has a number {name!r}",
                where="Hints(scheduled=...)",
                expected=f"some of {', '.join(every)}",
                got=repr(name),
                remedy="name options of the optimizer's groups, as pm.optimizer.param_groups has them",
            )


class _Once(GraphBuilder):
    """Appends to a graph; what is ``shared`` is written once."""

    def __init__(self, graph: Graph) -> None:
        super().__init__(graph.mesh)
        self.graph, self.phase = graph, Phase.UPDATE
        self.shared = False
        self._known: dict[Any, Any] = {}
        self._constants: dict[tuple[fx.GraphModule, str], Value] = {}

    def constant(self, module: fx.GraphModule, name: str) -> Value:
        """A constant of a traced step: the same for all parameters that are stepped so."""
        if (module, name) not in self._constants:
            number, constant = len(self.graph.of_kind(InputKind.CONSTANT)), getattr(module, name)
            type = TensorType(tuple(constant.shape), constant.dtype)
            self._constants[module, name] = self.input(InputKind.CONSTANT, f"constant.{number}", type, constant)
        return self._constants[module, name]

    def _append(self, op: Any, args: tuple[Any, ...], types: Any, kwargs: dict[str, Any]) -> Any:
        if not self.shared:
            return super()._append(op, args, types, kwargs)
        key = (op, *(id(a) if isinstance(a, Value) else repr(a) for a in args), repr(kwargs))
        if key not in self._known:
            self._known[key] = super()._append(op, args, types, kwargs)
        return self._known[key]


@dataclass
class _Writer:
    graph: Graph
    trained: Mapping[str, Value]
    small: Small
    states: dict[str, tuple[HeldState, ...]] = field(default_factory=dict)
    counts: dict[str, Count] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.builder, self.traces = _Once(self.graph), Traces()
        self.inputs = {given.name: given for given in self.graph.inputs}

    def group(self, group: Group, parameters: Mapping[str, nn.Parameter]) -> UpdateGroup:
        """Write the step of one group."""
        names = [name for name in group.names if name in self.trained]
        type = TensorType((), torch.float64)
        numbers = {
            name: self.builder.input(InputKind.OPTION, f"optimizer.{group.number}.{name}", type)
            for name in (group.numbers if names else ())
        }
        alike: dict[Any, list[str]] = {}
        for name in names:
            alike.setdefault((tuple(parameters[name].shape), parameters[name].dtype), []).append(name)
        steps: dict[str, Step] = {}
        for each in alike.values():
            steps.update(dict.fromkeys(each, self._step(group, each, parameters)))
        agreed = _agreed(steps)
        held: dict[str, Value] = {}
        for name in names:
            self._write(name, group, steps[name], [*numbers.values()], agreed, held)
        stepped = stepped_names(group, self.trained, self.graph.repeats)
        decided = frozenset().union(*(each.decided for step in steps.values() for each in step.traced))
        return UpdateGroup(group.kind, group.options, stepped, {k: v.name for k, v in numbers.items()}, decided)

    def _step(self, group: Group, names: Sequence[str], parameters: Mapping[str, nn.Parameter]) -> Step:
        like = parameters[names[0]]
        found = recipe(self.small, group.number, names)
        given = dict(group.optimizer.state.get(like, {}))
        try:
            kept, later = self.traces.step(group, like.shape, like.dtype, given, found.options)
            first = None
            if found.once:
                _, first = self.traces.step(group, like.shape, like.dtype, given, found.options, first=True)
        except Exception as error:  # whatever the user's own code raises
            raise refusal(group, error) from error
        return Step(found, later, first, kept, shared_states(later) if first is None else {})

    def _write(
        self,
        name: str,
        group: Group,
        step: Step,
        numbers: Sequence[Value],
        agreed: Mapping[str, Start],
        held: dict[str, Value],
    ) -> None:
        """Write the step of one parameter."""
        given, later = self.inputs[name].value, step.later
        states, ins = [], []
        for key in later.names:
            first = held.get(key) if key in agreed else None
            type = TensorType(later.shapes[key], later.dtypes[key])
            label = f"{name}.{key}"
            if first is not None:
                shared = self.graph.input(first.name)
                shared.aliases = (*shared.aliases, label)
                value = first
            else:
                laid = self.inputs[name].laid if type.shape == given.type.shape else ()
                value = self.builder.input(InputKind.STATE, label, type, laid=laid)
                if key in agreed:
                    held[key] = value
            ins.append(value)
            states.append(HeldState(key, value.name, step.recipe.starts[key], _kept(step.kept[key])))
        self.states[name] = tuple(states)
        before = [given, self.trained[name], *numbers, *ins]
        new = self._apply(name, group, later, before, {*agreed})
        if step.first is not None:
            began = self._apply(name, group, step.first, before, set())
            count = self._count(group)
            self.builder.where = Where(name.rpartition(".")[0], group.where.file, group.where.line)
            pairs = zip(began, new, strict=True)
            new = [self.builder.add(aten.where.self, (count, one, other)) for one, other in pairs]
        self.graph.outputs.append(Output(OutputKind.PARAMETER, name, new[0]))
        for state, value, was in zip(states, new[1:], ins, strict=True):
            if state.name == f"{name}.{state.key}" and value is not was:
                self.graph.outputs.append(Output(OutputKind.STATE, state.name, value))

    def _count(self, group: Group) -> Value:
        """Whether the group was never stepped."""
        name = f"optimizer.{group.number}.steps"
        self.builder.shared = True
        self.builder.where = Where("optimizer", group.where.file, group.where.line)
        if name not in self.counts:
            self.counts[name] = Count(0.0, 1.0)
            count = self.builder.input(InputKind.STATE, name, TensorType((), torch.float64))
            more = self.builder.add(aten.add.Tensor, (count, 1))
            self.graph.outputs.append(Output(OutputKind.STATE, name, more))
        is_first: Value = self.builder.add(aten.eq.Scalar, (self.graph.input(name).value, 0))
        self.builder.shared = False
        return is_first

    def _apply(self, name: str, group: Group, traced: Traced, given: Sequence[Value], agreed: set[str]) -> list[Value]:
        """The nodes of a traced step on these values; gives the new ones."""
        builder = self.builder
        open_ = depending(traced, agreed)
        places = [node for node in traced.module.graph.nodes if node.op == "placeholder"]
        builder.env = dict(zip(places, given, strict=True))
        output: Any = None
        for node in traced.module.graph.nodes:
            if node.op == "output":
                output = node.args[0]
            elif node.op == "get_attr":
                builder.env[node] = builder.constant(traced.module, node.target)
            elif node.op == "call_function" and not says_nothing(node):
                builder.shared = node not in open_
                builder.where = _source(node, name.rpartition(".")[0] if node in open_ else "optimizer", group)
                builder.env[node] = _converted(builder, node)
        builder.shared = False
        return [builder.env[node] for node in output]


def _converted(builder: GraphBuilder, node: fx.Node) -> Any:
    if node.target is aten._local_scalar_dense.default:
        return builder.env[node.args[0]]  # type: ignore[index]
    if node.target is aten.copy_.default:  # what functionalisation leaves of a change of an input
        return builder.env[node.args[1]]  # type: ignore[index]
    if isinstance(node.target, torch._ops.OpOverload):
        args = fx.map_arg(node.args, builder.env.__getitem__)
        kwargs = fx.map_arg(node.kwargs, builder.env.__getitem__)
        if unknown_numbers(node.target, args, kwargs):
            return call_with_numbers(builder, node.target, args, kwargs)
    return convert_call(builder, node)


def _agreed(steps: Mapping[str, Step]) -> dict[str, Start]:
    """The states that all parameters of a group have alike, whatever they are."""
    every = list(steps.values())
    found = {}
    for key in every[0].shared if every else ():
        alike = {(each.shared.get(key), each.recipe.starts.get(key)) for each in every}
        if len(alike) == 1:
            found[key] = every[0].recipe.starts[key]
    return found


def _kept(value: Any) -> torch.dtype | type:
    return value.dtype if isinstance(value, torch.Tensor) else type(value)


def _source(node: fx.Node, module: str, group: Group) -> Where:
    """The line of the optimizer's own file that made a node."""
    line = str(node.meta.get("stack_trace") or "").strip()
    return Where(module, group.where.file, int(line) if line.isdigit() else group.where.line)
