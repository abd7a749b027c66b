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
import threading
import warnings
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from types import CodeType
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx, nn
from torch._guards import Guard
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from shardfx.ir.errors import Error

from ..canonical.batch_norms import plain_batch_norms
from ..canonical.mixed_precision import MixedPrecision, as_it_is, cast
from ..data_dependent import stored
from ..model_and_loss import leaf_names
from ..source_locations import LOSS, OWN, PREFIX, is_user_file
from .loss_module import Rebound
from .model_preparation import (
    CODE,
    INSTALLED,
    Scopes,
    empty_as,
    is_installed,
    python_state_restored,
    quiet_fake_tensors,
    stand_in,
)
from .routed_experts import experts_routed


class TracedCall(NamedTuple):
    """A call of a model and its loss, as Dynamo traces it: the local variables of :func:`model_with_loss`."""

    model: nn.Module
    loss: Callable[..., Any] | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    targets: tuple[Any, ...]
    output_dtype: torch.dtype | None = None


def model_with_loss(
    model: nn.Module,
    loss: Callable[..., Any] | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    targets: tuple[Any, ...],
    output_dtype: torch.dtype | None,
) -> tuple[Any, ...]:
    """The function that is traced: the loss, if there is one, and the model's results."""
    out = model(*args, **kwargs)
    if output_dtype is not None:
        out = cast(out, output_dtype)
    return (out,) if loss is None else (loss(out, *targets), out)


@dataclass(frozen=True)
class DynamoTrace:
    """A traced call.

    ``inputs`` are the names of the graph's placeholders: of parameters and buffers, inputs (``args.0``), or, of other
    tensors, their source (``model.cache``). Of the graph's outputs, ``results`` are the loss, the results, and what the
    code keeps, in this order; ``buffers`` replace buffers, by name; ``trained`` require gradients; ``numbers`` are no
    tensors. ``has_loss``: there is a loss; ``keeps``: the code keeps outputs. ``others`` are, by source, the tensors
    that are no weights and no inputs, and numbers that are inputs of the graph. ``tree`` and ``leaves`` are the model's
    results as a pytree; ``code_names`` the names in the traced code; ``gradients`` whether they were enabled; ``code``
    is what Dynamo generated around the graph. ``weights`` are outputs that are weights; ``methods`` those of the
    modules' classes, which are not guarded, ``scopes`` the globals that the code names, and ``guarded_numbers`` the
    guards of numbers.
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
    code: GeneratedCode
    weights: frozenset[int]
    methods: tuple[tuple[type, str, Any], ...]
    scopes: Scopes
    guarded_numbers: tuple[str, ...]

    def is_valid(self, call: TracedCall) -> bool:
        """Whether the guards hold for a call; the grad mode counts where the code asks for it."""
        if any(vars(kind).get(name) is not method for kind, name, method in self.methods):
            return False
        with self._mode(), without_function_modes(), _without_hooks_of_torch():
            return bool(self.guards.check(call._asdict()))

    def _mode(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.asks_for_gradients else torch.set_grad_enabled(self.gradients)

    @property
    def asks_for_gradients(self) -> bool:
        """Whether the code asks for the grad mode, or which tensors require a gradient."""
        return not ASKS_FOR_GRADIENTS.isdisjoint(self.code_names)

    def reasons(self, call: TracedCall) -> tuple[str, ...]:
        """The first guard that does not hold for a call, in Dynamo's words, then all others of numbers; none where all
        hold."""
        for kind, name, method in self.methods:
            if vars(kind).get(name) is not method:
                return (f"{kind.__name__}.{name} is that which was traced",)
        with self._mode(), without_function_modes(), _without_hooks_of_torch():
            found = self.guards.check_verbose(call._asdict()).verbose_code_parts
        first = [_IDS.sub("...", str(each).split("  #")[0].strip()) for each in found[:1]]
        changed = (guard for guard in self.guarded_numbers if first and _has_changed(guard, call))
        return tuple(dict.fromkeys([*first, *changed]))

    @property
    def count(self) -> int:
        """The number of tensors among the model's results; the code keeps further ones."""
        return sum(leaf == "tensor" for leaf in self.leaves)

    @property
    def kept(self) -> list[str]:
        """The names of results that are not the model's, but what its code keeps."""
        return [f"result {i}" for i in range(self.count, len(self.results) - self.has_loss)]

    def replay(self, call: TracedCall, run: Callable[[Mapping[str, Tensor]], Sequence[Tensor | None]]) -> Any:
        """The loss, if there is one, and the model's results, in the user's own objects, with the effects on Python
        state that eager code has, except that buffers stay the same tensors. ``run`` gives the tensors of ``results``
        for the current ``others``; None for what nobody asks for."""
        own = stored(call.model) if self.buffers else {}
        buffers = {name: own[name] for name in self.buffers}
        known = list[Sequence[Tensor | None]]()

        def compiled(*inputs: Any) -> list[Any]:
            named = zip(self.inputs, inputs, strict=False)  # of those that nothing is computed with there are none
            made = run({name: _like(self.others[name], each) for name, each in named if name in self.others})
            known.append(made[self.has_loss :])
            outputs: list[Any] = [*_outputs(self.graph)]
            for number, value in zip(self.numbers, self._numbers(inputs), strict=True):
                outputs[number] = value
            for number, tensor in reversed([*zip(self.results, made, strict=True)]):  # a result may be the loss itself
                outputs[number] = NOTHING if tensor is None else tensor
            for name, number in self.buffers.items():
                outputs[number] = buffers[name]
            return outputs

        results = self.code(compiled, call)
        for name, buffer in buffers.items():
            path, _, leaf = name.rpartition(".")
            call.model.get_submodule(path)._buffers[leaf] = buffer
        if not self.weights:
            return results
        flat, tree = pytree.tree_flatten(results[-1])
        tensors = iter([*zip(self.results[self.has_loss :], known.pop(), strict=True)])
        for i, leaf in enumerate(self.leaves):
            number, tensor = next(tensors) if leaf == "tensor" else (None, None)
            flat[i] = tensor if number in self.weights else flat[i]
        return (*results[:-1], pytree.tree_unflatten(flat, tree))

    def _numbers(self, inputs: Sequence[Any]) -> list[Any]:
        """The graph's outputs that are numbers."""
        if not self.numbers:
            return []
        nodes = [node for node in self.graph.graph.nodes if node.op == "placeholder"]
        env = {node: each for node, each in zip(nodes, inputs, strict=False) if not isinstance(each, Tensor)}
        for node in self.graph.graph.nodes:
            if node.op == "call_function" and node.meta["number"]:
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


