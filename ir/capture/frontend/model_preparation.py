"""Preparation of models and example inputs: accepted kinds, refusals, copies, and fakes on the CPU."""

from __future__ import annotations

import builtins
import copy
import logging
import sys
import sysconfig
import types
import warnings
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from traceback import walk_tb
from typing import Any, NoReturn, TypeVar
from unittest import mock

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from shardfx.ir.errors import Error
from shardfx.ir.graph import Node

Copied = TypeVar("Copied")
Made = TypeVar("Made", bound=torch.Tensor)


def as_module(model: object) -> nn.Module:
    """The module of a model: an ``nn.Module`` (an ``fx.GraphModule`` is one), or a ``torch.export.ExportedProgram``.

    Raises:
        Error: it is something else, an exported program whose shapes are not all known, or a module with something
            that a program would leave out.
    """
    if isinstance(model, torch.export.ExportedProgram):
        if model.range_constraints:
            raise Error(
                "this ExportedProgram has dynamic shapes",
                expected="a program exported without dynamic_shapes=",
                got=", ".join(f"{name} in {bounds}" for name, bounds in model.range_constraints.items()),
                remedy="export it again for the shapes of the global batch",
            )
        module = model.module()
        for name in ("train", "eval"):  # torch refuses to switch: what was exported is the same in both modes
            setattr(module, name, types.MethodType(_stay, module))
        return module
    if not isinstance(model, nn.Module):
        raise Error(
            "this is no model",
            expected="an nn.Module, an fx.GraphModule, or a torch.export.ExportedProgram",
            got=type(model).__name__,
            remedy=_remedy(model),
        )
    reject_module(model)
    return model


def _stay(module: nn.Module, mode: bool = True) -> nn.Module:
    return module


def _remedy(model: object) -> str:
    if isinstance(model, fx.Graph):
        return "fx.GraphModule(root, graph) makes a module of a graph"
    if isinstance(model, type):
        return f"make one: {model.__name__}(...)"
    return "wrap it in an nn.Module whose forward calls it" if callable(model) else "pass the module itself"


def copied(thing: Copied, memo: Mapping[int, object]) -> Copied:
    """A deep copy, with tensors replaced by ``memo``; what cannot be copied (a lock, an open file) is shared."""
    shared = dict(memo)
    with quiet_copies():
        while True:
            try:
                return copy.deepcopy(thing, dict(shared))
            except TypeError as error:
                frames = [frame for frame, _ in walk_tb(error.__traceback__) if frame.f_code is copy.deepcopy.__code__]
                alone = frames[-1].f_locals["x"]
                if isinstance(alone, nn.Module):
                    raise
                shared[id(alone)] = alone


def without_weights(model: nn.Module) -> nn.Module:
    """A copy of the module tree on ``meta``: tied weights stay tied, and tensors that are no weights are the same."""
    memo: dict[int, object] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        memo[id(tensor)] = stand_in(tensor, empty_as(tensor, "meta"))
    return shared_copy(model, memo)


