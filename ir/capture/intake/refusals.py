"""What cannot be captured, found beforehand: where it would be left out in silence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import nn

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


def said(where: Where) -> str:
    """A source with its line of code."""
    return "  ".join(part for part in (str(where), where.code) if part)
