"""From the joint graph of AOTAutograd to our IR: names, sources, phases, and a canonical form of some ops.

Canonical means: what only matters to eager storage (clones, detaches, aliases) is gone; a mean is a sum and a
division, so that a cut of it is a partial *sum*; a random mask is a function of a seed.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch._functorch._aot_autograd.descriptors import (
    BufferAOTInput,
    GradAOTOutput,
    InputMutationAOTOutput,
    ParamAOTInput,
    PlainAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
)

from .errors import Error
from .graph import Graph, Input, InputKind, Node, Output, OutputKind, Phase, Value, Where, dead_code
from .mesh import Mesh
from .random import dropout
from .spec import TensorType

aten = torch.ops.aten
PREFIX = "model."
TORCH = str(Path(torch.__file__).parent)
CAPTURE = str(Path(__file__).with_name("capture.py"))


@dataclass(frozen=True)
class Names:
    """What the placeholders of the traced program are called: leaf names, tied names, and whether there is a loss."""

    leaves: tuple[str, ...]
    aliases: Mapping[str, str]
    loss: Where | None = None


MOVES = (
    aten.view.default,
    aten.t.default,
    aten.transpose.int,
    aten.permute.default,
    aten.unsqueeze.default,
    aten.expand.default,
)


class Builder:
    """Writes the nodes of a graph one after the other, folding what is the same."""

    def __init__(self, mesh: Mesh) -> None:
        self.graph = Graph(mesh)
        self.env: dict[torch.fx.Node, Any] = {}
        self.where = Where()
        self.phase = Phase.FORWARD
        self.seed: Value | None = None
        self.random = 0
        self._moves: dict[Any, Any] = {}

    def add(self, op: Any, args: tuple[Any, ...], types: Any = None, **kwargs: Any) -> Any:
        """Append a node; gives its one result, or the list of them. Types are inferred if not given.

        A view or transpose that is there already is used again: what is made of it (a gathered copy, say) is
        then made once.
        """
        if op in MOVES:
            key = (op, *(id(a) if isinstance(a, Value) else repr(a) for a in args), repr(kwargs))
            if key not in self._moves:
                self._moves[key] = self._append(op, args, types, kwargs)
            return self._moves[key]
        return self._append(op, args, types, kwargs)

    def _append(self, op: Any, args: tuple[Any, ...], types: Any, kwargs: dict[str, Any]) -> Any:
        if types is None:
            types = infer(op, args, kwargs)
        node = Node(op, args, kwargs, phase=self.phase, where=self.where)
        many = isinstance(types, list)
        node.results = [None if t is None else Value(t, node, i) for i, t in enumerate(types if many else [types])]
        self.graph.nodes.append(node)
        return node.results if many else node.results[0]

    def input(self, kind: InputKind, name: str, type: TensorType, constant: torch.Tensor | None = None) -> Value:
        value = Value(type, None, 0, name)
        self.graph.inputs.append(Input(kind, name, value, constant))
        return value


def infer(op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> TensorType | list[TensorType | None]:
    """The type(s) of an op's result, by running it on ``meta``."""
    from .graph import substitute

    def meta(value: Value) -> torch.Tensor:
        return torch.empty(value.shape, dtype=value.type.dtype, device="meta")

    out = op(*substitute(args, meta), **{k: substitute(a, meta) for k, a in kwargs.items()})
    types: TensorType | list[TensorType | None] = types_of(out)
    return types


def types_of(out: Any) -> Any:
    if isinstance(out, torch.Tensor):
        return TensorType(tuple(int(s) for s in out.shape), out.dtype)
    if isinstance(out, (tuple, list)):
        return [types_of(o) for o in out]
    return None


def convert(gm: torch.fx.GraphModule, mesh: Mesh, names: Names) -> Graph:
    """The IR of a traced joint graph."""
    builder = Builder(mesh)
    output: torch.fx.Node | None = None
    for node in gm.graph.nodes:
        builder.where = source_of(node)
        builder.phase = Phase.BACKWARD if node.meta.get("partitioner_tag") == "is_backward" else Phase.FORWARD
        if node.op == "placeholder":
            builder.env[node] = _placeholder(builder, node, names)
        elif node.op == "get_attr":
            constant = getattr(gm, node.target)
            name = f"constant.{len(builder.graph.of_kind(InputKind.CONSTANT))}"
            type = TensorType(tuple(constant.shape), constant.dtype)
            builder.env[node] = builder.input(InputKind.CONSTANT, name, type, constant)
        elif node.op == "call_function":
            builder.env[node] = convert_call(builder, node)
        elif node.op == "output":
            output = node
        else:
            raise Error(f"unexpected {node.op} in the captured graph", where=str(builder.where), got=node.format_node())
    assert output is not None
    _outputs(builder, output, names)
    dead_code(builder.graph)
    _inherit_sources(builder.graph, names.loss)
    builder.graph.rename()
    return builder.graph


