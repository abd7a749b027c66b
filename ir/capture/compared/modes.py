"""Runs that are to be compared: by the same random numbers, and in another precision."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map, tree_map_only

from shardfx.ir.capture.forms.parts_of_batch import BatchParts, NormByParts
from shardfx.ir.capture.forms.wide_statistics import WideStatistics
from shardfx.ir.ops.fused_attention import attention, attention_backward
from shardfx.ir.ops.traits import draws

aten = torch.ops.aten
ON_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)


class Alike(TorchDispatchMode):
    """Within, every draw of random numbers begins anew, so that those of one shape and kind are the same numbers, in
    whatever order they are drawn, and by whatever generator; attention has no dropout.

    With a ``dtype`` every floating number is of it, whatever the code says: so code that rounds is told from code that
    is wrong. ``moved``: what goes in is moved by a rounding or none, otherwise for each number.
    """

    def __init__(self, dtype: torch.dtype | None = None, moved: int = 0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dtype, self._moved = dtype, moved
        self.drawn = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.dtype is not None:
            args, kwargs = tree_map(self.cast, (args, kwargs))
        if draws(func):
            out = self._drawn(func, args, kwargs)
        elif func in (attention, attention_backward):
            out = func(*_without_dropout(func, args), **kwargs)
        elif func.namespace == "shardfx":  # which may make numbers of a dtype within
            with self:
                out = func.redispatch(ON_CPU, *args, **kwargs)
        else:
            out = func(*args, **kwargs)
        if self.dtype is None or func._schema.is_mutable:
            return out
        return tree_map(self.cast, out)

    def cast(self, each: Any) -> Any:
        """A dtype, a tensor, or a number, in the dtype of this run."""
        if self.dtype is None:
            return each
        if isinstance(each, float) and torch.finfo(self.dtype).max < abs(each) < math.inf:  # what a mask is filled with
            return math.copysign(torch.finfo(self.dtype).max, each)
        if isinstance(each, torch.dtype) and each.is_floating_point:
            return self.dtype
        if isinstance(each, torch.dtype) and each.is_complex:
            return self.dtype.to_complex()
        if isinstance(each, Tensor) and (each.is_floating_point() or each.is_complex()):
            dtype = self.cast(each.dtype)
            return each if each.dtype is dtype else each.to(dtype)
        return each

    def taken(self, each: Tensor) -> Tensor:
        """What goes in, as it is in this run."""
        cast: Tensor = self.cast(each)
        if not self._moved or not (cast.is_floating_point() or cast.is_complex()):
            return cast
        by = torch.randint(-1, 2, cast.shape, generator=torch.Generator().manual_seed(self._moved), device="cpu")
        return cast * (1 + by.to(cast.dtype) * torch.finfo(cast.dtype).eps)

    def _drawn(self, func: Any, args: Any, kwargs: Any) -> Any:
        self.drawn = True
        torch.default_generator.manual_seed(0)
        if kwargs.get("generator") is not None:
            kwargs["generator"].manual_seed(0)
        changed = args[0] if func._schema.is_mutable else None
        args = tree_map_only(Tensor, Tensor.contiguous, args) if changed is None else args  # whose order numbers have
        if changed is None or changed.is_contiguous():
            return func(*args, **kwargs)
        changed.copy_(func(torch.empty_like(changed, memory_format=torch.contiguous_format), *args[1:], **kwargs))
        return changed


def _without_dropout(func: Any, args: Any) -> list[Any]:
    names = [each.name for each in func._schema.arguments]
    return [0.0 if name == "p" else each for name, each in zip(names, args, strict=False)]


ATTENTION = (F.scaled_dot_product_attention, aten.scaled_dot_product_attention.default)


def plain_attention(
    func: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    *how: Any,
    **by: Any,
) -> Tensor:
    """Attention without dropout, whose mask is another in every kernel."""
    made: Tensor = func(query, key, value, attn_mask, 0.0, *how, **by)
    return made


class AsAsked(TorchFunctionMode):
    """Within, batch norms are what is asked for: of parts of the batch, and with statistics as wide as everywhere. And
    attention has no dropout. What stands in for a function of torch's takes its names, as well as its places."""

    def __init__(self, parts: BatchParts) -> None:
        super().__init__()
        plain = aten.batch_norm.default
        self._normalise = WideStatistics(NormByParts(parts) if parts.count > 1 else plain)

    def __enter__(self) -> Any:
        F.scaled_dot_product_attention = partial(plain_attention, ATTENTION[0])  # which torch's own functions call
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        F.scaled_dot_product_attention = ATTENTION[0]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.batch_norm:
            return self._batch_norm(*args, **kwargs)
        if func in (torch.batch_norm, aten.batch_norm.default):
            return self._batch_norm_op(*args, **kwargs)
        return plain_attention(func, *args, **kwargs) if func in ATTENTION else func(*args, **kwargs)

    def _batch_norm(
        self,
        input: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        """``F.batch_norm``, which has other places for the same."""
        return self._normalise(input, weight, bias, running_mean, running_var, training, momentum, eps, False)

    def _batch_norm_op(
        self,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        training: bool,
        momentum: float,
        eps: float,
        cudnn_enabled: bool,
    ) -> Tensor:
        """``torch.batch_norm``."""
        how = (training, momentum, eps, cudnn_enabled)
        return self._normalise(input, weight, bias, running_mean, running_var, *how)
