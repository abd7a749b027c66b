"""Dynamo's trace of one call of a model and its loss: its graph, guards, and code that replays its effects.

    trace = trace_call(TracedCall(model, loss, args, kwargs, targets))
    trace.graph                torch functions of parameters, buffers, arguments, and tensors that the code keeps
    trace.is_valid(call)       Dynamo's guards on attributes, globals and modes; types of inputs are compared elsewhere
    trace.replay(call, run)    loss, results and effects on Python state of a call whose tensors ``run`` computes

Dynamo traces the module with fake weights on the CPU. All private names of torch that this needs are in this file; they
are the parts of torch's ahead-of-time compilation (2.11 to 2.15).
"""

from __future__ import annotations

import builtins
import logging
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from shardfx.ir.errors import Error

from ..data_dependent import stored
from ..model_and_loss import leaf_names
from ..source_locations import LOSS, PREFIX
from .model_preparation import copied, marked


class TracedCall(NamedTuple):
    """A call of a model and its loss, as Dynamo traces it: the local variables of :func:`model_with_loss`."""

    model: nn.Module
    loss: Callable[..., Any] | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    targets: tuple[Any, ...]


def model_with_loss(
    model: nn.Module,
    loss: Callable[..., Any] | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    targets: tuple[Any, ...],
) -> tuple[Any, ...]:
    """The function that is traced: the loss, if there is one, and the model's results."""
    out = model(*args, **kwargs)
    return (out,) if loss is None else (loss(out, *targets), out)


@dataclass(frozen=True)
class DynamoTrace:
    """A traced call.

    ``inputs`` are the names of the graph's placeholders: of parameters and buffers, inputs (``args.0``), or, of other
    tensors, their source (``model.cache``). Of the graph's outputs, ``results`` are the loss, the results, and what the
    code keeps, in this order; ``buffers`` replace buffers, by name; ``trained`` require gradients; ``numbers`` are no
    tensors. ``has_loss``: there is a loss; ``keeps``: the code keeps outputs. ``others`` are, by source, the tensors
    that are no weights and no inputs, and numbers that are inputs of the graph. ``tree`` and ``leaves`` are the model's
    results as a pytree; ``code_names`` the names in the traced code; ``gradients`` whether they were enabled; ``call``
    makes Dynamo's generated code of a function that computes the graph.
    """

    graph: fx.GraphModule
    inputs: tuple[str, ...]
    results: tuple[int, ...]
    buffers: Mapping[str, int]
    trained: frozenset[int]
    has_loss: bool
    keeps: bool
    others: Mapping[str, Tensor]
    numbers: tuple[int, ...]
    tree: pytree.TreeSpec
    leaves: tuple[Any, ...]
    code_names: frozenset[str]
    gradients: bool
    guards: Any
    call: Callable[..., Any]

    def is_valid(self, call: TracedCall) -> bool:
        """Whether the guards hold for a call; the grad mode counts where the code asks for it."""
        with self._mode():
            return bool(self.guards.check(call._asdict()))

    def _mode(self) -> AbstractContextManager[Any]:
        asks = "is_grad_enabled" in self.code_names
        return nullcontext() if asks else torch.set_grad_enabled(self.gradients)

    def reason(self, call: TracedCall) -> str:
        """The guard that does not hold for a call, in Dynamo's words; empty where all do."""
        with self._mode():
            found = self.guards.check_verbose(call._asdict()).verbose_code_parts
        return _IDS.sub("...", str(found[0]).split("  #")[0].strip()) if found else ""

    @property
    def count(self) -> int:
        """The number of tensors among the model's results; the code keeps further ones."""
        return sum(leaf == "tensor" for leaf in self.leaves)

    @property
    def kept(self) -> list[str]:
        """The names of results that are not the model's, but what its code keeps."""
        return [f"result {i}" for i in range(self.count, len(self.results) - self.has_loss)]

    def without_loss(self) -> DynamoTrace:
        """The trace with the model's results alone."""
        return replace(self, results=self.results[self.has_loss :], has_loss=False)

    def replay(self, call: TracedCall, run: Callable[[Mapping[str, Tensor]], Sequence[Tensor | None]]) -> Any:
        """The loss, if there is one, and the model's results, in the user's own objects, with the effects on Python
        state that eager code has, except that buffers stay the same tensors. ``run`` gives the tensors of ``results``
        for the current ``others``; None for what nobody asks for."""
        buffers = stored(call.model) if self.buffers else {}

        def compiled(*inputs: Any) -> list[Any]:
            known = zip(self.inputs, inputs, strict=True)
            made = run({name: _like(self.others[name], each) for name, each in known if name in self.others})
            outputs: list[Any] = [*_outputs(self.graph)]
            for number, value in zip(self.numbers, self._numbers(inputs), strict=True):
                outputs[number] = value
            for number, tensor in reversed([*zip(self.results, made, strict=True)]):  # a result may be the loss itself
                outputs[number] = NOTHING if tensor is None else tensor
            for name, number in self.buffers.items():
                outputs[number] = buffers[name]
            return outputs

        return self.call(compiled_fn=compiled)(*call)

    def _numbers(self, inputs: Sequence[Any]) -> list[Any]:
        """The graph's outputs that are numbers."""
        if not self.numbers:
            return []
        nodes = [node for node in self.graph.graph.nodes if node.op == "placeholder"]
        env = {node: each for node, each in zip(nodes, inputs, strict=True) if not isinstance(each, Tensor)}
        for node in self.graph.graph.nodes:
            if node.op == "call_function" and node.all_input_nodes and env.keys() >= {*node.all_input_nodes}:
                args, kwargs = fx.map_arg((node.args, node.kwargs), env.__getitem__)
                env[node] = node.target(*args, **kwargs)
        outputs = _outputs(self.graph)
        return [env[outputs[number]] for number in self.numbers]

    def __deepcopy__(self, memo: object) -> DynamoTrace:
        return self


