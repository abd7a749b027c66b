"""Conversion of a joint fx graph to a :class:`shardfx.ir.graph.Graph`: names, phases, outputs, and the checks of ops.

    with_effects(token, aten._linalg_check_errors, info, "linalg.inv")     ->  a guard: info is 0 everywhere

What one device would raise, a program reports after its run, before results are handed out and buffers are stored.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._functorch._aot_autograd.descriptors import (
    BackwardTokenAOTInput,
    BufferAOTInput,
    ForwardTokenAOTInput,
    GradAOTOutput,
    InputMutationAOTOutput,
    ParamAOTInput,
    PlainAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
    ViewBaseAOTInput,
)

from shardfx.ir.builder import Call, GraphBuilder
from shardfx.ir.errors import Error
from shardfx.ir.graph import Graph, Guard, InputKind, Output, OutputKind, Phase, Value, Where
from shardfx.ir.mesh import Mesh
from shardfx.ir.rewriter import dead_code
from shardfx.ir.spec import TensorType

from .canonical.canonical_ops import convert_call
from .frontend.model_preparation import reject_collective
from .repeated_blocks import content
from .source_locations import PREFIX, inherit_sources, source_of

aten = torch.ops.aten


@dataclass(frozen=True)
class ProgramNames:
    """Names of the inputs and outputs of a traced program: input leaves, tied names, the loss if there is one, the
    guards of its last outputs, and the gradient of the loss: a number, or a state of that name which begins with it."""

    leaves: tuple[str, ...]
    aliases: Mapping[str, str]
    loss: Where | None = None
    guards: tuple[Guard, ...] = ()
    seed: float = 1.0
    seed_state: str = ""


def convert(gm: torch.fx.GraphModule, mesh: Mesh, names: ProgramNames, drawn: dict[Value, Call] | None = None) -> Graph:
    """The IR of a traced joint graph. ``drawn`` is filled with the values that stand for torch's random numbers, and
    the call that draws each in torch."""
    builder = GraphBuilder(mesh)
    output: torch.fx.Node | None = None
    constants: dict[object, Value] = {}
    for node in gm.graph.nodes:
        builder.where = source_of(node)
        builder.phase = Phase.BACKWARD if node.meta.get("partitioner_tag") == "is_backward" else Phase.FORWARD
        if node.op == "placeholder":
            builder.env[node] = None if _is_token(node) else _placeholder(builder, node, names)
        elif node.op == "get_attr":
            constant = getattr(gm, node.target)
            key = content(constant)
            if key is not None and key in constants:  # equal blocks have equal constants, each its own
                builder.env[node] = constants[key]
                continue
            name = f"constant.{len(builder.graph.of_kind(InputKind.CONSTANT))}"
            type = TensorType(tuple(constant.shape), constant.dtype)
            builder.env[node] = constants[key or id(constant)] = builder.input(InputKind.CONSTANT, name, type, constant)
        elif _is_effect(node):
            _convert_effect(builder, node)
        elif node.op == "call_function":
            builder.env[node] = None if _is_token(node) else convert_call(builder, node)
        elif node.op == "output":
            output = node
        else:
            raise Error(f"unexpected {node.op} in the captured graph", where=str(builder.where), got=node.format_node())
    assert output is not None
    _outputs(builder, output, names)
    _settle_guards(builder.graph)
    dead_code(builder.graph)
    inherit_sources(builder.graph, names.loss)
    for made in builder.graph.nodes:
        reject_collective(made)
    builder.graph.rename()
    if drawn is not None:
        drawn.update(builder.drawn)
    return builder.graph


def _placeholder(builder: GraphBuilder, node: torch.fx.Node, names: ProgramNames) -> Value:
    desc = node.meta["desc"]
    value: torch.Tensor = node.meta["val"]
    type = TensorType(tuple(value.shape), value.dtype)
    if isinstance(desc, (ParamAOTInput, BufferAOTInput)):
        name = names.aliases[desc.target.removeprefix(PREFIX)]
        tied = next((inp.value for inp in builder.graph.inputs if inp.name == name), None)
        if tied is not None:
            return tied
        return builder.input(InputKind.PARAMETER if isinstance(desc, ParamAOTInput) else InputKind.BUFFER, name, type)
    if isinstance(desc, PlainAOTInput):
        name = names.leaves[desc.idx]
        kind = InputKind.TARGET if name.startswith("targets.") else InputKind.ARGUMENT
        return builder.input(kind, name, type)
    if isinstance(desc, TangentAOTInput):
        builder.phase = Phase.BACKWARD
        if not isinstance(desc.output, PlainAOTOutput):  # nobody asks for the gradient of what a buffer then holds
            none: Value = builder.add(aten.full.default, (list(type.shape), 0.0), type, dtype=type.dtype)
            return none
        _check_holds(names.seed, type.dtype)
        if names.seed_state:
            scale = builder.input(InputKind.STATE, names.seed_state, TensorType((), torch.float64))
            begun: Value = builder.add(aten._to_copy.default, (scale,), dtype=type.dtype)
            return begun
        seed: Value = builder.add(aten.full.default, ([], names.seed), TensorType((), type.dtype), dtype=type.dtype)
        return seed
    if isinstance(desc, ViewBaseAOTInput):
        raise Error(
            "the model writes into a tensor that lies where another of its tensors lies",
            where=_name_of(desc.base_of, names),
            expected="buffers and inputs of their own",
            got="a view, or the same memory",
            remedy="register one of them, and take the view in forward; or clone the other",
        )
    raise Error("an input of unknown kind in the captured graph", got=str(desc))


def _written(desc: object, names: ProgramNames) -> Error:
    of_input = isinstance(desc, PlainAOTInput)
    return Error(
        f"the model changes one of its {'inputs' if of_input else 'parameters'} in place",
        where=_name_of(desc, names),
        expected="inputs that the model leaves alone" if of_input else "parameters that an optimizer changes alone",
        remedy="clone the input inside the model first"
        if of_input
        else "compute with a new tensor (self.weight.clamp(-1, 1)), or change it behind the optimizer's step; what has "
        "no gradient may be a buffer",
    )


def _name_of(desc: object, names: ProgramNames) -> str:
    """The user's name of an input."""
    if isinstance(desc, PlainAOTInput):
        return names.leaves[desc.idx]
    target = getattr(desc, "target", str(desc)).removeprefix(PREFIX)
    return names.aliases.get(target, target)