ASKS_FOR_GRADIENTS = frozenset(("is_grad_enabled", "requires_grad", "grad_fn", "is_leaf"))
"""Names in code that query whether gradients are enabled."""
_IDS = re.compile(r"\b\d{9,}\b")


def trace_call(
    call: TracedCall,
    changing: Collection[str] = (),
    compute: MixedPrecision | None = None,
    trainable: Collection[str] | None = None,
    loss_name: str = LOSS,
    known: Collection[str] | None = None,
) -> DynamoTrace:
    """Trace a call of a model on any device, with inputs that are real, fake or on ``meta``. The model is not changed.

    Args:
        changing: sources of numbers (:func:`changing_number`) that are to be inputs of the graph.
        compute: the dtype in which parameters and inputs are traced.
        trainable: the parameters that require a gradient; None: those that do.
        loss_name: the prefix of names of the loss's own parameters and buffers, if it is a module.
        known: the parameters and buffers that are inputs by name; None: all.

    Dynamo's generated code runs once to find out which output is what; Python state is restored afterwards.

    Raises:
        Error: the code cannot be traced as one graph.
    """
    compute = compute or MixedPrecision()
    model, loss = call.model, call.loss
    _reject_bounded(model)
    fakes = FakeWeights(model, loss, loss_name, compute, trainable, known)
    args, kwargs = fakes.inputs((call.args, call.kwargs), compute.dtype)
    fake_call = call._replace(args=args, kwargs=kwargs, targets=fakes.inputs(call.targets, None))
    as_they_are = compute.kept(model) if compute.dtype is not None else []
    with fakes.installed(model, loss), fakes.numbers(fake_call, changing), _tracing(changing), ExitStack() as stack:
        routed = stack.enter_context(experts_routed(model))
        for module in as_they_are:
            stack.enter_context(as_it_is(module, compute.dtype or torch.float32))
        out = _captured(fake_call)
        paths = [path for path, each in model.named_modules() if each in as_they_are or each in routed]
        guards, guarded_numbers = _guards(out, changing, fakes, paths)
    graph: fx.GraphModule = out.backend_input.graph_module
    code = GeneratedCode(out)
    names, others = _names_of_inputs(graph, out.backend_input.example_inputs, fakes, fake_call[2:5])
    outputs = _outputs(graph)
    _mark_numbers(graph)
    made = {i: each for i, each in enumerate(outputs) if isinstance(each, fx.Node)}
    tensors = {i: _example(each) for i, each in made.items() if not each.meta["number"]}
    _name_modules(graph, model, loss)
    markers = [torch.empty(()) if i in tensors else 0 for i in range(len(outputs))]
    known_outputs = {id(markers[i]): i for i in tensors}
    own = stored(model)
    of_weights = {id(each): name for name, each in reversed([*own.items()])}
    inputs = reversed([*leaf_names(*fake_call[2:5]), *others.items()])
    placeholders = (node for node in graph.graph.nodes if node.op == "placeholder")
    places = dict(zip(names, placeholders, strict=True))
    given = known_outputs, of_weights | {id(leaf): name for name, leaf in inputs}, graph, places
    names_in_code = frozenset(name for code in out.graph_capture_output.traced_code for name in _names_in(code))
    methods = _methods(model, out.graph_capture_output.traced_code)
    closures = {f"{kind}.{name}": each for kind, name, each in methods if not is_installed(kind)}
    scopes = [*_scopes(out, names_in_code), (closures, [*closures])]
    with python_state_restored(model, loss, scopes):
        result = code(lambda *_: list(markers), fake_call)
        flat, tree = pytree.tree_flatten(result[-1])
        order = [_output_number(each, *given) for each in (*result[:-1], *flat) if isinstance(each, Tensor)]
        weights = frozenset(number for of, number in known_outputs.items() if of in of_weights)
        now = dict(model.named_buffers(remove_duplicate=False))
        there = own if known is None else known
        buffers = {n: _output_number(b, *given) for n, b in now.items() if n in there and n in own and b is not own[n]}
        kept = [i for i in sorted(tensors) if i not in order and i not in buffers.values()]
        leaves = tuple("tensor" if isinstance(each, Tensor) else each for each in flat)
        del result, flat
        keeps = bool(kept) or any(sys.getrefcount(markers[i]) > UNKEPT for i in order if i in tensors)
    return DynamoTrace(
        graph,
        tuple(places),
        (*order, *kept),
        buffers,
        frozenset(i for i, each in tensors.items() if each.requires_grad),
        loss is not None,
        keeps,
        others,
        tuple(i for i in made if i not in tensors),
        tree,
        leaves,
        names_in_code,
        torch.is_grad_enabled(),
        guards,
        code,
        weights,
        methods,
        scopes,
        guarded_numbers,
    )