def _as_tensor(number: float) -> Tensor:
    """A number as a tensor, which is promoted as the number is among floating tensors."""
    return torch.tensor(number, dtype=torch.float64 if isinstance(number, float) else torch.int64)


def _like(example: Tensor, value: Any) -> Tensor:
    return value if isinstance(value, Tensor) else torch.tensor(value, dtype=example.dtype)


_IDS = re.compile(r"\b\d{9,}\b")


def trace_call(call: TracedCall, changing: Collection[str] = ()) -> DynamoTrace:
    """Trace a call of a model on any device, with inputs that are real, fake or on ``meta``. The model is not changed.

    Args:
        changing: sources of numbers (:func:`changing_number`) that are to be inputs of the graph.

    Dynamo's generated code runs once, on a copy of the model, to find out which output is what: what it changes
    outside of the model (a global list) is changed once.

    Raises:
        Error: the code cannot be traced as one graph; the model gives an input or a weight itself.
    """
    model, loss, *inputs = call
    fakes = FakeWeights(model)
    fake_call = TracedCall(model, loss, *fakes.inputs(inputs))
    with fakes.installed(model), fakes.numbers(model, changing), _tracing(changing):
        out = _captured(fake_call)
        guards = _guards(out, changing)
    graph: fx.GraphModule = out.backend_input.graph_module
    replayed = partial(out.forward_callable, extra_globals={**vars(builtins), **model_with_loss.__globals__})
    names, others = _names_of_inputs(graph, out.backend_input.example_inputs, fakes, fake_call[2:])
    outputs = _outputs(graph)
    tensors = {i: example for i, each in enumerate(outputs) if isinstance(example := _example(each), Tensor)}
    _name_modules(graph, model, loss)
    markers = [torch.empty(()) if i in tensors else 0 for i in range(len(outputs))]
    number = {id(markers[i]): i for i in tensors}
    twin = _twin(model)
    result = replayed(compiled_fn=lambda *_: list(markers))(*fake_call._replace(model=twin))
    flat, tree = pytree.tree_flatten(result[-1])
    if any(isinstance(each, Tensor) and id(each) not in number for each in flat):
        raise Error("the model gives an input or a weight itself", expected="tensors that it computes")
    order = [number[id(each)] for each in (*result[:-1], *flat) if id(each) in number]
    buffers = {name: number[id(b)] for name, b in twin.named_buffers(remove_duplicate=False) if id(b) in number}
    kept = [i for i in sorted(tensors) if i not in order and i not in buffers.values()]
    leaves = tuple("tensor" if id(each) in number else each for each in flat)
    del result, flat
    keeps = bool(kept) or any(sys.getrefcount(markers[i]) > UNKEPT for i in order)
    return DynamoTrace(
        graph,
        names,
        (*order, *kept),
        buffers,
        frozenset(i for i, each in tensors.items() if each.requires_grad),
        loss is not None,
        keeps,
        others,
        tuple(i for i, each in enumerate(outputs) if isinstance(each, fx.Node) and i not in tensors),
        tree,
        leaves,
        frozenset(name for code in out.graph_capture_output.traced_code for name in code.co_names),
        torch.is_grad_enabled(),
        guards,
        replayed,
    )


NOTHING = torch.empty(())
"""In place of outputs that nobody asks for."""


def _outputs(graph: fx.GraphModule) -> Sequence[Any]:
    return graph.graph.output_node().args[0]  # type: ignore[return-value]


