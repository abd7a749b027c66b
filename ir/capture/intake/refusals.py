"""What cannot be captured: found beforehand where it would be left out in silence, else told from torch's own words."""

from __future__ import annotations

import functools
import inspect
import linecache
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import nn

from shardfx.ir.capture.sources import is_user_file, source_of
from shardfx.ir.errors import Error
from shardfx.ir.graph import Node, Where

HOOKS = {
    "_backward_hooks": "a backward hook",
    "_backward_pre_hooks": "a backward hook",
}
PARAMETER_HOOKS = {
    "_backward_hooks": "a hook",
    "_post_accumulate_grad_hooks": "a post-accumulate hook",
}


def reject_module(model: nn.Module) -> None:
    """Refuse a module of which a program would leave something out.

    Raises:
        Error: a wrapper that is parallel, a ScriptModule, hooks on gradients, forward hooks that only look, a parameter
            that is computed, or has no shape yet.
    """
    for attribute, what in HOOKS.items():
        if getattr(nn.modules.module, f"_global{attribute}"):
            refuse_hook("all modules", what, "register it on pm, or compute that in forward")
    for path, module in model.named_modules():
        where = f"{path or 'the model'} ({type(module).__name__})"
        if isinstance(module, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            raise Error(
                f"a {type(module).__name__} is parallel already",
                where=where,
                expected="the model that it was made of",
                got=type(module).__name__,
                remedy="parallelize(model.module, ...), and leave the wrapper out: cut the batch by a hint, "
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
        for attribute, what in HOOKS.items():
            if getattr(module, attribute, None):
                refuse_hook(where, what, "register it on pm, or compute that in forward")
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
                f"{name!r} is in pieces already",
                where=name,
                expected="the model before fully_shard(...), parallelize_module(...) or distribute_tensor(...)",
                got=f"a {type(parameter.data).__name__} of placements {tuple(parameter.placements)}",
                remedy='parallelize the plain model, and cut parameters by hints: specs={"0.weight": "tp, -"}, zero=3',
            )
        for attribute, what in PARAMETER_HOOKS.items():
            if getattr(parameter, attribute, None):
                refuse_hook(name, what, "register it on the parameters of pm, which are other tensors")
        if parameter.is_inference():
            raise Error(
                f"{name!r} was made in inference mode, and can have no gradient",
                where=name,
                expected="parameters made outside of torch.inference_mode()",
                got="an inference tensor",
                remedy="make the model outside of it",
            )


def reject_loss(loss: Callable[..., Any] | None) -> None:
    """Refuse a loss that has parameters or buffers of its own.

    Raises:
        Error: naming them.
    """
    held = dict((*loss.named_parameters(), *loss.named_buffers())) if isinstance(loss, nn.Module) else {}
    if held:
        raise Error(
            "the loss has tensors of its own",
            where=f"Hints(loss={type(loss).__name__}(...))",
            expected="a loss of the model's results and the targets alone",
            got=", ".join(held),
            remedy="give them to the loss as targets: loss=lambda out, y, weight: F.cross_entropy(out, y, weight)",
        )


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
            expected="what one device computes of the whole batch: what ranks send follows from how values are cut",
            got=str(node.op),
            remedy="leave torch.distributed out of forward and loss: a mean of the loss is that of the whole batch",
        )


def refuse_hook(where: str, what: str, remedy: str) -> NoReturn:
    """Refuse a hook that no program calls.

    Raises:
        Error: always.
    """
    raise Error(f"{what} would never be called", where=where, expected="no such hook", remedy=remedy)


def reject_unknown_shapes(exported: torch.fx.GraphModule, guarded: bool) -> None:
    """A value whose shape is only known when the program runs (``nonzero``), or a number that is a tensor's
    (``.item()``), is refused where it is made."""
    for node in exported.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and any(not isinstance(size, int) for size in value.shape):
            got = f"{node.target} of shape {tuple(value.shape)}"
        elif isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            got = f"{node.target}, a number that the program goes on with"
        else:
            continue
        raise _data_dependent(said(source_of(node)), got, guarded)


def said(where: Where) -> str:
    """A source with its line of code."""
    return "  ".join(part for part in (str(where), where.code) if part)


class DataDependent(Error):
    """The model asks what a tensor holds."""


def _data_dependent(where: str | None, got: str, guarded: bool) -> Error:
    got = next((said for word, said in IN_WORDS.items() if word in got), "") + got
    mask = "use a mask and torch.where instead of nonzero(), boolean indexing, .item() or `if tensor`"
    guard = "Hints(guard=True) captures what the model does for the examples, and checks it at every call"
    return DataDependent(
        "the model's shapes or control flow depend on the data",
        where=where,
        expected="ops that guards know: `if tensor`, .item(), nonzero(), x[mask], repeat_interleave, ..."
        if guarded
        else "shapes and branches that follow from the shapes of the inputs",
        got=got,
        remedy=mask if guarded else f"{guard}; or {mask}",
    )


DATA_DEPENDENT = (
    "GuardOnDataDependent",
    "DataDependentOutput",
    "DynamicOutputShape",
    "data-dependent",
    "Could not guard",
    "_local_scalar_dense",
    "nonzero",
    "u0",
)
IN_WORDS = {
    "GuardOnDataDependent": "a branch by, or a number of, what a tensor holds: ",
    "DataDependentOutput": "a number that a tensor holds: ",
    "DynamicOutputShape": "a result whose shape follows from what a tensor holds: ",
}
FOREIGN = "convert all Tensors to FakeTensors"
TOO_SMALL = (
    "Kernel size can't be greater than actual input size",
    "Output size is too small",
    "output size is too small",
    "Padding size should be less than the corresponding input dimension",
    "Expected more than 1 value per channel",
    "Expected more than 1 spatial element",
)  # words of torch's where a tensor is smaller than an op can take


