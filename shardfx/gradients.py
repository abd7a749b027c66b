"""Weights that want a gradient and get none: the loss does not reach them."""

from __future__ import annotations

import warnings

from torch import nn

from shardfx.ir.errors import Error, ShardfxWarning
from shardfx.ir.graph import OutputKind

from .compiled import Compiled

SHOWN = 5


def check_gradients(model: nn.Module, compiled: Compiled) -> None:
    """Warn of trainable parameters that no gradient comes to, and say so in the plan's notes.

    Raises:
        Error: there is a loss, and it depends on nothing that may be trained.
    """
    graph = compiled.after
    if all(output.kind is not OutputKind.LOSS for output in graph.outputs):
        return
    aliases = compiled.captured.aliases
    trainable = dict.fromkeys(aliases.get(n, n) for n, p in model.named_parameters() if p.requires_grad)
    given = {output.name for output in graph.outputs if output.kind is OutputKind.GRADIENT}
    lacking = [name for name in trainable if name not in given]
    if not lacking:
        return
    more = f" and {len(lacking) - SHOWN} more" if len(lacking) > SHOWN else ""
    names = ", ".join(lacking[:SHOWN]) + more
    if not given:
        raise Error(
            "no trainable parameter gets a gradient",
            where="Hints(loss=...)",
            expected="a loss that depends on parameters",
            got=f"none for {names}",
            remedy="look for detach(), torch.no_grad() and .data between them and the loss; or freeze them "
            "(requires_grad_(False)), and leave the loss out",
        )
    text = f"no gradient for {len(lacking)} of {len(trainable)} trainable parameters: {names}"
    graph.notes.append(text)
    warnings.warn(text, ShardfxWarning, stacklevel=2)