def _example(output: Any) -> Any:
    return output.meta.get("example_value") if isinstance(output, fx.Node) else None


UNKEPT = sys.getrefcount([object()][0])
"""The references to an element of a list that nothing else keeps."""


class FakeWeights:
    """Fake CPU tensors for the parameters and buffers of a module, and for inputs."""

    def __init__(self, model: nn.Module) -> None:
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.by_id: dict[int, Tensor] = {}
        self.of_numbers: dict[int, Tensor] = {}
        """The numbers that fakes stand for."""
        self.names: dict[int, str] = {}
        """The first name of each fake weight."""
        for name, tensor in stored(model).items():
            if id(tensor) in self.by_id:
                continue
            made = self._fake(tensor)
            if isinstance(tensor, nn.Parameter):
                made = marked(nn.Parameter(made, tensor.requires_grad), tensor)
            self.by_id[id(tensor)] = made
            self.names[id(made)] = name

    def _fake(self, tensor: Tensor) -> Tensor:
        with torch.no_grad(), self.mode:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")

    def inputs(self, tree: Any) -> Any:
        """Inputs with fakes in place of tensors, another one for each place, also where a tensor is passed twice."""
        return pytree.tree_map_only(Tensor, lambda each: self._fake(each).requires_grad_(each.requires_grad), tree)

    @contextmanager
    def installed(self, model: nn.Module) -> Iterator[None]:
        """Replace the parameters and buffers of a module by the fakes, within the context."""
        places: list[dict[str, Any]] = [each for m in model.modules() for each in (m._parameters, m._buffers)]
        before = [dict(tensors) for tensors in places]
        for tensors in places:
            tensors.update((name, self.by_id[id(each)]) for name, each in tensors.items() if each is not None)
        try:
            yield
        finally:
            for tensors, was in zip(places, before, strict=True):
                tensors.update(was)

    @contextmanager
    def numbers(self, model: nn.Module, sources: Collection[str]) -> Iterator[None]:
        """Replace floating attributes of a model by fakes within the context."""
        with ExitStack() as stack:
            for source in sources:
                path, _, name = source.rpartition(".")
                holder = eval(path, {"L": {"model": model}})
                if isinstance(value := getattr(holder, name), float):
                    made = self._fake(number := _as_tensor(value))
                    self.of_numbers[id(made)] = number
                    stack.enter_context(mock.patch.object(holder, name, made))
            yield


# ---- torch's own parts ----------------------------------------------------------------------------------------------


@contextmanager
def _tracing(changing: Collection[str]) -> Iterator[None]:
    """Configure Dynamo: static shapes, constant numbers but for ``changing`` ones, recurrent layers, guards on hooks,
    calls of loggers ignored."""
    from torch._dynamo import config
    from torch._dynamo.utils import get_metrics_context
    from torch.compiler import config as compiler_config

    hooks = nn.modules.module._global_buffer_registration_hooks
    for key in [key for key, hook in hooks.items() if hook.__module__.startswith("torch._functorch")]:
        del hooks[key]  # which torch 2.11 leaves behind where an export fails
    loggers = logging.root.manager.loggerDict.values()
    once = (getattr(logger, name, None) for logger in loggers for name in ("warning_once", "info_once"))
    options = {
        "assume_static_by_default": True,
        "automatic_dynamic_shapes": False,
        "allow_rnn": True,
        "skip_nnmodule_hook_guards": False,
        "ignore_logging_functions": {*config.ignore_logging_functions, *filter(callable, once)},
    }
    validates = torch.distributions.Distribution._validate_args
    torch.distributions.Distribution.set_default_validate_args(False)
    try:
        sources = compiler_config.patch(dynamic_sources=",".join(changing))  # type: ignore[attr-defined]
        with get_metrics_context(), config.patch(options), sources:
            yield
    finally:
        torch.distributions.Distribution.set_default_validate_args(validates)


def _captured(call: TracedCall) -> Any:
    """Dynamo's capture of a call. In their first call, models of transformers install hooks under a lock, which Dynamo
    does not trace: they are installed before."""
    from torch._dynamo.convert_frame import fullgraph_capture
    from torch._dynamo.exc import TorchDynamoException

    hooks: Any = sys.modules.get("transformers.utils.output_capturing")
    for module in call.model.modules() if hooks is not None else ():
        if hooks._CAN_RECORD_REGISTRY.get(module):
            hooks.maybe_install_capturing_hooks(module)
    grad = torch.is_grad_enabled()
    try:
        return fullgraph_capture(model_with_loss, tuple(call))
    except TorchDynamoException as error:
        stack = getattr(error, "real_stack", None)
        raise Error(
            "Dynamo cannot trace the model and its loss as one graph",
            where=f"{stack[-1].filename}:{stack[-1].lineno}  {stack[-1].line}" if stack else None,
            expected="code that torch.compile(fullgraph=True) takes",
            got=str(error).splitlines()[0],
        ) from error
    finally:
        torch._C._set_grad_enabled(grad)  # which a failed trace may leave off