def _check_holds(scale: float, dtype: torch.dtype) -> None:
    if scale > torch.finfo(dtype).max:
        raise Error(
            f"a loss in {dtype} cannot be scaled by {scale:g}",
            where="Hints(mixed_precision=...): loss_scale",
            expected=f"at most {torch.finfo(dtype).max:g}",
            got=f"{scale:g}",
            remedy="compute the loss in float32: MixedPrecision(..., output_dtype=torch.float32)",
        )


def _outputs(builder: GraphBuilder, node: torch.fx.Node, names: ProgramNames) -> None:
    flat = node.args[0]
    assert isinstance(flat, (list, tuple))
    outputs, gradients, result = builder.graph.outputs, dict[str, Output](), 0
    guards = iter(enumerate(names.guards))
    unguarded = sum(isinstance(desc, PlainAOTOutput) for desc in node.meta["desc"]) - len(names.guards)
    for arg, desc in zip(flat, node.meta["desc"], strict=True):
        value = builder.env.get(arg) if isinstance(arg, torch.fx.Node) else None
        guard = None
        if isinstance(desc, PlainAOTOutput) and desc.idx >= unguarded:
            number, guard = next(guards)
            kind, name = OutputKind.GUARD, f"guards.{number}"
        elif isinstance(desc, PlainAOTOutput):
            if desc.idx == 0 and names.loss is not None:
                kind, name = OutputKind.LOSS, "loss"
            else:
                kind, name = OutputKind.RESULT, f"results.{result}"
                result += 1
        elif isinstance(desc, GradAOTOutput):
            kind, source = OutputKind.GRADIENT, desc.grad_of
            if isinstance(source, ParamAOTInput):
                name = names.aliases[source.target.removeprefix(PREFIX)]
            elif isinstance(source, PlainAOTInput):
                name = names.leaves[source.idx]
            else:
                continue
        elif isinstance(desc, InputMutationAOTOutput):
            kind, mutated = OutputKind.BUFFER, desc.mutated_input
            if not isinstance(mutated, BufferAOTInput):
                raise _written(mutated, names)
            name = names.aliases[mutated.target.removeprefix(PREFIX)]
        else:
            continue
        if value is None:
            continue
        if kind is OutputKind.GRADIENT and name in gradients:
            builder.phase = Phase.BACKWARD
            gradients[name].value = builder.add(aten.add.Tensor, (gradients[name].value, value), value.type)
            continue
        outputs.append(Output(kind, name, value, guard=guard))
        if kind is OutputKind.GRADIENT:
            gradients[name] = outputs[-1]
    order = {inp.name: number for number, inp in enumerate(builder.graph.inputs)}
    outputs.sort(key=lambda each: order[each.name] if each.kind is OutputKind.GRADIENT else -1)


