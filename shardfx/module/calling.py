"""Calling a parallel module: its inputs by name, checked, and the model's own results back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.utils._pytree as pytree

from shardfx.compiled import Compiled
from shardfx.ir.capture.model_and_loss import leaf_names
from shardfx.ir.errors import Error
from shardfx.ir.graph import InputKind, OutputKind
from shardfx.runtime.step import Results, Step


def named_inputs(
    compiled: Compiled, step: Step, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[dict[str, torch.Tensor], bool]:
    """The tensors by name, checked; and whether targets were given.

    Raises:
        Error: another number of tensors than the model was captured with, another shape or dtype.
    """
    expected = {g.name: g for g in step.graph.inputs if g.kind in (InputKind.ARGUMENT, InputKind.TARGET)}
    leaves = compiled.captured.leaves
    count = len(compiled.hints.args)
    named = dict(leaf_names(args[:count], kwargs, args[count:]))
    tensors = {name: leaf for name, leaf in named.items() if isinstance(leaf, torch.Tensor)}
    has_targets = len(args) > count or not any(name.startswith("targets.") for name in leaves)
    wanted = [n for n in leaves if has_targets or not n.startswith("targets.")]
    if sorted(tensors) != sorted(wanted):
        raise Error(
            "the inputs are not those that the model was captured with",
            where="pm(...)",
            expected=", ".join(wanted),
            got=", ".join(tensors) or "no tensors",
            remedy="pass the model's arguments first, then the targets",
        )
    for name, tensor in tensors.items():
        given = expected.get(name)
        if given is None:
            continue
        shape, dtype = tuple(tensor.shape), given.value.type.dtype
        if tensor.dtype == dtype and shape == given.value.shape:
            continue
        local = step.local_shapes(given)
        if tensor.dtype != dtype or shape not in local:
            own = "".join(f", or this rank's {each}" for each in sorted(local))
            raise Error(
                f"input {name!r} has the wrong shape or dtype",
                where="pm(...)",
                expected=f"the global shape {given.value.shape}{own}, {dtype}",
                got=f"{shape}, {tensor.dtype}",
                remedy="pass the global batch, or capture with another example (Hints(args=...))",
            )
    return tensors, has_targets


def model_results(compiled: Compiled, step: Step, inputs: Mapping[str, torch.Tensor], results: Results) -> Any:
    """The model's own results, as it arranges them: whole, or of a local batch this rank's part."""
    outputs = [o for o in step.graph.outputs if o.kind is OutputKind.RESULT]
    shapes = {g.name: g.value.shape for g in step.graph.inputs}
    is_local = any(tuple(t.shape) != shapes[name] for name, t in inputs.items() if name in shapes)
    if is_local:
        given = iter([results[o.kind, o.name][0] for o in outputs])
    else:
        given = iter([step.whole(o, results[o.kind, o.name]) for o in outputs])
    leaves = [next(given) if leaf == "tensor" else leaf for leaf in compiled.captured.result_leaves]
    return pytree.tree_unflatten(leaves, compiled.captured.result_tree)
