"""A traced call (:mod:`.dynamo`) as a program of tensors, which is exported as the model and its loss would be."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.amp import autocast_mode
from torch.fx.traceback import preserve_node_meta

from shardfx.ir.context.written_attention import written_flex_attention
from shardfx.ir.errors import Error
from shardfx.ir.repeat import Repeat

from ..data_dependent import DataGuards, stored
from ..model_and_loss import ModelAndLoss
from ..source_locations import LOSS, PREFIX, source_of
from .autograd_in_forward import TRANSFORM
from .dynamo import BY_EXPORT, DynamoTrace
from .forward_probes import CheckpointedModules
from .model_preparation import Scopes


class TracedProgram(ModelAndLoss):
    """The graph of a traced call on the weights of a model; ``names`` are those of its tensors, ``program`` the
    arguments of :class:`.ModelAndLoss`."""

    def __init__(self, trace: DynamoTrace, names: Sequence[str], *program: Any) -> None:
        super().__init__(*program)
        self._trace, self._names, self._program = (trace,), list(names), program
        self._enter: Callable[[str], object] = str
        _note_checkpoints(trace.graph, self.model, self.results.checkpointed)

    @property
    def scopes(self) -> Scopes:
        """The globals that its code names."""
        return self._trace[0].scopes

    @contextmanager
    def entering(self, enter: Callable[[str], object]) -> Iterator[None]:
        """Within, ``enter`` is called with the module path of each node."""
        self._enter = enter
        try:
            yield
        finally:
            self._enter = str

    @property
    def eager(self) -> ModelAndLoss:
        """The program that calls the model's own code."""
        return ModelAndLoss(*self._program)

    def _run(self, tensors: tuple[Tensor, ...], decisions: DataGuards) -> tuple[Tensor, ...]:
        (trace,) = self._trace
        given = dict(zip(self._names, tensors, strict=True))
        inputs = {name: each for name, each in given.items() if name.startswith(("args.", "kwargs."))}
        known = stored(self.model) | given | self.compute.inputs(inputs)
        runner = _NodeRunner(trace.graph, decisions, self._enter)
        with preserve_node_meta():
            replaced = {id(known[name]) for name in trace.buffers}
            values = (known[name] for name in trace.inputs)
            outputs = runner.run(*(each.clone() if id(each) in replaced else each for each in values))
        self.results.tree, self.results.leaves = trace.tree, trace.leaves
        with torch.no_grad():  # several may have changed places, and one may be a view of another
            for name, value in [(name, outputs[number].clone()) for name, number in trace.buffers.items()]:
                known[name].copy_(value)
        outs = [outputs[number] for number in trace.results]
        if self.loss is not None and not trace.has_loss:
            targets = [each for name, each in zip(self._names, tensors, strict=True) if name.startswith("targets.")]
            outs = [self.loss(outs, *targets), *outs]
        trains = self.loss is not None
        return (*outs[:trains], *(each.detach() for each in outs[trains:]))


GET_DATA: Any = torch._C._autograd._get_data_attr  # type: ignore[attr-defined]
TRANSFORMS = ("_grad_increment_nesting", "_jvp_increment_nesting", "_enter_dual_level")
"""The functions that begin transforms which differentiate."""
_OPERATORS = "add", "sub", "mul", "truediv", "floordiv", "mod", "pow"
OUT_OF_PLACE = {getattr(operator, f"i{name}"): getattr(operator, name) for name in _OPERATORS}
"""The operators of numbers in place of those that change tensors."""
_MATH = "acos", "asin", "atan", "cos", "cosh", "log2", "sin", "sinh", "sqrt", "tan", "tanh"
OF_FLOATS: dict[Any, Any] = {getattr(torch, f"_sym_{name}"): getattr(torch, name) for name in _MATH}
OF_FLOATS |= {torch.sym_float: torch.Tensor.double, operator.truediv: operator.truediv}
"""Functions whose results are floats, and what computes them on tensors."""
OF_NUMBERS: dict[Any, Any] = {
    **OF_FLOATS,
    **OUT_OF_PLACE,
    torch.sym_max: lambda a, b: a.clamp(min=b) if isinstance(a, Tensor) else b.clamp(min=a),
    torch.sym_min: lambda a, b: a.clamp(max=b) if isinstance(a, Tensor) else b.clamp(max=a),
}


