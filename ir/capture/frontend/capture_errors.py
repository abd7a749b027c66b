"""Errors of capture in the user's terms: where in their code, and the remedy, from torch's own messages."""

from __future__ import annotations

import linecache
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.utils._pytree as pytree
from torch import nn

from shardfx.ir.capture.source_locations import describe, is_user_file, source_of
from shardfx.ir.errors import Error
from shardfx.ir.graph import Where


class DataDependent(Error):
    """The model asks for the content of a tensor."""


def reject_unknown_shapes(exported: torch.fx.GraphModule, guarded: bool) -> None:
    """Refuse values whose shape is known only at run time (``nonzero``), and numbers of tensors (``.item()``)."""
    for node in exported.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and any(not isinstance(size, int) for size in value.shape):
            got = f"{node.target} of shape {tuple(value.shape)}"
        elif isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            got = f"{node.target}, a number that the program goes on with"
        else:
            continue
        raise _data_dependent(describe(source_of(node)), got, guarded)


def _data_dependent(where: str | None, got: str, guarded: bool) -> Error:
    got = next((said for word, said in DATA_DEPENDENT.items() if said and word in got), "") + got
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


DATA_DEPENDENT = {
    "GuardOnDataDependent": "a branch by, or a number of, what a tensor holds: ",
    "DataDependentOutput": "a number that a tensor holds: ",
    "non-nested SymInt": "a number that a tensor holds, as a member of a set or a key: ",
    ".numpy() is not supported": "what a tensor holds, as an array: ",
    "MetadataMismatch": "an op of which torch does not know what it makes of the examples: ",
    "DynamicOutputShape": "a result whose shape follows from what a tensor holds: ",
    **dict.fromkeys(("data-dependent", "Could not guard", "_local_scalar_dense", "nonzero", "u0"), ""),
}
"""What torch says of data-dependent code, and what that is in words."""
FOREIGN = "convert all Tensors to FakeTensors"


def explain_decision(error: Exception, model: nn.Module, guarded: bool) -> Error | None:
    """The error of data-dependent code, if that is the reason of torch's."""
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, Error) or not any(word in text for word in DATA_DEPENDENT):
        return None
    return _data_dependent(user_frame(error, model), text.splitlines()[0][:300], guarded)


def explain(
    error: Exception,
    model: nn.Module,
    guarded: bool,
    unseen: Sequence[type] = (),
    alone: Exception | None = None,
) -> Error:
    """The error of a failed export, in the user's terms. ``unseen``: the classes of arguments that contain tensors, and
    that torch does not look into; ``alone``: what the model raised before any trace."""
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
        return _foreign(where, model)
    if isinstance(alone, Error):
        return alone
    if alone is not None:
        return Error(
            "the model raises on its example, on one device as well",
            where=user_frame(alone, model),
            expected="a model that takes the example inputs",
            got=f"{type(alone).__name__}: {alone}"[:600],
            remedy="mend it, or give other examples: Hints(args=..., kwargs=..., targets=...)",
        )
    return Error(
        "the model cannot be captured by torch.export",
        where=where,
        expected="an nn.Module of tensor operations",
        got=text[:600],
        remedy="try torch.export.export(model, args, strict=False) on its own, and mend what it names",
    )


def _foreign(where: str | None, model: nn.Module) -> Error:
    """The error of a tensor that is no input, parameter or buffer."""
    plain = [
        f"{path}.{name}".lstrip(".")
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if not name.startswith("_") and any(isinstance(each, torch.Tensor) for each in pytree.tree_leaves(value))
    ]
    register = "register it: self.register_buffer(name, tensor)"
    return Error(
        "a tensor is used that is no input, parameter or buffer",
        where=where,
        expected="tensors that come in as arguments or targets, or belong to a module",
        got=", ".join(plain[:5]) or "a tensor of the code around",
        remedy=f"{register}, or give it to the loss as a target",
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
    return describe(replace(found, module=of_module)) or None