def _depending(graph: Graph, values: Iterable[Value]) -> set[Value]:
    """The values that depend on some, and these."""
    found = {*values}
    for node in graph.nodes:
        if not found.isdisjoint(node.operands):
            found.update(node.outs)
    return found


def _settle_guards(graph: Graph) -> None:
    """Leave out guards that depend on no input, which hold always, and mark the checks of the loss: those that depend
    on a target."""
    of_inputs = _depending(graph, (inp.value for inp in graph.inputs if inp.kind is not InputKind.CONSTANT))
    of_targets = _depending(graph, (inp.value for inp in graph.inputs if inp.kind is InputKind.TARGET))
    graph.outputs = [output for output in graph.outputs if output.guard is None or output.value in of_inputs]
    for output in graph.outputs:
        if output.guard is not None and output.guard.op and output.value in of_targets:
            output.guard = replace(output.guard, of_loss=True)


TOKENS = (ForwardTokenAOTInput, BackwardTokenAOTInput)


def _is_token(node: torch.fx.Node) -> bool:
    """Whether a node of a traced graph is an effect token, which only orders calls."""
    if node.op == "placeholder":
        return isinstance(node.meta["desc"], TOKENS)
    if node.target is operator.getitem:
        return _is_effect(node.args[0]) and operator.index(node.args[1]) == 0  # type: ignore[arg-type]
    return False


def _is_effect(node: Any) -> bool:
    """Whether a node is a call for its effect."""
    return isinstance(node, torch.fx.Node) and node.target is torch.ops.higher_order.with_effects


def _convert_effect(builder: GraphBuilder, node: torch.fx.Node) -> None:
    """Write a call for its effect as a guard.

    Raises:
        Error: its effect is not known.
    """
    _, op, info, *rest = node.args
    if op is not aten._linalg_check_errors.default:
        raise Error(
            f"{op} is called for an effect that no program has",
            where=str(builder.where),
            expected="ops that give tensors, and the checks of torch.linalg",
            got=str(op),
            remedy="leave it out of the model and of its loss",
        )
    assert isinstance(info, torch.fx.Node)
    wrong = builder.add(aten.any.default, (builder.add(aten.ne.Scalar, (builder.env[info], 0)),))
    number = sum(output.kind is OutputKind.GUARD for output in builder.graph.outputs)
    guard = Guard(False, builder.where, builder.phase is Phase.BACKWARD, op=str(rest[0]))
    builder.graph.outputs.append(Output(OutputKind.GUARD, f"checks.{number}", wrong, guard=guard))