_NUMBER = re.compile(r"(L\['model'\](?:\.\w+|\['\w+'\]|\[\d+\])*)\.(\w+) == (-?[\d.]+(?:e-?\d+)?)$")


def changing_number(reason: str) -> str:
    """The source of an attribute whose number has changed, by the guard that says so; empty where it is no number."""
    found = _NUMBER.match(reason)
    return f"{found[1]}.{found[2]}" if found else ""


def _twin(model: nn.Module) -> nn.Module:
    """A copy of a module, of the same tensors."""
    with mock.patch.object(Tensor, "__deepcopy__", lambda tensor, memo: tensor):
        return copied(model, {id(each): each for each in stored(model).values()})


def _guards(out: Any, changing: Collection[str]) -> Any:
    """The guards of a capture, but for those of tensors that belong to inputs and weights, or stand for numbers."""
    from torch._dynamo.hooks import Hooks
    from torch._dynamo.types import GuardFilterEntry
    from torch._dynamo.utils import dynamo_timed

    def wanted(entries: Sequence[GuardFilterEntry]) -> list[bool]:
        tensors = (each.guard_type == "TENSOR_MATCH" for each in entries)
        elsewhere = (each.name in names or COMPARED_ELSEWHERE.search(each.name) for each in entries)
        return [not (tensor and other) for tensor, other in zip(tensors, elsewhere, strict=True)]

    names = {source.replace("L['model']", "model", 1) for source in changing}

    with dynamo_timed("build_guards"):
        made = out.graph_capture_output.build_guards(model_with_loss.__code__, hooks=Hooks(guard_filter_fn=wanted))
    return made.guard_manager


COMPARED_ELSEWHERE = re.compile(r"^(args|kwargs|targets)\b|_parameters|_buffers")
"""The sources of inputs and weights."""


def _names_of_inputs(
    graph: fx.GraphModule, examples: Sequence[Any], fakes: FakeWeights, inputs: Any
) -> tuple[tuple[str, ...], dict[str, Tensor]]:
    """The names of a graph's placeholders, and the tensors that are no weights and no inputs."""
    leaves = {id(leaf): name for name, leaf in reversed(leaf_names(*inputs))}
    names, others = [], {}
    for node, example in zip((n for n in graph.graph.nodes if n.op == "placeholder"), examples, strict=True):
        name = leaves.get(id(example)) or fakes.names.get(id(example))
        if name is None:
            name = _source_name(node)
            if not isinstance(example, Tensor):
                example = _as_tensor(example.node.hint)
            others[name] = fakes.of_numbers.get(id(example), example)
        names.append(name)
    return tuple(names), others


def _source_name(node: fx.Node) -> str:
    """The source of a tensor in the user's code: ``model.cache``, ``globals.TABLE``."""
    source = getattr(node, "_dynamo_source", None)
    named = node.name if source is None else source.name
    text = named if isinstance(named, str) else named()  # a method before torch 2.12
    return re.sub(r"^([LG])\['(\w+)'\]", lambda m: m[2] if m[1] == "L" else f"globals.{m[2]}", text)


def _name_modules(graph: fx.GraphModule, model: nn.Module, loss: object) -> None:
    """Set the module paths of nodes, which Dynamo keys by module id; what no module calls is of the loss."""
    modules = [(f"{PREFIX}{path}".rstrip("."), each) for path, each in model.named_modules()]
    if isinstance(loss, nn.Module):
        modules += [(f"{LOSS}.{path}".rstrip("."), each) for path, each in loss.named_modules()]
    paths = {str(id(each)): path for path, each in reversed(modules)}
    for module in graph.modules():
        behind: dict[str, Any] = {}
        for node in reversed(module.graph.nodes) if isinstance(module, fx.GraphModule) else ():
            unplaced = {LOSS: (LOSS, "")} if node.stack_trace else behind  # a switch of the grad mode has no trace
            stack = behind = node.meta.get("nn_module_stack") or unplaced
            node.meta["nn_module_stack"] = {
                key: (paths.get(key.split("@")[0], path), kind) for key, (path, kind) in stack.items()
            }
            node.meta["number"] = node.op == "call_function" and not isinstance(_example(node), Tensor)
            for name in ("example_value", "eager_input_vals"):
                node.meta.pop(name, None)