def _scopes(out: Any, names: Collection[str]) -> Scopes:
    """The globals of the user's modules that code names, but for modules, classes and functions."""
    modules = (sys.modules.get(name) for name in {*out.graph_capture_output.import_sources.values()})
    files = ((each, getattr(each, "__file__", None) or "<") for each in modules if each is not None)
    own = (vars(each) for each, file in files if is_user_file(file) and not file.startswith(INSTALLED))
    return [(scope, [n for n in names if n in scope and not isinstance(scope[n], (type, *CODE))]) for scope in own]


def _methods(model: nn.Module, codes: Collection[CodeType]) -> tuple[tuple[type, str, Any], ...]:
    """The traced methods of the classes of modules, which are not guarded (``torch.compile`` replaces
    ``Module.__init__``)."""
    traced = {*codes}
    kinds = {base: None for module in model.modules() for base in type(module).__mro__ if base is not object}
    every = ((kind, name, value) for kind in kinds for name, value in vars(kind).items() if not name.startswith("__"))
    return tuple(each for each in every if getattr(each[2], "__code__", None) in traced)


def _reject_bounded(model: nn.Module) -> None:
    """Refuse a ``deque`` with a maximum length, of which Dynamo (2.11 to 2.15) does not drop elements.

    Raises:
        Error: naming the attribute.
    """
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, deque) and value.maxlen is not None:
                raise Error(
                    "Dynamo does not follow a deque with a maximum length",
                    where=f"{path}.{name}".lstrip("."),
                    expected="a list, or a deque without maxlen",
                    got=f"deque(maxlen={value.maxlen})",
                    remedy="a list that is cut: self.kept = [*self.kept, h][-n:]",
                )


