"""``Hints(grad_accumulation=4)``: a loop axis that shards the batch, outermost, as if mesh and hints had said so.

The micro-batches of ``Hints(pipeline=...)`` shard the batch too, where no hint says what they shard.

>>> hints = Hints(args=(x,), specs={"args.0": "dp, -"}, grad_accumulation=4)
>>> mesh = with_iterations(Mesh(dp=2), hints)
>>> mesh, specs_in_iterations(mesh, hints)["args.0"]
(Mesh(mb=Loop(4), dp=2), [.{mb,dp}, .])
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from shardfx.hints import Hints
from shardfx.ir.capture.model_and_loss import leaf_names
from shardfx.ir.dim_sharding import DimSharding
from shardfx.ir.errors import Error
from shardfx.ir.mesh import Loop, Mesh
from shardfx.ir.names import pattern
from shardfx.ir.spec import Spec
from shardfx.passes.sharding.bind_hints import as_spec

NAMES = ("mb", "micro_batch", "accumulate")
"""What the axis is called: the first of these that the mesh does not have."""


def with_iterations(mesh: Mesh, hints: Hints) -> Mesh:
    """The mesh with the axis that ``grad_accumulation`` asks for, outermost."""
    if hints.grad_accumulation == 1:
        return mesh
    axes: dict[str, Any] = {next(name for name in NAMES if name not in mesh.names): Loop(hints.grad_accumulation)}
    axes |= {each.name: each.extent for each in mesh.axes}
    return Mesh(links={each.name: each.link for each in mesh.axes}, **axes)


def specs_in_iterations(mesh: Mesh, hints: Hints) -> Mapping[str, Any]:
    """The specs of hints on such a mesh: the axis of micro-batches stands in front of those that shard the leading dim
    of an input, or else shardings that of the first input.

    Raises:
        Error: no input has a batch to shard.
    """
    leaves = leaf_names(hints.args, hints.kwargs, hints.targets)
    inputs = {name: leaf.ndim for name, leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.ndim}
    axis = _unsaid(mesh, hints, inputs)
    if not axis:
        return hints.specs
    specs, found = dict(hints.specs), False
    for text, hint in hints.specs.items():
        ndim = next((dims for name, dims in inputs.items() if pattern(text).fullmatch(name)), None)
        spec = as_spec(hint, mesh, ndim, text) if ndim is not None else None
        if spec is not None and spec.dims[0].axes and axis not in spec.axes:
            specs[text], found = _before(axis, spec), True
    if found:
        return specs
    first = next((name for name in inputs if not name.startswith("targets.")), None)
    if first is None:
        raise Error(
            "there is no batch to split into micro-batches",
            where=f"Hints(grad_accumulation={hints.grad_accumulation})"
            if hints.grad_accumulation > 1
            else "Hints(pipeline=...)",
            expected="an input of the model whose leading dim is the batch",
            got=f"inputs {', '.join(inputs) or 'without dims'}",
            remedy="say which dim it is: Mesh(mb=sx.Loop(4), ...), and mb in the specs of inputs",
        )
    by = next((text for text in specs if pattern(text).fullmatch(first)), first)
    given = as_spec(specs[by], mesh, inputs[first], by) if by in specs else Spec.replicated(inputs[first])
    return {**specs, by: given if axis in given.axes else _before(axis, given)}


def _unsaid(mesh: Mesh, hints: Hints, inputs: Mapping[str, int]) -> str:
    """The axis of micro-batches of which no hint says what it shards; empty where there is none."""
    if hints.grad_accumulation > 1:
        return mesh.axes[0].name
    time = hints.pipeline.microbatches if hints.pipeline is not None else ""
    if time not in mesh.names or not mesh[time].loop:
        return ""  # or it is no axis of micro-batches, which the pass will say
    said = (
        as_spec(hint, mesh, dims, text)
        for text, hint in hints.specs.items()
        for name, dims in inputs.items()
        if pattern(text).fullmatch(name)
    )
    return "" if any(time in spec.axes for spec in said) else time


def _before(axis: str, spec: Spec) -> Spec:
    return spec.with_dim(0, DimSharding((axis, *spec.dims[0].axes)))
