"""What a call may stand in, and what its tensors must be: programs follow no transform, and no hook sees what they
keep."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch.autograd import forward_ad

from shardfx.ir.errors import Error
from shardfx.runtime.verify.claims import without_content

OF_TORCH = ("torch.utils.checkpoint", "torch.autograd.graph")
"""Whose hooks on saved tensors give back what they were given."""


def check_call(tensors: Mapping[str, torch.Tensor]) -> None:
    """Refuse inputs that are no plain tensors with content, and a call within what programs have no part in.

    Raises:
        Error: one of ``torch.func``; or an input with a tangent, which would be lost; a fake one, a sparse one; hooks
            that change what is kept for the backward.
    """
    odd = next((name for name, leaf in tensors.items() if leaf.layout is not torch.strided or leaf.is_nested), None)
    if odd is not None:
        raise Error(
            "an input is no dense tensor",
            where="pm(...)",
            expected=f"a dense tensor as {odd}, which ranks have pieces of",
            got="a nested one" if tensors[odd].is_nested else str(tensors[odd].layout),
            remedy=f"{odd}.to_dense(), or .to_padded_tensor(...) of a nested one",
        )
    empty = next((name for name, leaf in tensors.items() if without_content(leaf)), None)
    if empty is not None:
        raise Error(
            "an input has no content",
            where="pm(...)",
            expected=f"a real tensor as {empty}",
            got="a fake one, or one on meta",
            remedy="sx.trace(model, hints) and pm.verify() need no inputs",
        )
    dual = forward_ad._current_level >= 0
    moves = dual and any(forward_ad.unpack_dual(each).tangent is not None for each in tensors.values())
    if moves or torch._C._functorch.peek_interpreter_stack() is not None:
        raise Error(
            "pm(...) is called within a transform of its inputs",
            where="pm(...)",
            expected="a call with tensors as they are, and loss.backward() or torch.autograd.grad",
            got="an input with a tangent (forward_ad)" if moves else "torch.func.grad, jvp, vmap or the like",
            remedy="transform the model itself: with pm.gathered() as model: ...",
        )
    if torch.is_grad_enabled():
        _check_hooks(tensors.values())


def _check_hooks(tensors: Iterable[torch.Tensor]) -> None:
    """Refuse hooks on saved tensors that give back others, tried on what comes in."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is None or hooks[0].__module__ in OF_TORCH:
        return
    pack, unpack = hooks
    with torch.no_grad():
        tried = [torch.linspace(-3, 3, 1000), *(each.detach() for each in tensors if each.is_floating_point())]
        same = all(torch.equal(unpack(pack(each)), each) for each in tried)
    if not same:
        raise Error(
            "hooks on saved tensors change them, and programs keep theirs by themselves",
            where="pm(...), within torch.autograd.graph.saved_tensors_hooks(...)",
            expected="hooks that give back what they were given: what moves or stores it",
            got=f"{pack.__module__}.{pack.__qualname__}, after which a tensor has other values",
            remedy="call pm(...) outside of them; Hints(recompute=...) and Hints(offload=...) save memory",
        )