class GeneratedCode:
    """Dynamo's generated code around a graph, which a given function computes."""

    def __init__(self, out: Any) -> None:
        self._here = threading.local()  # copies of a parallel module share the code
        known = {**vars(builtins), **model_with_loss.__globals__}
        self._function = out.forward_callable(compiled_fn=lambda *inputs: self._here.run(*inputs), extra_globals=known)

    def __call__(self, run: Callable[..., Any], call: TracedCall) -> Any:
        before, self._here.run = getattr(self._here, "run", None), run
        try:
            return self._function(*call)
        finally:
            self._here.run = before


def _output_number(
    tensor: Tensor, known: dict[int, int], names: Mapping[int, str], graph: fx.GraphModule, places: dict[str, fx.Node]
) -> int:
    """The number of a tensor among a graph's outputs. An input or weight that a model gives or keeps itself, of which
    ``names`` has the name, becomes one; ``places`` are the placeholders.

    Raises:
        Error: the code neither makes nor reads it.
    """
    if id(tensor) in known:
        return known[id(tensor)]
    name = names.get(id(tensor))
    if name is None:
        raise Error(
            "the model gives a tensor that it neither computes nor is passed",
            expected="what it computes, its inputs, parameters and buffers",
            got=f"one of shape {tuple(tensor.shape)}",
            remedy="register it as a buffer",
        )
    if name not in places:  # nothing is computed with it
        with graph.graph.inserting_before(next(node for node in graph.graph.nodes if node.op != "placeholder")):
            places[name] = graph.graph.placeholder(f"given_{len(places)}")
    outputs = _outputs(graph)
    graph.graph.output_node().args = ((*outputs, places[name]),)
    known[id(tensor)] = len(outputs)
    return len(outputs)


def _names_in(code: CodeType) -> Sequence[str]:
    """The names in code, but for that with which modules call ``forward``."""
    return () if code.co_filename.startswith(OWN) or code.co_filename == nn.modules.module.__file__ else code.co_names


@contextmanager
def without_function_modes() -> Iterator[None]:
    """Within, no ``TorchFunctionMode`` is active (``torch.set_default_device``): guards compare them."""
    modes = []
    while torch._C._len_torch_function_stack():
        modes.append(torch._C._pop_torch_function_stack())
    try:
        yield
    finally:
        for mode in reversed(modes):
            torch._C._push_on_torch_function_stack(mode)


NOTHING = torch.empty(())
"""In place of outputs that nobody asks for."""


def _outputs(graph: fx.GraphModule) -> Sequence[Any]:
    return graph.graph.output_node().args[0]  # type: ignore[return-value]


def _example(output: Any) -> Any:
    return output.meta.get("example_value") if isinstance(output, fx.Node) else None


UNKEPT = sys.getrefcount((_alone := [object()])[0])
"""The references to an element of a list that nothing else keeps."""


