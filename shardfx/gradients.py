"""Checks of gradients (missing ones, and float16), and the VJP of a model's results."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

from shardfx.ir.capture.canonical.mixed_precision import LossScale, MixedPrecision
from shardfx.ir.errors import Error, ShardfxWarning
from shardfx.ir.graph import Graph, OutputKind

from .compile import Compiled
from .hints import Hints
from .plan import some

SHOWN = 5


def gradients_of(graph: Graph) -> set[str]:
    """The names of the parameters whose gradients leave a graph."""
    return {output.name for output in graph.outputs if output.kind is OutputKind.GRADIENT}


def check_gradients(model: nn.Module, compiled: Compiled) -> None:
    """Warn of trainable parameters without a gradient, and note them in the plan.

    Raises:
        Error: there is a loss, and it depends on nothing that may be trained.
    """
    trainable = _trainable(model, compiled)
    if not compiled.trains or gradients_of(compiled.after) >= set(trainable):
        return
    received = gradients_of(compiled.before)  # what a pass drops is for the proof to say
    lacking = [name for name in trainable if name not in received]
    if not lacking:
        return
    names = some(lacking, SHOWN)
    if not received:
        raise Error(
            "no trainable parameter gets a gradient",
            where="Hints(loss=...)",
            expected="a loss that depends on parameters",
            got=f"none for {names}",
            remedy="look for detach(), torch.no_grad() and .data between them and the loss; or freeze them "
            "(requires_grad_(False)), and leave the loss out",
        )
    _warn(compiled, f"no gradient for {len(lacking)} of {len(trainable)} trainable parameters: {names}")


def check_stepped(model: nn.Module, compiled: Compiled) -> None:
    """Warn of trainable parameters that have a gradient, but no optimizer among those of the hints; and note them."""
    update = compiled.captured.update
    if update is None:
        return
    stepped = {name for group in update.groups for name in group.names}
    trainable, received = _trainable(model, compiled), gradients_of(compiled.before)
    left = [name for name in trainable if name in received and name not in stepped]
    if left:
        names = some(left, SHOWN)
        _warn(compiled, f"{len(left)} of {len(trainable)} trainable parameters have no optimizer: {names}")


def _trainable(model: nn.Module, compiled: Compiled) -> list[str]:
    aliases = compiled.captured.aliases
    return list(dict.fromkeys(aliases.get(n, n) for n, p in model.named_parameters() if p.requires_grad))


def _warn(compiled: Compiled, text: str) -> None:
    compiled.after.notes.append(text)
    warnings.warn(text, ShardfxWarning, stacklevel=3)


def check_scale(hints: Hints) -> None:
    """Check that a dynamic loss scale has an optimizer in the program, whose step adapts it.

    Raises:
        Error: there is none in the program.
    """
    compute = MixedPrecision.of(hints.mixed_precision)
    scale = compute.loss_scale if compute is not None else None
    if isinstance(scale, LossScale) and (hints.loss is None or hints.optimizer is None):
        raise Error(
            "a scale that adapts is stepped with the optimizer",
            where="Hints(mixed_precision=...): loss_scale",
            expected="Hints(loss=..., optimizer=...), and pm.step(x, y)",
            got=repr(scale),
            remedy="give the optimizer in the hints; or a number: MixedPrecision(..., loss_scale=2.0**14)",
        )


def reject_half(compiled: Compiled, autocast: Iterable[tuple[str, torch.dtype]]) -> None:
    """Refuse gradients in float16: they are computed before ``backward()``, so that a scale of the loss comes too late.

    Raises:
        Error: the plan was made under such an ``autocast``, or has such gradients.
    """
    gradients = [output for output in compiled.after.outputs if output.kind is OutputKind.GRADIENT]
    cast = [f"torch.autocast({device!r}, torch.float16)" for device, dtype in autocast if dtype is torch.float16]
    asked = MixedPrecision.of(compiled.hints.mixed_precision)
    if asked is not None and asked.dtype is torch.float16 and asked.loss_scale is None:
        cast.append("mixed_precision=torch.float16")
    half = [f"the gradient of {o.name!r}" for o in gradients if o.value.type.dtype is torch.float16]
    if gradients and (cast or half):
        raise Error(
            "gradients in float16 would vanish: a GradScaler scales the loss after they were computed",
            where="pm(...).backward()",
            expected="training in bfloat16, float32 or float64; or a scale that the program knows",
            got=(cast + half)[0],
            remedy="Hints(mixed_precision=torch.bfloat16), without a scaler; or "
            "shardfx.MixedPrecision(torch.float16, output_dtype=torch.float32, loss_scale=2.0**14) there",
        )


def product(out: Any, *tensors: torch.Tensor) -> torch.Tensor:
    """The VJP loss of a plan: the inner product of the results with their gradients."""
    leaves = [leaf for leaf in pytree.tree_leaves(out) if isinstance(leaf, torch.Tensor) and is_pulled(leaf.dtype)]
    sums = [(result * above.conj()).sum() for result, above in zip(leaves, tensors, strict=True)]
    return torch.stack([(each.real if each.is_complex() else each).to(torch.float32) for each in sums]).sum()


def is_pulled(dtype: torch.dtype) -> bool:
    """Whether results of a dtype are differentiable."""
    return dtype.is_floating_point or dtype.is_complex