def empty_as(tensor: torch.Tensor, device: str, dtype: torch.dtype | None = None) -> torch.Tensor:
    """An empty tensor that lies as another one."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype or tensor.dtype, device=device)


def stand_in(tensor: torch.Tensor, made: torch.Tensor, trains: bool | None = None) -> torch.Tensor:
    """The tensor ``made`` in the place of another one: a parameter if that is one, with its marks, and training as it
    does unless said."""
    trains = tensor.requires_grad if trains is None else trains
    if isinstance(tensor, nn.Parameter):
        return marked(nn.Parameter(made, trains), tensor)
    return marked(made.requires_grad_(trains), tensor)


def shared_copy(model: nn.Module, memo: dict[int, object] | None = None) -> nn.Module:
    """A copy of a module with Python state of its own, of the same tensors but for those in ``memo``."""
    with mock.patch.object(torch.Tensor, "__deepcopy__", lambda tensor, memo: memo.get(id(tensor), tensor)):
        return copied(model, {id(each): each for each in (*model.parameters(), *model.buffers())} | (memo or {}))


Scopes = Sequence[tuple[dict[str, Any], Collection[str]]]
"""The globals of modules, and the names of them that code reads or sets."""


@contextmanager
def python_state_restored(model: nn.Module, loss: object = None, scopes: Scopes = ()) -> Iterator[None]:
    """Restore the attributes of a module and its loss, what closures and these globals are, and the containers and
    objects in all of these, after the context; within, iterators are copies."""
    found: dict[int, tuple[Any, Any]] = {}
    for module in (*model.modules(), *(loss.modules() if isinstance(loss, nn.Module) else ())):
        _note_state(vars(module), found)
    _note_state(loss, found)
    before = [(scope, {name: scope[name] for name in names if name in scope}) for scope, names in scopes]
    for _, values in before:
        for value in values.values():
            _note_state(value, found)
    for holder, was in found.values():
        for key, value in was.items() if isinstance(was, dict) else enumerate(was if isinstance(was, list) else ()):
            if isinstance(value, Iterator):
                holder[key] = copied(value, {})
    try:
        yield
    finally:
        for scope, values in before:
            scope.update(values)
        for holder, was in found.values():
            if isinstance(holder, types.CellType):
                holder.cell_contents = was
            elif isinstance(holder, list):
                holder[:] = was
            elif isinstance(holder, dict):
                for key in holder.keys() - was.keys():
                    del holder[key]
                for key in (key for key, value in was.items() if holder.get(key, holder) is not value):
                    holder[key] = was[key]  # a frozen one was not changed
            elif isinstance(holder, (set, deque)):
                holder.clear()
                (holder.extend if isinstance(holder, deque) else holder.update)(was)
            else:
                for name, value in was.items():
                    object.__setattr__(holder, name, value)


def _note_state(value: Any, found: dict[int, tuple[Any, Any]]) -> None:
    """Note the contents of a container, of an object or of a closure, and of those in it."""
    for cell in getattr(value, "__closure__", None) or () if isinstance(value, types.FunctionType) else ():
        if id(cell) not in found and (content := next(_contents(cell), found)) is not found:
            found[id(cell)] = cell, content
            _note_state(content, found)
    if isinstance(value, types.MethodType):  # a loss that is one
        own = value.__self__
        for each in own.modules() if isinstance(own, nn.Module) else ():
            _note_state(vars(each), found)
        _note_state(own, found)
    if isinstance(value, (torch.Tensor, nn.Module, type, *CODE, *PLAIN)) or id(value) in found:
        return
    if _is_of_library(value) or ((isinstance(value, dict) and "__builtins__" in value) or value is vars(builtins)):
        return
    slots = [n for n in getattr(type(value), "__slots__", ()) if isinstance(n, str) and hasattr(value, n)]
    if isinstance(value, (list, dict, set, deque)):
        found[id(value)] = value, (dict if isinstance(value, dict) else set if isinstance(value, set) else list)(value)
    elif slots and not isinstance(value, tuple):
        found[id(value)] = value, {name: getattr(value, name) for name in slots}
        for name in slots:
            _note_state(getattr(value, name), found)
    if isinstance(value, (list, dict, set, deque, tuple)):
        for each in [*(value.values() if isinstance(value, dict) else value)]:
            _note_state(each, found)
    elif isinstance(inside := getattr(value, "__dict__", None), dict):
        _note_state(inside, found)


def _contents(cell: types.CellType) -> Iterator[Any]:
    """The content of a closure's cell, if it has any."""
    with suppress(ValueError):
        yield cell.cell_contents


def _is_of_library(value: object) -> bool:
    """Whether an object is of torch or of Python's library (a logger, a lock), which is no state of a model."""
    kind = type(value).__module__.partition(".")[0]
    return kind == "torch" or (kind in sys.stdlib_module_names and kind not in HOLDERS)


@cache
def is_installed(kind: type) -> bool:
    """Whether a class is of an installed library: what its objects refer to may be anything."""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None) or ""
    return file.startswith(INSTALLED)


INSTALLED = sysconfig.get_path("purelib"), sysconfig.get_path("platlib")
HOLDERS = ("builtins", "collections", "types", "argparse", "itertools")


def attributes_of(model: nn.Module) -> dict[str, str]:
    """The attributes of modules by path, as texts: equal where the numbers and texts in them are, and other objects are
    the same."""
    known: dict[int, str] = {}
    return {
        f"{path}.{name}".lstrip("."): _as_text(value, known)
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if name not in STATE
    }


