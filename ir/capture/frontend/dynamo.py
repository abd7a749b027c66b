"""Dynamo's trace of one call of a model and its loss: its graph, guards, and code that replays its effects.

    trace = trace_call(TracedCall(model, loss, args, kwargs, targets))
    trace.graph                torch functions of parameters, buffers, arguments, and tensors that the code keeps
    trace.is_valid(call)       Dynamo's guards on attributes, globals and modes; types of inputs are compared elsewhere
    trace.replay(call, run)    the results and the effects on Python state of a call whose tensors ``run`` computes

Dynamo traces the module with fake weights on the CPU. All private names of torch that this needs are in this file; they
are the parts of torch's ahead-of-time compilation (2.11 to 2.15).
"""

from __future__ import annotations

import builtins
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

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
    tensors, their source (``model.cache``). ``results`` are the numbers of the graph's outputs that are the loss, the
    results, and what the code keeps, in this order; ``buffers`` those that replace buffers, by name. ``others`` are
    the tensors that are no weights and no inputs, by source. ``tree`` and ``leaves`` are the model's results as a
    pytree; ``code_names`` the names in the traced code; ``gradients`` whether they were enabled; ``call`` makes
    Dynamo's generated code of a function that computes the graph.
    """

    graph: fx.GraphModule
    inputs: tuple[str, ...]
    results: tuple[int, ...]
    buffers: Mapping[str, int]
    others: Mapping[str, Tensor]
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

    def replay(self, call: TracedCall, run: Callable[..., Sequence[Any]]) -> Any:
        """The results of a call, in the user's own objects, with the effects on Python state that eager code has;
        ``run`` computes the graph's outputs from its inputs."""
        return self.call(compiled_fn=run)(*call)


_IDS = re.compile(r"\b\d{9,}\b")


def trace_call(call: TracedCall) -> DynamoTrace:
    """Trace a call of a model on any device, with inputs that are real, fake or on ``meta``. The model is not changed.

    Dynamo's generated code runs once, on a copy of the model, to find out which output is what: what it changes
    outside of the model (a global list) is changed once.

    Raises:
        Error: the graph depends on a number that changes.
        TorchDynamoException: the code cannot be captured as one graph.
    """
    model, loss, *inputs = call
    fakes = FakeWeights(model)
    fake_call = TracedCall(model, loss, *fakes.inputs(inputs))
    with fakes.installed(model), _tracing():
        out = _captured(fake_call)
        guards = _guards(out)
    graph: fx.GraphModule = out.backend_input.graph_module
    replayed = partial(out.forward_callable, extra_globals={**vars(builtins), **model_with_loss.__globals__})
    names, others = _names_of_inputs(graph, out.backend_input.example_inputs, fakes.names, fake_call[2:])
    _name_modules(graph, model, loss)
    outputs: Any = graph.graph.output_node().args[0]
    markers = [torch.empty(()) if isinstance(each, fx.Node) else each for each in outputs]
    number = {id(each): i for i, each in enumerate(markers)}
    twin = _twin(model)
    result = replayed(compiled_fn=lambda *_: list(markers))(*fake_call._replace(model=twin))
    flat, tree = pytree.tree_flatten(result[-1])
    order = [number[id(each)] for each in (*result[:-1], *flat) if id(each) in number]
    buffers = {name: number[id(b)] for name, b in twin.named_buffers(remove_duplicate=False) if id(b) in number}
    kept = [i for i in range(len(outputs)) if i not in order and i not in buffers.values()]
    return DynamoTrace(
        graph,
        names,
        (*order, *kept),
        buffers,
        others,
        tree,
        tuple("tensor" if id(each) in number else each for each in flat),
        frozenset(name for code in out.graph_capture_output.traced_code for name in code.co_names),
        torch.is_grad_enabled(),
        guards,
        replayed,
    )


class FakeWeights:
    """Fake CPU tensors for the parameters and buffers of a module, and for inputs."""

    def __init__(self, model: nn.Module) -> None:
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.by_id: dict[int, Tensor] = {}
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


# ---- torch's own parts ----------------------------------------------------------------------------------------------


@contextmanager
def _tracing() -> Iterator[None]:
    """Configure Dynamo: static shapes, recurrent layers, guards on hooks, calls of loggers ignored."""
    from torch._dynamo import config
    from torch._dynamo.utils import get_metrics_context

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
        with get_metrics_context(), config.patch(options):
            yield
    finally:
        torch.distributions.Distribution.set_default_validate_args(validates)


def _captured(call: TracedCall) -> Any:
    """Dynamo's capture of a call. Some libraries take a lock in their first call, which Dynamo does not trace: then a
    copy of the model runs once on fakes before."""
    from torch._dynamo.convert_frame import fullgraph_capture

    grad = torch.is_grad_enabled()
    try:
        return fullgraph_capture(model_with_loss, tuple(call))
    except Exception:
        torch._C._set_grad_enabled(grad)  # which a failed trace may leave off
        model_with_loss(*call._replace(model=_twin(call.model)))
        return fullgraph_capture(model_with_loss, tuple(call))
    finally:
        torch._C._set_grad_enabled(grad)


def _twin(model: nn.Module) -> nn.Module:
    """A copy of a module, of the same tensors."""
    return copied(model, {id(each): each for each in stored(model).values()})


def _guards(out: Any) -> Any:
    """The guards of a capture, but for those of tensors that belong to inputs and weights."""
    from torch._dynamo.hooks import Hooks
    from torch._dynamo.types import GuardFilterEntry
    from torch._dynamo.utils import dynamo_timed

    def wanted(entries: Sequence[GuardFilterEntry]) -> list[bool]:
        return [each.guard_type != "TENSOR_MATCH" or not COMPARED_ELSEWHERE.search(each.name) for each in entries]

    with dynamo_timed("build_guards"):
        made = out.graph_capture_output.build_guards(model_with_loss.__code__, hooks=Hooks(guard_filter_fn=wanted))
    return made.guard_manager


COMPARED_ELSEWHERE = re.compile(r"^(args|kwargs|targets)\b|_parameters|_buffers")
"""The sources of inputs and weights."""


def _names_of_inputs(
    graph: fx.GraphModule, examples: Sequence[Any], weights: Mapping[int, str], inputs: Any
) -> tuple[tuple[str, ...], dict[str, Tensor]]:
    """The names of a graph's placeholders, and the tensors that are no weights and no inputs."""
    leaves = {id(leaf): name for name, leaf in reversed(leaf_names(*inputs))}
    names, others = [], {}
    for node, example in zip((n for n in graph.graph.nodes if n.op == "placeholder"), examples, strict=True):
        name = leaves.get(id(example)) or weights.get(id(example))
        if name is None:
            name = _source_name(node)
            if not isinstance(example, Tensor):
                raise Error(f"{name} is a number that changes", expected="tensors", got=type(example).__name__)
            others[name] = example
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
            for name in ("example_value", "eager_input_vals"):
                node.meta.pop(name, None)