def _placeholder(builder: Builder, node: torch.fx.Node, names: Names) -> Value | None:
    desc = node.meta["desc"]
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return None
    if any(not isinstance(s, int) for s in value.shape):
        raise Error("an input has a symbolic shape", got=str(tuple(value.shape)), expected="static shapes")
    type = TensorType(tuple(value.shape), value.dtype)
    if isinstance(desc, (ParamAOTInput, BufferAOTInput)):
        name = names.aliases[desc.target.removeprefix(PREFIX)]
        tied = next((given.value for given in builder.graph.inputs if given.name == name), None)
        if tied is not None:
            return tied
        return builder.input(InputKind.PARAMETER if isinstance(desc, ParamAOTInput) else InputKind.BUFFER, name, type)
    if isinstance(desc, PlainAOTInput):
        name = names.leaves[desc.idx]
        kind = InputKind.TARGET if name.startswith("targets.") else InputKind.ARGUMENT
        return builder.input(kind, name, type)
    if isinstance(desc, TangentAOTInput):
        builder.phase = Phase.BACKWARD
        one: Value = builder.add(aten.full.default, ([], 1.0), TensorType((), type.dtype), dtype=type.dtype)
        return one
    raise Error("an input of unknown kind in the captured graph", got=str(desc))


def _outputs(builder: Builder, node: torch.fx.Node, names: Names) -> None:
    flat = node.args[0]
    assert isinstance(flat, (list, tuple))
    result = 0
    for arg, desc in zip(flat, node.meta["desc"], strict=True):
        value = builder.env.get(arg) if isinstance(arg, torch.fx.Node) else None
        if isinstance(desc, PlainAOTOutput):
            if desc.idx == 0 and names.loss is not None:
                kind, name = OutputKind.LOSS, "loss"
            else:
                kind, name = OutputKind.RESULT, f"results.{result}"
                result += 1
        elif isinstance(desc, GradAOTOutput):
            kind, source = OutputKind.GRADIENT, desc.grad_of
            if not isinstance(source, ParamAOTInput):
                continue
            name = names.aliases[source.target.removeprefix(PREFIX)]
        elif isinstance(desc, InputMutationAOTOutput):
            kind, mutated = OutputKind.BUFFER, desc.mutated_input
            if not isinstance(mutated, BufferAOTInput):
                raise Error(
                    "the model changes one of its inputs in place",
                    got=str(mutated),
                    expected="inputs that the model leaves alone",
                    remedy="clone the input inside the model first",
                )
            name = names.aliases[mutated.target.removeprefix(PREFIX)]
        else:
            continue
        if value is None:
            continue
        known = next(
            (o for o in builder.graph.outputs if kind is OutputKind.GRADIENT and (o.kind, o.name) == (kind, name)), None
        )
        if known is not None:
            builder.phase = Phase.BACKWARD
            known.value = builder.add(aten.add.Tensor, (known.value, value), value.type)
        else:
            builder.graph.outputs.append(Output(kind, name, value))
    sort_gradients(builder.graph)


def sort_gradients(graph: Graph) -> None:
    """The gradients in the order of the parameters."""
    order = {given.name: i for i, given in enumerate(graph.inputs)}
    gradients = iter(sorted((o for o in graph.outputs if o.kind is OutputKind.GRADIENT), key=lambda o: order[o.name]))
    graph.outputs = [next(gradients) if o.kind is OutputKind.GRADIENT else o for o in graph.outputs]


def _inherit_sources(graph: Graph, loss: Where | None) -> None:
    """What stands in no module is the loss's; gradient sums are of the module of the operand made at their line."""
    for node in graph.nodes:
        if node.where.file == CAPTURE and loss is not None:
            node.where = loss
        elif not node.where.module and (node.phase is Phase.BACKWARD or not node.where.file):
            near = [v.node.where for v in node.operands if v.node is not None]
            of_line = [w for w in near if w.module and (w.file, w.line) == (node.where.file, node.where.line)]
            node.where = next(iter(of_line or (near if not node.where.file else [])), node.where)


def source_of(node: torch.fx.Node) -> Where:
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    path = next(reversed(stack.values()))[0] if stack else ""
    module = path.removeprefix(PREFIX) if path.startswith(PREFIX) else "" if path == "model" else path
    return _source(module, node.meta.get("stack_trace") or "", path.startswith("model"))


@lru_cache(maxsize=65536)
def _source(module: str, trace: str, of_model: bool) -> Where:
    """The innermost frame of the user's own code; where a model is all torch's, the innermost one of torch."""
    lines = trace.splitlines()
    frames = []
    for i, text in enumerate(lines):
        if text.strip().startswith('File "'):
            name, _, rest = text.strip()[6:].partition('", line ')
            code = lines[i + 1].strip() if i + 1 < len(lines) else ""
            frames.append(Where(module, name, int(rest.split(",")[0] or 0), code))
    users = [f for f in frames if not f.file.startswith(TORCH) and f.file != CAPTURE]
    torchs = [f for f in frames if f.file.startswith(TORCH)]
    if users:
        return users[-1]
    if of_model and torchs:
        return torchs[-1]
    return Where(module, CAPTURE if frames else "")