def _as_text(value: Any, known: dict[int, str]) -> str:
    if isinstance(value, PLAIN):
        return repr(value)
    if id(value) not in known:
        content = hash(value.tobytes()) if hasattr(value, "tobytes") else ""  # of an array
        known[id(value)] = f"{type(value).__name__} {id(value)} {content}"  # also within itself
        inside = value
        if not isinstance(value, (torch.Tensor, nn.Module, type, list, tuple, set, deque, dict, *CODE)):
            inside = None if _is_of_library(value) else getattr(value, "__dict__", None)
        if isinstance(inside, dict):
            known[id(value)] = str({_as_text(k, known): _as_text(each, known) for k, each in inside.items()})
        elif isinstance(inside, (list, tuple, set, deque)):
            known[id(value)] = str([_as_text(each, known) for each in inside])
    return known[id(value)]


STATE = frozenset(vars(nn.Module()))
PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, range, slice)
CODE = types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.ModuleType


def marked(made: Made, tensor: torch.Tensor) -> Made:
    """A tensor with the attributes that a script gave to another one (``p.no_weight_decay = True``)."""
    marks = marks_of(tensor)
    vars(made).update(marks)
    if isinstance(made, FakeTensor) and marks:
        setattr(made, MARKS, marks)
    return made


def marks_of(tensor: torch.Tensor) -> dict[str, Any]:
    """The attributes that a script gave to a tensor."""
    return dict(vars(tensor)) if type(tensor) in (torch.Tensor, nn.Parameter) else vars(tensor).get(MARKS, {})


MARKS = "_marks_of_a_script"
"""The attribute of a fake tensor that has those that a script gave to it."""