class FakeWeights:
    """Fake CPU tensors for the parameters and buffers of a module and its loss, and for inputs."""

    def __init__(
        self,
        model: nn.Module,
        loss: object = None,
        loss_name: str = LOSS,
        compute: MixedPrecision | None = None,
        trainable: Collection[str] | None = None,
        known: Collection[str] | None = None,
    ) -> None:
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.by_id: dict[int, Tensor] = {}
        self.of_numbers: dict[int, Tensor] = {}
        """The numbers that fakes stand for."""
        self.names: dict[int, str] = {}
        """The first name of each fake weight."""
        self._inputs: list[Tensor] = []
        kept = compute.kept_parameters(model) if compute else ()
        weights = stored(model)
        if isinstance(loss, nn.Module):
            weights |= {f"{loss_name}.{name}": tensor for name, tensor in stored(loss).items()}
        for name, tensor in weights.items():
            if id(tensor) in self.by_id or (known is not None and name not in known):
                continue
            casts = isinstance(tensor, nn.Parameter) and tensor not in kept
            fake = self._fake(tensor, compute.dtype if compute is not None and casts else None)
            made = stand_in(tensor, fake, None if trainable is None else name in trainable)
            self.by_id[id(tensor)] = made
            self.names[id(made)] = name

    def _fake(self, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        dtype = dtype if dtype is not None and tensor.dtype.is_floating_point else tensor.dtype
        with torch.no_grad(), self.mode:
            return empty_as(tensor, "cpu", dtype)

    def inputs(self, tree: Any, dtype: torch.dtype | None) -> Any:
        """Inputs with fakes in place of tensors, floating ones in a ``dtype``: one for each place."""

        def fake(tensor: Tensor) -> Tensor:
            self._inputs.append(self._fake(tensor, dtype).requires_grad_(tensor.requires_grad))
            return self._inputs[-1]

        return pytree.tree_map_only(Tensor, fake, tree)

    @property
    def ids(self) -> set[int]:
        """The ids of the fakes."""
        return {*self.names, *map(id, self._inputs)}

    @contextmanager
    def installed(self, model: nn.Module, loss: object) -> Iterator[None]:
        """Replace the parameters and buffers of a module and its loss by the fakes, within the context."""
        with ExitStack() as stack:
            for module in (*model.modules(), *(loss.modules() if isinstance(loss, nn.Module) else ())):
                places: tuple[dict[str, Any], ...] = module._parameters, module._buffers
                for tensors in places:
                    own = {name: self.by_id[id(each)] for name, each in tensors.items() if id(each) in self.by_id}
                    stack.enter_context(mock.patch.dict(tensors, own))
                if isinstance(module, nn.RNNBase):  # which keeps a list of its parameters
                    flat = [self.by_id.get(id(each), each) for each in module._flat_weights]
                    stack.enter_context(mock.patch.object(module, "_flat_weights", flat))
            stack.enter_context(loss.bound() if isinstance(loss, Rebound) else nullcontext())
            yield

    @contextmanager
    def numbers(self, call: TracedCall, sources: Collection[str]) -> Iterator[None]:
        """Replace floating attributes of a model and its loss, and globals, by fakes within the context."""
        with ExitStack() as stack:
            for source in sources:
                path, _, name = source.rpartition(".")
                holder = _resolved(path, call)
                if isinstance(value := getattr(holder, name), float):
                    made = self._fake(number := _as_tensor(value))
                    self.of_numbers[id(made)] = number
                    stack.callback(setattr, holder, name, value)
                    setattr(holder, name, made)
            yield


# ---- torch's own parts ----------------------------------------------------------------------------------------------


class UntracedByDynamo(Error):
    """Dynamo does not trace what torch.export may: what a tensor's content decides, be it made of nothing
    (``torch.arange(4).sum() > 3``), an intermediate that is made to require a gradient, one tensor that is passed twice
    to an autograd function, ``checkpoint_sequential``, code of an installed library, and of a module that cannot be
    imported (of ``runpy``)."""


TAKEN_BY_EXPORT = re.compile("data.dependent|requires_grad|duplicate tensor input|checkpoint_sequential", re.IGNORECASE)


LOGS = [getattr(logging.Logger, name) for name in ("debug", "info", "warning", "error", "exception", "critical", "log")]
BY_EXPORT = "Hints(guard=True) captures it by torch.export, for which Python state is as it is when it plans"


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
        "ignore_logging_functions": {*config.ignore_logging_functions, *filter(callable, once), *LOGS},
    }
    if hasattr(config, "trace_autograd_ops"):  # from torch 2.12 on
        options["trace_autograd_ops"] = True
    with (
        get_metrics_context(),
        config.patch(options),
        compiler_config.patch(dynamic_sources=",".join(changing)),  # type: ignore[attr-defined]
        mock.patch.object(torch.distributions.Distribution, "_validate_args", False),
        without_function_modes(),
        _without_hooks_of_torch(),
        plain_batch_norms(),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        with _disable_current_modes(), quiet_fake_tensors():
            yield


@contextmanager
def _without_hooks_of_torch() -> Iterator[None]:
    """Within, the forward hooks of all modules that torch itself installs (``FlopCounterMode``) are not there."""
    every = nn.modules.module
    if not every._global_forward_hooks and not every._global_forward_pre_hooks:
        yield
        return
    with ExitStack() as stack:
        for hooks in (every._global_forward_hooks, every._global_forward_pre_hooks):
            stack.enter_context(mock.patch.dict(hooks, users_hooks(hooks), clear=True))
        yield


def users_hooks(hooks: Mapping[int, Any]) -> dict[int, Any]:
    """The hooks that are not torch's own."""
    return {key: hook for key, hook in hooks.items() if not str(hook.__module__).startswith("torch.")}


def _captured(call: TracedCall) -> Any:
    """Dynamo's capture of a call. In their first call, models of transformers install hooks under a lock, which Dynamo
    does not trace: they are installed before."""
    from torch._dynamo.convert_frame import fullgraph_capture
    from torch._dynamo.exc import TorchDynamoException
    from torch.fx.experimental.symbolic_shapes import PendingUnbackedSymbolNotFound

    hooks: Any = sys.modules.get("transformers.utils.output_capturing")
    for module in call.model.modules() if hooks is not None else ():
        if hooks._CAN_RECORD_REGISTRY.get(module):
            hooks.maybe_install_capturing_hooks(module)
    grad = torch.is_grad_enabled()
    try:
        return fullgraph_capture(model_with_loss, tuple(call))
    except (TorchDynamoException, PendingUnbackedSymbolNotFound, ImportError) as error:
        stack = getattr(error, "real_stack", None)
        why = str(error).partition("from user code")[0]
        of_library = stack is not None and len(stack) > 0 and stack[-1].filename.startswith(INSTALLED)
        taken = of_library or isinstance(error, ImportError) or TAKEN_BY_EXPORT.search(why)
        kind = UntracedByDynamo if taken else Error
        raise kind(
            "Dynamo cannot trace the model and its loss as one graph",
            where=f"{stack[-1].filename}:{stack[-1].lineno}  {stack[-1].line}" if stack else None,
            expected="code that torch.compile(fullgraph=True) takes",
            got=str(error).splitlines()[0],
            remedy=BY_EXPORT,
        ) from error
    finally:
        torch._C._set_grad_enabled(grad)  # which a failed trace may leave off


_NUMBER = re.compile(
    r"((?:L\['(?:model|loss)'\]|G\['__import_\w+'\])(?:\.\w+|\['\w+'\]|\[\d+\])*\.\w+) == (-?[\d.]+(?:e-?\d+)?)$"
)
_STEP = re.compile(r"\.(\w+)|\['(\w+)'\]|\[(\d+)\]")


def changing_number(reason: str) -> str:
    """The source of an attribute whose number has changed, by the guard that says so; empty where it is no number."""
    found = _NUMBER.match(reason)
    return found[1] if found else ""


def _resolved(source: str, call: TracedCall) -> Any:
    """The object of a source (``L['model'].layers[0].beta``); modules are among our globals, where Dynamo puts them."""
    found: Any = call._asdict() if source.startswith("L") else globals()
    for name, key, index in _STEP.findall(source):
        found = getattr(found, name) if name else found[key or int(index)]
    return found


def _has_changed(guard: str, call: TracedCall) -> bool:
    """Whether the guard of a number does not hold."""
    source, _, number = guard.rpartition(" == ")
    return bool(_resolved(source, call) != float(number))


def _guards(
    out: Any, changing: Collection[str], fakes: FakeWeights, kept: Collection[str]
) -> tuple[Any, tuple[str, ...]]:
    """The guards of a capture, and the texts of those of numbers. Left out are those of tensors that are inputs and
    weights, or stand for numbers, and of the hooks and ``forward`` of modules (``kept``) that traces alone have."""
    from torch._dynamo.utils import dynamo_timed

    placeholders = (n for n in out.backend_input.graph_module.graph.nodes if n.op == "placeholder")
    examples = zip(placeholders, out.backend_input.example_inputs, strict=True)
    known = {_source_text(node) for node, example in examples if id(example) in fakes.ids}
    known |= {*changing}

    def wanted(guard: Guard) -> bool:
        holder, *called = CALLED.split(guard.name, maxsplit=1)
        if called and kept and ".".join(re.findall(r"_modules\['([^']+)'\]", holder)) in kept:
            return False
        of_tensor = guard.create_fn_name() == "TENSOR_MATCH"
        return not (of_tensor and (guard.name in known or COMPARED_ELSEWHERE.search(guard.name)))

    capture = out.graph_capture_output
    guards = capture.output_graph.guards
    guards.inner = type(guards.inner)(filter(wanted, guards.inner))
    with dynamo_timed("build_guards"):
        made = capture.build_guards(model_with_loss.__code__)
    capture.output_graph.local_scope.clear()  # which would keep the model alive
    texts = (text for guard in guards.inner for text in guard.code_list or ())
    return made.guard_manager, tuple(dict.fromkeys(filter(changing_number, texts)))


CALLED = re.compile(r"\._forward_|\.forward\b")
COMPARED_ELSEWHERE = re.compile(
    r"^L\['(args|kwargs|targets)'\](\[[^]]*\])*$|(_parameters|_buffers)\['\w+'\]$|_flat_weight\w+\[\d+\](\(\))?$"
)
"""The sources of inputs and weights."""


def _names_of_inputs(
    graph: fx.GraphModule, examples: Sequence[Any], fakes: FakeWeights, inputs: Any
) -> tuple[tuple[str, ...], dict[str, Tensor]]:
    """The names of a graph's placeholders, and the tensors that are no weights and no inputs."""
    leaves = {id(leaf): name for name, leaf in reversed(leaf_names(*inputs))}
    names, others = [], {}
    for node, example in zip((n for n in graph.graph.nodes if n.op == "placeholder"), examples, strict=True):
        name = leaves.get(id(example)) or fakes.names.get(id(example))
        node.meta["number"] = not isinstance(example, Tensor) or id(example) in fakes.of_numbers
        if name is None:
            name = _source_name(node)
            if not isinstance(example, Tensor):
                example = _as_tensor(example.node.hint)
            others[name] = fakes.of_numbers.get(id(example), example)
        names.append(name)
    return tuple(names), others


def _source_name(node: fx.Node) -> str:
    """The source of a tensor in the user's code: ``model.cache``, ``globals.TABLE``."""
    return re.sub(r"^([LG])\['(\w+)'\]", lambda m: m[2] if m[1] == "L" else f"globals.{m[2]}", _source_text(node))


def _source_text(node: fx.Node) -> str:
    source = getattr(node, "_dynamo_source", None)
    named = node.name if source is None else source.name
    return named if isinstance(named, str) else named()  # a method before torch 2.12


NUMBERS = (int, float, torch.SymInt, torch.SymFloat, torch.SymBool)


def _mark_numbers(graph: fx.GraphModule) -> None:
    """Mark the nodes that are numbers in the user's code: also where a fake tensor stands for a float that changes."""
    for module in graph.modules():
        for node in module.graph.nodes if isinstance(module, fx.GraphModule) else ():
            used = [each.meta["number"] for each in node.all_input_nodes]
            computed = node.op == "call_function" and bool(used) and all(used)
            of_numbers = computed and getattr(node.target, "__module__", "") == "_operator"
            of_code = isinstance(_example(node), NUMBERS)
            node.meta["number"] = node.meta.get("number", False) or of_numbers or of_code


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