class _NodeRunner(fx.Interpreter):
    """Interpreter of a graph of torch functions, with the source locations of its nodes."""

    def __init__(self, graph: fx.GraphModule, decisions: DataGuards, enter: Callable[[str], object]) -> None:
        super().__init__(graph)
        self._decisions, self._enter, self.extra_traceback = decisions, enter, False

    def run_node(self, n: fx.Node) -> Any:
        """Run a node."""
        if n.op == "placeholder" or n.op == "output" or n.op == "get_attr":
            return super().run_node(n)
        if n.stack_trace:
            self._decisions.at = source_of(n)
        self._enter(_module_path(n))
        self._decisions.of_loss = _is_of_loss(n)
        if n.op == "call_function" and n.meta["number"]:  # which is a tensor here
            args, _ = self.fetch_args_kwargs_from_env(n)
            function = OF_NUMBERS.get(n.target, n.target)
            return function(*_as_wide(function, args))
        return super().run_node(n)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function, or the graph within a checkpoint.

        Raises:
            Error: another higher-order op, or a transform that differentiates.
        """
        if getattr(target, "__name__", "") in TRANSFORMS:
            raise TRANSFORM.error(str(self._decisions.at))
        if target is torch.ops.higher_order.tag_activation_checkpoint:
            return _NodeRunner(args[0], self._decisions, self._enter).run(*args[1:])
        if target is torch.ops.higher_order.flex_attention:
            return written_flex_attention(*args, **kwargs)
        if target is GET_DATA:  # x.data
            return args[0].detach()
        if target is autocast_mode._enter_autocast:  # of which an export records the call alone
            return autocast_mode.autocast(*args).__enter__()
        if target is autocast_mode._exit_autocast:
            return args[0].__exit__(None, None, None)
        applied = torch.ops.higher_order.autograd_function_apply
        if isinstance(target, torch._ops.HigherOrderOperator) and target is not applied:
            raise Error(
                f"{target} in the graph of Dynamo cannot be captured",
                where=str(self._decisions.at),
                expected="functions of tensors, and torch.utils.checkpoint",
                remedy=BY_EXPORT,
            )
        return super().call_function(target, args, kwargs)


def _as_wide(function: Any, args: Sequence[Any]) -> list[Any]:
    """The arguments of a function of numbers, as wide as Python computes: with floats all are."""
    floats = (each.is_floating_point() if isinstance(each, Tensor) else isinstance(each, float) for each in args)
    wide = function in OF_FLOATS.values() or any(floats)
    return [each.double() if wide and isinstance(each, Tensor) else each for each in args]


def _is_of_loss(node: fx.Node) -> bool:
    return any(path.split(".")[0] == LOSS for path, _ in node.meta["nn_module_stack"].values())


def _module_path(node: fx.Node) -> str:
    """The path of the innermost module of the model that calls a node; "" outside of it."""
    stack = [path for path, _ in node.meta["nn_module_stack"].values()]
    return stack[-1].removeprefix(PREFIX) if stack and not _is_of_loss(node) else ""


def _note_checkpoints(graph: fx.GraphModule, model: nn.Module, found: CheckpointedModules) -> None:
    """Note the modules that are called in each checkpoint, once: of a graph that leaves no block out."""
    if found.calls or found.others:
        return
    for node in graph.graph.nodes:
        if node.target is torch.ops.higher_order.tag_activation_checkpoint:
            depth = len(node.meta["nn_module_stack"])
            body: Any = graph.get_submodule(node.args[0].target)
            calls = (each for each in body.graph.nodes if each.op.startswith("call"))
            stacks = ([*each.meta["nn_module_stack"].values()] for each in calls)
            found.add([stack[depth][0].removeprefix(PREFIX) for stack in stacks if len(stack) > depth], model)


def without_repeats(trace: DynamoTrace, repeats: Sequence[Repeat]) -> DynamoTrace:
    """A trace without the blocks that are left out; what follows them reads the results of the last block before.

    Raises:
        ValueError: blocks have other numbers of nodes.
    """
    if not repeats:
        return trace
    copied = fx.Graph()
    copied.output(copied.graph_copy(trace.graph.graph, {}))
    graph = fx.GraphModule(trace.graph, copied)
    placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
    near = ((each, index) for each in repeats for index in range(each.first - 1, each.last + 1))  # and the one before
    blocks: dict[tuple[Repeat, int], list[fx.Node]] = {place: [] for place in near}
    at: tuple[Repeat, int] | None = None
    for node in graph.graph.nodes:
        if node.op not in ("placeholder", "output", "get_attr"):
            path = _module_path(node)
            found = ((each, index) for each in repeats if (index := each.within(path)) is not None)
            at = next(found, at)
            if at in blocks:
                blocks[at].append(node)
    for repeat in repeats:
        gone = dict.fromkeys(node for index in repeat.left_out for node in blocks[repeat, index])
        for last, kept in zip(blocks[repeat, repeat.last], blocks[repeat, repeat.first - 1], strict=True):
            for user in [each for each in last.users if each not in gone]:
                user.replace_input_with(last, kept)
        for node in reversed(gone):
            graph.graph.erase_node(node)
    names = dict(zip(placeholders, trace.inputs, strict=True))
    for node, name in [*names.items()]:
        if not node.users and any(each.within(name) in each.left_out for each in repeats):
            graph.graph.erase_node(node)
            del names[node]
    return replace(trace, graph=graph, inputs=tuple(names.values()))


def without_loss(trace: DynamoTrace) -> DynamoTrace:
    """The trace with the model's results alone; what only the loss computes is gone."""
    copied = fx.Graph()
    outputs: Any = copied.graph_copy(trace.graph.graph, {})
    needed = {*trace.results[trace.has_loss :], *trace.buffers.values(), *trace.numbers}
    copied.output(tuple(each if i in needed else None for i, each in enumerate(outputs)))
    for node in reversed(copied.nodes):
        writes = str(node.target).endswith("_") and node.op == "call_method"
        if node.op.startswith("call") and not node.users and not writes and _is_of_loss(node):
            copied.erase_node(node)
    graph = fx.GraphModule(trace.graph, copied)
    return replace(trace, graph=graph, results=trace.results[trace.has_loss :], has_loss=False)
