"""What is given to capture: models of several kinds, wherever they are, with example inputs; why one is refused."""

from __future__ import annotations

import copy
import logging
import types
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from shardfx.ir.errors import Error

from .contents import STATE, is_apart
from .refusals import reject_module

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


def copied(module: nn.Module, memo: dict[int, object]) -> nn.Module:
    """A deep copy, with what ``memo`` says in place of tensors."""
    with quiet_copies():
        made: nn.Module = _copied(module, memo)
        return made


def without_weights(model: nn.Module) -> nn.Module:
    """A copy of the module tree on ``meta``: tied weights stay tied, nothing is stored. A configuration that the model
    holds is the same object, for whoever made it may change it."""
    attributes = (value for module in model.modules() for name, value in vars(module).items() if name not in STATE)
    memo: dict[int, object] = {id(value): value for value in attributes if is_apart(value)}
    for tensor in (*model.parameters(), *model.buffers()):
        made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        is_parameter = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = marked(nn.Parameter(made, tensor.requires_grad) if is_parameter else made, tensor)
    return copied(model, memo)


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
"""Under this name a fake tensor, which has attributes of its own, has those of a script."""


@contextmanager
def quiet_copies() -> Iterator[None]:
    """Without the warning of torch about its own class, when its trees of arguments are copied."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*LeafSpec", FutureWarning)
        yield


ATOMS = (str, int, float, bool, type(None))


def _copied(thing: Any, memo: dict[int, object]) -> Any:
    """What ``copy.deepcopy`` gives, without its detours where a module says nothing of how it is copied: most of a
    module's dozen dicts are empty."""
    kind = type(thing)
    if kind in ATOMS or id(thing) in memo:
        return memo.get(id(thing), thing)
    if kind is dict or kind is OrderedDict:
        made: dict[Any, Any] = kind()
        memo[id(thing)] = made
        made.update((_copied(key, memo), _copied(value, memo)) for key, value in thing.items())
        return made
    if kind is set:
        several = memo[id(thing)] = {_copied(each, memo) for each in thing}
        return several
    if kind is nn.Parameter:
        return marked(copy.deepcopy(thing, memo), thing)
    if not (isinstance(thing, nn.Module) and all(getattr(kind, n, None) is getattr(nn.Module, n, None) for n in HOW)):
        return copy.deepcopy(thing, memo)
    new = memo[id(thing)] = object.__new__(kind)
    new.__setstate__(_copied(thing.__dict__, memo))
    return new


HOW = ("__deepcopy__", "__reduce__", "__reduce_ex__", "__getstate__", "__setstate__", "__new__")
"""By which a class says how it is copied."""


def on_cpu(
    model: nn.Module, tensors: Sequence[torch.Tensor], stack: ExitStack, real: bool = False
) -> tuple[nn.Module, list[torch.Tensor]]:
    """A model and examples that are on another device than the CPU (or on ``meta``), as fakes on the CPU; with ``real``
    as copies there.

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
    there: Callable[[torch.Tensor], torch.Tensor] = _copy if real else partial(_fake, mode=mode)
    memo: dict[int, object] = {id(t): there(t) for t in (*model.parameters(), *model.buffers())}
    distinct = [there(t) for t in distinct]
    model = copied(model, memo)
    if not real:
        stack.enter_context(mode)
    return model, distinct


def each_in_its_place(tensor: torch.Tensor) -> torch.Tensor:
    """The same tensor; if several of its elements share a place in memory, a copy: torch traces no numbers of these."""
    if tensor.layout is not torch.strided:
        return tensor
    if not any(n > 1 and not stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        return tensor
    return tensor.detach().contiguous().requires_grad_(tensor.requires_grad)


@contextmanager
def no_log_of_failures() -> Iterator[None]:
    """What fake tensors refuse, or do not know, is an error that says so: torch need not log it as well."""
    names = "torch._subclasses.fake_tensor", "torch.fx.experimental.symbolic_shapes"
    logs = [logging.getLogger(name) for name in names]
    before = [log.disabled for log in logs]
    for log in logs:
        log.disabled = True
    try:
        yield
    finally:
        for log, was in zip(logs, before, strict=True):
            log.disabled = was


@contextmanager
def no_library_of_cpus() -> Iterator[None]:
    """Within, torch takes no op of oneDNN (an LSTM layer as one), which other devices do not have."""
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


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same content on the CPU."""
    made = tensor.detach().cpu()
    if isinstance(tensor, nn.Parameter):
        return marked(nn.Parameter(made, tensor.requires_grad), tensor)
    return made.requires_grad_(tensor.requires_grad)


def _fake(tensor: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    """A fake CPU tensor in place of one that is elsewhere; any other as it is."""
    if tensor.device.type == "cpu":
        return tensor
    with mode:
        empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
        made = nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
    return marked(made.requires_grad_(tensor.requires_grad), tensor)
