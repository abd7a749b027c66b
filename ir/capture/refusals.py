"""Why a model cannot be captured, in the words of its own code."""

from __future__ import annotations

from pathlib import Path

import torch

from shardfx.ir.errors import Error

from .sources import source_of

HERE = str(Path(__file__).parent)


def reject_unknown_shapes(exported: torch.fx.GraphModule) -> None:
    """A value whose shape is only known when the program runs (``nonzero``) is refused where it is made."""
    for node in exported.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and any(not isinstance(size, int) for size in value.shape):
            raise _data_dependent(
                str(source_of(node)) + f"  {source_of(node).code}", f"{node.target} of shape {tuple(value.shape)}"
            )


def _data_dependent(where: str | None, got: str) -> Error:
    return Error(
        "the model's shapes or control flow depend on the data",
        where=where,
        expected="shapes that follow from the shapes of the inputs",
        got=got,
        remedy="use a mask and torch.where instead of nonzero(), boolean indexing, .item() or `if tensor`",
    )


DATA_DEPENDENT = ("GuardOnDataDependent", "data-dependent", "Could not guard", "_local_scalar_dense", "nonzero", "u0")


def explain(error: Exception) -> Error:
    """What the user did that torch.export does not take, from its own words."""
    text = f"{type(error).__name__}: {error}"
    where = _user_frame(error)
    if any(word in text for word in DATA_DEPENDENT):
        return _data_dependent(where, text.splitlines()[0][:300])
    return Error(
        "the model cannot be captured by torch.export",
        where=where,
        expected="an nn.Module of tensor operations",
        got=text[:600],
        remedy="try torch.export.export(model, args, strict=False) on its own, and mend what it names",
    )


def _user_frame(error: Exception) -> str | None:
    """The innermost line of code outside of torch that the error passed through."""
    found, trace = None, error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        file = code.co_filename
        if "/torch/" not in file and not file.startswith(("<", HERE)):
            found = f"{file}:{trace.tb_lineno} in {code.co_name}"
        trace = trace.tb_next
    return found