def explain_decision(error: Exception, model: nn.Module, guarded: bool) -> Error | None:
    """What is said of an error of torch's, if the reason is that the model's code depends on the data."""
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, Error) or not any(word in text for word in DATA_DEPENDENT):
        return None
    return _data_dependent(user_frame(error, model), text.splitlines()[0][:300], guarded)


def explain(
    error: Exception,
    model: nn.Module,
    loss: Callable[..., Any] | None,
    guarded: bool,
    kept: Callable[[], Sequence[str]] = list,
    unseen: Sequence[type] = (),
) -> Error:
    """What the user did that torch.export does not take, from its own words. ``kept``: what holds tensors of all that
    the code reads beside; ``unseen``: the classes of arguments that hold some, and that torch does not look into."""
    decision = explain_decision(error, model, guarded)
    if decision is not None:
        return decision
    text = f"{type(error).__name__}: {error}"
    where = user_frame(error, model)
    if FOREIGN in text and unseen:
        return Error(
            "an argument holds tensors, and torch does not look into it",
            where=where,
            expected="tensors, and tuples, lists, dicts and registered dataclasses of them",
            got=", ".join(kind.__name__ for kind in unseen),
            remedy=f"pass its tensors; or, before parallelize, torch.export.register_dataclass({unseen[0].__name__}), "
            "or torch.utils._pytree.register_pytree_node of a class that is no dataclass",
        )
    if FOREIGN in text:
        return _foreign(where, model, loss, kept())
    if "modified by an inplace operation" in text:
        return Error(
            "a tensor that its gradients need is changed in place, on one device as well",
            where=where,
            expected="a change behind its last use, or a new tensor",
            got=text[:600],
            remedy="read a clone() of it, or change it before it is read",
        )
    if any(words in text for words in TOO_SMALL):
        return Error(
            "an op is given too few rows or places for what it does, on one device as well",
            where=where,
            expected="as many rows and columns, padding counted, as a kernel, a pool or a border reaches over",
            got=text[:600],
            remedy="give larger example inputs, pad them, or make the kernel, its stride or its dilation smaller",
        )
    return Error(
        "the model cannot be captured by torch.export",
        where=where,
        expected="an nn.Module of tensor operations",
        got=text[:600],
        remedy="try torch.export.export(model, args, strict=False) on its own, and mend what it names",
    )


def _foreign(where: str | None, model: nn.Module, loss: Callable[..., Any] | None, kept: Sequence[str]) -> Error:
    """A tensor is used that is no input, parameter or buffer."""
    of_loss = [f"{name} of the loss" for name in tensors_of(loss)] if loss is not None else []
    plain = [
        f"{path}.{name}".lstrip(".")
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if not name.startswith("_") and _has_tensor(value)
    ]
    register = "register it: self.register_buffer(name, tensor)"
    return Error(
        "a tensor is used that is no input, parameter or buffer",
        where=where,
        expected="tensors that come in as arguments or targets, or belong to a module",
        got=", ".join([*dict.fromkeys((*of_loss, *plain, *kept))][:5]) or "a tensor of the code around",
        remedy="give it to the loss as a target"
        if of_loss
        else f"{register}; or, if {kept[0]} is a cache that an earlier call filled, empty it before parallelize"
        if kept
        else register,
    )


def tensors_of(function: Callable[..., Any]) -> list[str]:
    """The names of tensors that a function has beside its arguments: in its closure, defaults, or its object."""
    if isinstance(function, functools.partial):
        given = {str(i): each for i, each in enumerate(function.args)} | dict(function.keywords)
        return [*(name for name, value in given.items() if _has_tensor(value)), *tensors_of(function.func)]
    held: dict[str, Any] = {}
    owner = getattr(function, "__self__", None) or (function if not inspect.isroutine(function) else None)
    if owner is not None and hasattr(owner, "__dict__"):
        held |= vars(owner)
    if inspect.isfunction(inspect.unwrap(function)):
        used = inspect.getclosurevars(inspect.unwrap(function))
        held |= dict(used.nonlocals) | dict(used.globals)
    return [name for name, value in held.items() if _has_tensor(value)]


def _has_tensor(value: object) -> bool:
    inside: Any = value.values() if isinstance(value, Mapping) else value
    return isinstance(value, torch.Tensor) or (
        isinstance(value, (list, tuple, Mapping)) and any(isinstance(each, torch.Tensor) for each in inside)
    )


def user_frame(error: Exception, model: nn.Module) -> str | None:
    """The innermost line of code outside of torch that the error passed through, and the module that it is of."""
    names = {id(module): path for path, module in model.named_modules()}
    kinds = {path: type(module).__name__ for path, module in model.named_modules()}
    found, trace, of_module = Where(), error.__traceback__, ""
    while trace is not None:
        code = trace.tb_frame.f_code
        of_module = names.get(id(trace.tb_frame.f_locals.get("self")), of_module)
        if is_user_file(code.co_filename):
            line = linecache.getline(code.co_filename, trace.tb_lineno).strip()
            found = Where("", code.co_filename, trace.tb_lineno, line)
        trace = trace.tb_next
    if not found.file:
        return f"{of_module or 'the model'} ({kinds[of_module]})"
    return said(replace(found, module=of_module)) or None