@contextmanager
def quiet_copies() -> Iterator[None]:
    """Ignore the warnings of torch about copies of its own ``LeafSpec``, and of Python 3.12 about iterators."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*LeafSpec", FutureWarning)
        warnings.filterwarnings("ignore", "Pickle, copy, and deepcopy support", DeprecationWarning)
        yield


def on_cpu(
    model: nn.Module, tensors: Sequence[torch.Tensor], stack: ExitStack, real: bool = False
) -> tuple[nn.Module, list[torch.Tensor]]:
    """Move a model and examples that are not on the CPU there: as fakes, or with ``real`` as copies.

    So what is captured names no device, and is the same for all; on ``meta`` some ops have no autograd kernel. An
    example that is given twice, or is a parameter or buffer of the model, is another tensor than that: inputs are what
    stands in a place, whatever else it is.

    Raises:
        Error: they are to be real, and some are fake or on ``meta``.
    """
    everything = [*model.parameters(), *model.buffers(), *tensors]
    mode = next((t.fake_mode for t in everything if isinstance(t, FakeTensor)), None)
    seen = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    distinct = []
    for tensor in tensors:
        other = id(tensor) in seen or tensor.is_inference()
        distinct.append(tensor.detach().clone().requires_grad_(tensor.requires_grad) if other else tensor)
        seen.add(id(tensor))
    if real:
        _reject_empty(model, tensors)
        distinct = [t.detach().requires_grad_(t.requires_grad) for t in distinct]
    if mode is None and all(t.device.type == "cpu" for t in everything):
        return model, distinct
    mode = mode or FakeTensorMode(allow_non_fake_inputs=True)

    def there(tensor: torch.Tensor) -> torch.Tensor:
        if real or tensor.device.type == "cpu":
            return stand_in(tensor, tensor.detach().cpu()) if real else tensor
        with mode:
            return stand_in(tensor, empty_as(tensor, "cpu"))

    memo: dict[int, object] = {id(t): there(t) for t in (*model.parameters(), *model.buffers())}
    distinct = [there(t) for t in distinct]
    model = copied(model, memo)
    if not real:
        stack.enter_context(mode)
    return model, distinct


def without_overlap(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy where its elements overlap in memory: torch traces no content of such."""
    if tensor.layout is not torch.strided:
        return tensor
    if not any(n > 1 and not stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        return tensor
    return tensor.detach().contiguous().requires_grad_(tensor.requires_grad)


@contextmanager
def quiet_fake_tensors() -> Iterator[None]:
    """Within, torch does not log what fake tensors refuse, which is an error anyway."""
    names = "torch._subclasses.fake_tensor", "torch.fx.experimental.symbolic_shapes"
    with ExitStack() as stack:
        for name in names:
            stack.enter_context(mock.patch.object(logging.getLogger(name), "disabled", True))
        yield


@contextmanager
def without_onednn() -> Iterator[None]:
    """Within, torch calls no op of oneDNN (an LSTM layer as one), which other devices do not have."""
    was = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(was)


def _reject_empty(model: nn.Module, tensors: Sequence[torch.Tensor]) -> None:
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    named |= {f"example input {i}": tensor for i, tensor in enumerate(tensors)}
    empty = next((name for name, t in named.items() if t.is_meta or isinstance(t, FakeTensor)), None)
    if empty is not None:
        raise Error(
            f"{empty!r} has no content to decide anything by",
            where="Hints(guard=True)",
            expected="real weights and real example inputs",
            got="a fake tensor, or one on meta",
            remedy="initialise the model, and give a batch of real data as examples",
        )


PARAMETER_HOOKS = {"_backward_hooks": "a hook", "_post_accumulate_grad_hooks": "a post-accumulate hook"}


def reject_module(model: nn.Module) -> None:
    """Refuse a module that has something which a program would lose.

    Raises:
        Error: a wrapper that is parallel, a ScriptModule, hooks on gradients, a parameter that is computed, sharded
            already, or has no shape yet.
    """
    reject_backward_hooks(model)
    for path, module in model.named_modules():
        where = f"{path or 'the model'} ({type(module).__name__})"
        if isinstance(module, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            raise Error(
                f"a {type(module).__name__} is parallel already",
                where=where,
                expected="the model that it was made of",
                got=type(module).__name__,
                remedy="parallelize(model.module, ...), and leave the wrapper out: shard the batch by a hint, "
                'specs={"args.0": "dp, -"}',
            )
        if isinstance(module, torch.jit.ScriptModule):
            raise Error(
                "a ScriptModule cannot be captured",
                where=where,
                expected="the nn.Module that it was made of",
                got=type(module).__name__,
                remedy="parallelize the module itself, and leave torch.jit.script out",
            )
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor) and value.grad_fn is not None:
                raise Error(
                    f"{name!r} of a module is computed outside of forward",
                    where=where,
                    expected="parameters, buffers, and what forward computes of them",
                    got=f"a tensor made by {type(value.grad_fn).__name__}",
                    remedy="compute it in forward; for weight_norm see torch.nn.utils.parametrizations",
                )
    for name, parameter in model.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise Error(
                f"{name!r} has no shape yet",
                where=name,
                expected="parameters with shapes",
                got="one of a lazy module that was not called",
                remedy="call the model once on an example",
            )
        if hasattr(parameter, "placements"):
            raise Error(
                f"{name!r} is sharded already",
                where=name,
                expected="the model before fully_shard(...), parallelize_module(...) or distribute_tensor(...)",
                got=f"a {type(parameter.data).__name__} of placements {tuple(parameter.placements)}",
                remedy='parallelize the plain model, and shard it by hints: specs={"0.weight": "tp, -"}, zero=3',
            )
        for attribute, what in PARAMETER_HOOKS.items():
            if getattr(parameter, attribute, None):
                refuse_hook(name, what, "register it on the parameters of pm, which are other tensors")


def reject_backward_hooks(model: nn.Module) -> None:
    """Refuse backward hooks of modules.

    Raises:
        Error: there is one, of a module or of all.
    """
    every, remedy = nn.modules.module, "register it on pm, or compute that in forward"
    if every._global_backward_hooks or every._global_backward_pre_hooks:
        refuse_hook("all modules", "a backward hook", remedy)
    for path, module in model.named_modules():
        if module._backward_hooks or module._backward_pre_hooks:
            refuse_hook(f"{path or 'the model'} ({type(module).__name__})", "a backward hook", remedy)


COLLECTIVE = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "symm_mem")
"""The namespaces of ops that need other processes."""


def reject_collective(node: Node) -> None:
    """Refuse a model or loss that communicates by itself: it says what one device would compute.

    Raises:
        Error: naming the collective.
    """
    if getattr(node.op, "namespace", "") in COLLECTIVE:
        raise Error(
            "the model or its loss communicates by itself",
            where=str(node.where),
            expected="what one device computes of the global batch: shardings imply what ranks send",
            got=str(node.op),
            remedy="leave torch.distributed out of forward and loss: a mean of the loss is that of the global batch",
        )


def refuse_hook(where: str, what: str, remedy: str) -> NoReturn:
    """Refuse a hook that programs would not call.

    Raises:
        Error: always.
    """
    raise Error(f"{what} would never be called", where=where, expected="no such hook", remedy=remedy)
