"""The hints of the plan for a form of call: the user's own, with that call's inputs and what is stored already."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch.utils._pytree as pytree

from shardfx.gradients import product
from shardfx.hints import Hints
from shardfx.ir.errors import Error
from shardfx.ir.spec import Spec, TensorType
from shardfx.module.call import TARGETS, Call, Form
from shardfx.plan import as_said

UNSTEPPED: dict[str, Any] = {"optimizer": None, "clip_grad_norm": None}
"""The hints of a plan that has no step."""


def hints_of_form(hints: Hints, ours: Mapping[str, Spec], form: Form, call: Call) -> Hints:
    """The user's hints, for the inputs of a call; ``ours`` is how the first plan stores parameters and buffers."""
    hints = as_said(hints)
    specs = {**hints.specs, **ours}
    args, kwargs, targets = _examples(form, call, hints.guard)
    as_captured = call.has_targets or not hints.targets
    hints = replace(hints, args=args, kwargs=kwargs, targets=targets)
    if as_captured and not form.pulls:
        return replace(hints, specs=specs)
    specs = {name: spec for name, spec in specs.items() if not name.startswith(TARGETS)}
    if form.pulls:
        return replace(hints, loss=product, specs=specs, **UNSTEPPED)
    return replace(hints, targets=(), loss=None, specs=specs, **UNSTEPPED)


def _examples(form: Form, call: Call, real: bool) -> Any:
    """Example inputs for a form of call: arguments by position and by name, and targets; those of the call itself if
    they are to be real, else without content.

    Raises:
        Error: they are to be real, and are only a rank's part of them.
    """
    leaves, tree = pytree.tree_flatten((call.args, dict(call.kwargs), call.targets))
    made, examples = [], form.asked.examples()
    for name, leaf in zip(call.leaves, leaves, strict=True):
        type = form.inputs[name]
        if isinstance(type, TensorType):
            if real and tuple(leaf.shape) != type.shape:
                raise Error(
                    "a call in a new form is an example of what the data decide, and must be whole",
                    where="pm(...)",
                    expected=f"{name} of shape {type.shape}",
                    got=f"this rank's part, of shape {tuple(leaf.shape)}",
                    remedy="call pm once with the global batch in this form",
                )
            leaf = examples.make(name, type, leaf if real else None, name in form.trainable)
        made.append(leaf)
    return pytree.tree_unflatten(made, tree)
