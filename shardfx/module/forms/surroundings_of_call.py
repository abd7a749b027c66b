"""What a call may stand in, and what its tensors must be: programs follow no transform, and no hook sees what they
keep."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from shardfx.ir.capture.python_state.python_modules import is_users_class
from shardfx.ir.errors import Error, ShardfxWarning
from shardfx.runtime.verify.interface import without_content

OF_TORCH = ("torch.utils.checkpoint", "torch.autograd.graph")
"""Whose hooks on saved tensors give back what they were given."""
PLAIN = (torch.Tensor, nn.Parameter)
NO_PART = (vars(torch.Tensor)["__torch_function__"].__func__, torch._C._disabled_torch_function_impl)
"""What classes have as ``__torch_function__`` that change no function."""


def check_call(tensors: Mapping[str, torch.Tensor]) -> None:
    """Refuse inputs that are no plain tensors with content, and a call within what programs have no part in.

    Raises:
        Error: one of ``torch.func``; or an input with a tangent, which would be lost; a fake one, a sparse one, one of
            a class that changes what functions do; modes that do so; hooks that change what is kept for the backward.
    """
    for name, leaf in tensors.items():
        if type(leaf) not in PLAIN:
            _check_class(name, type(leaf))
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
            remedy="sx.api.trace(model, hints) and pm.verify() need no inputs",
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


def check_modes(where: str) -> None:
    """Refuse a script's modes that see each function of the model, of which a program calls none, and a trace.

    Raises:
        Error: naming one.
    """
    if torch.jit.is_tracing() or get_proxy_mode() is not None:
        raise Error(
            "the programs of a parallel module are no part of a trace",
            where=f"{where}, while it is traced",
            expected="a call with tensors",
            got="torch.export, make_fx or torch.jit.trace",
            remedy="trace the model itself: with pm.gathered() as model: ...; pm.rank_module(rank) is a rank's program",
        )
    if not torch._C._len_torch_function_stack() and not torch._C._len_torch_dispatch_stack():
        return
    mode = next((each for each in _get_current_function_mode_stack() if is_users_class(type(each))), None)
    if mode is not None:
        raise Error(
            "a mode around a call sees no function of the model, and changes none",
            where=f"{where}, within {type(mode).__name__}()",
            expected="no TorchFunctionMode of one's own",
            got=f"a {type(mode).__name__}",
            remedy=f"open it in the model's forward, with which it is captured; or call {where} outside of it",
        )
    mode = next((each for each in _get_current_dispatch_mode_stack() if is_users_class(type(each))), None)
    if mode is not None:
        warnings.warn(
            f"{type(mode).__name__} around {where} sees the ops of the ranks' programs, on their pieces, and not those "
            "of the model",
            ShardfxWarning,
            stacklevel=2,
        )


def _check_class(name: str, kind: type[torch.Tensor]) -> None:
    """Refuse a class of tensors whose code would have a part in each function that is called with one.

    Of installed ones those that only wrap (``tv_tensors``) have the values of plain ones."""
    function = getattr(kind.__torch_function__, "__func__", kind.__torch_function__)
    own = function not in NO_PART and is_users_class(kind)
    if issubclass(kind, FakeTensor) or (not own and kind.__torch_dispatch__ is torch._C._disabled_torch_dispatch_impl):
        return
    raise Error(
        f"an input is a {kind.__name__}, whose own code would be passed over",
        where="pm(...)",
        expected=f"a plain tensor as {name}",
        got=f"a {kind.__name__}, which defines {'__torch_function__' if own else '__torch_dispatch__'}",
        remedy=f"{name}.as_subclass(torch.Tensor)"
        if own
        else f"the plain tensor that {name} stands for, "
        "such as .full_tensor() of a DTensor; a rank's own part may be passed as .to_local()",
    )


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