# ---- canonical forms ---------------------------------------------------------------------------------------


def convert_call(builder: Builder, node: torch.fx.Node) -> Any:
    if node.target is operator.getitem:
        source, index = node.args
        return builder.env[source][index]  # type: ignore[index]
    args = torch.fx.map_arg(node.args, builder.env.__getitem__)
    args = tuple(list(a) if isinstance(a, (list, tuple)) else a for a in args)
    kwargs = dict(torch.fx.map_arg(node.kwargs, builder.env.__getitem__))
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        raise Error(f"{target} is not an op of torch", where=str(builder.where))
    types = types_of(node.meta.get("val"))
    canonical = CANONICAL.get(target) or CANONICAL.get(target.overloadpacket)
    if canonical is not None:
        return canonical(builder, target, args, kwargs, types)
    if torch.Tag.nondeterministic_seeded in target.tags and not draws_nothing(target, args, kwargs):
        raise Error(
            f"{target} draws random numbers in a way that ranks cannot agree on",
            where=str(builder.where),
            expected="dropout (torch.nn.Dropout, F.dropout)",
            got=str(target),
            remedy="draw the numbers outside of the model and pass them as an input",
        )
    return builder.add(target, args, types, **kwargs)


def draws_nothing(op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Attention carries a dropout probability that is mostly zero."""
    for i, argument in enumerate(op._schema.arguments):
        if argument.name == "dropout_p":
            given = args[i] if i < len(args) else kwargs.get(argument.name, 0.0)
            return bool(given == 0.0)
    return False


Canonical = Callable[[Builder, Any, tuple[Any, ...], dict[str, Any], Any], Any]


def _same(builder: Builder, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], types: Any) -> Any:
    return args[0]


def _nothing(builder: Builder, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], types: Any) -> Any:
    return None


def _to_copy(builder: Builder, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], types: Any) -> Any:
    if types.dtype == args[0].type.dtype:
        return args[0]
    return builder.add(op, args, types, dtype=types.dtype)


def _transpose(builder: Builder, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], types: Any) -> Any:
    """A transpose of a transpose is nothing."""
    source = args[0].node
    if source is not None and source.op is op and list(source.args[1:]) == list(args[1:]):
        return source.args[0]
    return builder.add(op, args, types, **kwargs)


def _view(builder: Builder, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], types: Any) -> Any:
    """A view of a view of one module is one view; a view to the same shape is nothing."""
    source = args[0]
    if (
        source.node is not None
        and source.node.op is aten.view.default
        and source.node.where.module == builder.where.module
    ):
        source = source.node.args[0]
    if source.shape == types.shape:
        return source
    return builder.add(aten.view.default, (source, list(types.shape)), types)


def _dropout(builder: Builder, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], types: Any) -> Any:
    x, p, train = args
    if train is False or p == 0:
        mask = builder.add(aten.ones_like.default, (x,), types[1], dtype=torch.bool)
        return [x, mask]
    if builder.seed is None:
        builder.seed = builder.input(InputKind.SEED, "seed", TensorType((), torch.int64))
    builder.random += 1
    return builder.add(dropout, (x, float(p), builder.seed, builder.random, []), types)


def _nll(builder: Builder, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], types: Any) -> Any:
    """A mean loss is the summed loss over the total weight, both of the whole batch.

    How many targets count follows from the targets alone: so it is known, and reduced, before the loss is.
    """
    logp, target, weight, reduction, ignore = args
    if reduction != 1:
        return builder.add(op, args, types)
    total, count = builder.add(op, (logp, target, weight, 2, ignore), types)
    if weight is None:
        counted = builder.add(aten.sum.default, (builder.add(aten.ne.Scalar, (target, ignore)),))
        count = builder.add(aten._to_copy.default, (counted,), types[1], dtype=types[1].dtype)
    return [builder.add(aten.div.Tensor, (total, count), types[0]), count]


CANONICAL: dict[Any, Canonical] = {
    aten.detach: _same,
    aten.alias: _same,
    aten.clone: _same,
    aten.lift_fresh_copy: _same,
    aten.lift_fresh: _same,
    aten.contiguous: _same,
    aten._assert_tensor_metadata: _nothing,
    aten._assert_async: _nothing,
    aten._to_copy: _to_copy,
    aten.t: _transpose,
    aten.transpose.int: _transpose,
    aten.view: _view,
    aten._unsafe_view: _view,
    aten.reshape: _view,
    aten.native_dropout: _dropout,
    aten.nll_loss_forward: _nll,
    aten.nll_loss2d_forward: _nll,
}
