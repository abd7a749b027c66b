"""Checks of a state dict that somebody wants to load."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch

from shardfx.ir.errors import Error
from shardfx.ir.spec import TensorType

WHERE = "load_full_state_dict(...)"


def check_names(
    given: Collection[str], model: Collection[str], needed: Mapping[str, Sequence[str]], known: Collection[str]
) -> None:
    """All names that the plan needs are given, and none that the model has not.

    Args:
        given: the state dict's names.
        model: the names of the model's own state dict.
        needed: what the plan must get -> the names that it may go by (tied parameters have several).
        known: further names that may be given (buffers that the model's state dict leaves out).
    """
    missing = [name for name, names in needed.items() if not any(n in given for n in names)]
    unexpected = [name for name in given if name not in model and name not in known]
    if missing or unexpected:
        raise Error(
            "the state dict is not that of the model",
            where=WHERE,
            expected=f"all of the model's names; missing: {_few(missing)}",
            got=f"unexpected: {_few(unexpected)}",
            remedy="pass the original model's state_dict() (with its non-persistent buffers, if the model was fake or "
            "on meta), or strict=False",
        )


def check_types(given: Mapping[str, object], types: Mapping[str, TensorType]) -> None:
    """Every tensor has the whole shape that the model has, and its dtype."""
    for name, tensor in given.items():
        if name not in types:
            continue
        shape, dtype = tuple(types[name].shape), types[name].dtype
        if not isinstance(tensor, torch.Tensor):
            raise Error(
                f"{name!r} is not a tensor", where=WHERE, expected=f"{shape}, {dtype}", got=type(tensor).__name__
            )
        if tuple(tensor.shape) != shape:
            raise Error(
                f"{name!r} has the wrong shape",
                where=WHERE,
                expected=shape,
                got=tuple(tensor.shape),
                remedy="pass whole tensors, such as full_state_dict() gives",
            )
        if tensor.dtype != dtype:
            raise Error(
                f"{name!r} has the wrong dtype",
                where=WHERE,
                expected=dtype,
                got=tensor.dtype,
                remedy=f"convert it, if you mean to: state_dict[{name!r}].to({dtype})",
            )


def _few(names: Sequence[str], count: int = 8) -> str:
    more = f" and {len(names) - count} more" if len(names) > count else ""
    return (", ".join(names[:count]) or "none") + more
