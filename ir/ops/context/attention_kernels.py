"""Torch's kernels of attention: which one takes a call, its forward and its backward, and the memory layout of both.

On the CPU its flash kernel, on CUDA torch's own choice of cuDNN, flash and memory-efficient; else attention op by op.
Needs torch alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

from .plain_attention import (
    Given,
    Scale,
    Tensors,
    backward_by_hand,
    bias_of,
    forward_by_hand,
    per_key_head,
    per_query_head,
    scale_of,
)

aten = torch.ops.aten

ALIGNED = 32
"""The row alignment of a logsumexp in torch's memory-efficient kernel."""
TILE = 128
"""The tile size of queries and keys in cuDNN's kernels."""


# ---- memory layout ---------------------------------------------------------------------------------------------


def dense_rows(*tensors: Tensor) -> list[Tensor]:
    """The tensors with a last dim of stride 1, which fused kernels need; the CPU's gives wrong numbers for others."""
    return [t if t.stride(-1) == 1 or t.shape[-1] == 1 else t.contiguous() for t in tensors]


def laid_like(x: Tensor, like: Tensor) -> Tensor:
    """``x`` in the memory layout of ``torch.empty_like(like)``, copied if necessary."""
    strides = torch.empty_like(like, device="meta").stride()
    if all(a == b or n == 1 for n, a, b in zip(x.shape, x.stride(), strides, strict=True)):
        return x
    return torch.empty_like(like).copy_(x)


def kernel_width(*tensors: Tensor) -> int:
    """The width of the widest tensor; on CUDA, rounded up to a multiple of 8."""
    width = max(t.shape[-1] for t in tensors)
    return width + -width % 8 if tensors[0].is_cuda else width


def of_one_width(scale: Scale, *tensors: Tensor) -> tuple[Scale, Sequence[Tensor]]:
    """The scale, and the tensors with zero columns up to the width that fused kernels take of all; queries first."""
    width = kernel_width(*tensors)
    if all(t.shape[-1] == width for t in tensors):
        return scale, tensors
    return scale_of(tensors[0], scale), [F.pad(t, (0, width - t.shape[-1])) for t in tensors]


def rows_first(x: Tensor) -> Tensor:
    """``x`` [batch, heads, rows, head] with all heads of a row together, as a projection behind attention gives its
    gradient."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


# ---- torch's kernels -------------------------------------------------------------------------------------------


def kernel_for(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Given,
    causal: bool,
    p: float = 0.0,
    softcap: float = 0.0,
    flat: bool = False,
) -> str:
    """The kernel of torch that takes the call: ``cpu``, ``cudnn``, ``flash``, ``efficient``, or none (``""``).

    The answer is the same forward and backward: torch is asked as for a call that has gradients.
    """
    if p != 0 or softcap != 0 or flat or not q.numel() or not k.numel() or not v.numel():
        return ""
    if q.device.type == "cpu":
        return "cpu"
    width = kernel_width(q, v)
    q, k, v = (t if t.shape[-1] == width else t.new_empty((*t.shape[:-1], width)) for t in (q, k, v))
    with torch.enable_grad():
        return _cuda_kernel(q if q.is_inference() else q.detach().requires_grad_(), k, v, mask, causal)


def _cuda_kernel(q: Tensor, k: Tensor, v: Tensor, mask: Given, causal: bool) -> str:
    """The kernel of torch's choice, if it is suitable; for grouped heads the memory-efficient one is not."""
    cuda, groups = torch.backends.cuda, k.shape[1] != q.shape[1]
    if mask is None and (not causal or q.shape[2] == k.shape[2]):
        params = cuda.SDPAParams(q, k, v, None, 0.0, causal, groups)
        if _suits_cudnn(q, k, v) and cuda.can_use_cudnn_attention(params):
            choice = aten._fused_sdp_choice.default(q, k, v, None, 0.0, causal, enable_gqa=groups)
            if choice == SDPBackend.CUDNN_ATTENTION.value:
                return "cudnn"
        if cuda.can_use_flash_attention(params):
            return "flash"
    if groups:
        k, v = (t[:, :1].expand(-1, q.shape[1], -1, -1) for t in (k, v))
    params = cuda.SDPAParams(q, k, v, None, 0.0, causal, False)
    return "efficient" if cuda.can_use_efficient_attention(params) else ""


def _suits_cudnn(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether no tile of cuDNN's is partial, and all rows are aligned to 16 bytes, which torch does not ask of a call.

    Gradients of partial tiles can be NaN before cuDNN 9.26, and for one query in it
    (https://github.com/pytorch/pytorch/issues/196678, https://github.com/NVIDIA/cudnn-frontend/issues/1072).
    """
    if q.shape[2] % TILE or k.shape[2] % TILE:
        return False
    return all(all(n and n % 8 == 0 for n in t.stride()[:-1]) and t.storage_offset() % 8 == 0 for t in (q, k, v))


def _bias(q: Tensor, k: Tensor, mask: Given, kernel: str) -> Tensor | None:
    """A mask as a kernel needs it: for the memory-efficient one expanded, with rows aligned to 16 in memory."""
    bias = bias_of(mask, q.dtype)
    if bias is None or kernel == "cpu":
        return bias
    keys = k.shape[2]
    rows = bias.contiguous().expand(*q.shape[:3], keys)  # F.pad leaves what lies innermost there
    return F.pad(rows, (0, -keys % 16))[..., :keys]


def forward_by(
    kernel: str, q: Tensor, k: Tensor, v: Tensor, mask: Given, causal: bool, scale: Scale, *how: Any
) -> tuple[Tensor, Tensor]:
    """The forward by the named kernel. ``how`` is that of :func:`forward_by_hand`."""
    bias, like, width = _bias(q, k, mask, kernel) if kernel else None, q, v.shape[-1]
    if kernel:
        scale, (q, k, v) = of_one_width(scale, q, k, v)
    made: tuple[Any, ...]
    if kernel == "cpu":
        op = aten._scaled_dot_product_flash_attention_for_cpu.default
        made = op(q, k, v, 0.0, causal, attn_mask=bias, scale=scale)
    elif kernel == "cudnn":
        op = aten._scaled_dot_product_cudnn_attention.default
        made = op(q, k, v, None, True, 0.0, causal, False, scale=scale)
    elif kernel == "flash":
        made = aten._scaled_dot_product_flash_attention.default(q, k, v, 0.0, causal, False, scale=scale)
    elif kernel == "efficient":
        op, many = aten._scaled_dot_product_efficient_attention.default, [per_query_head(t, q) for t in (k, v)]
        made = op(q, *many, bias, True, 0.0, causal, scale=scale)
    else:
        made = forward_by_hand(q, k, v, mask, causal, scale, *how)
    out, rows = made[0][..., :width], made[1][:, :, : q.shape[2]].reshape(q.shape[:3])  # cuDNN's has a fourth dim
    return laid_like(out, like) if out.shape == like.shape else out.contiguous(), rows.contiguous()


def backward_by(
    kernel: str, grad: Tensor, qkv: Tensors, out: Tensor, logsumexp: Tensor, mask: Given, causal: bool, *how: Any
) -> tuple[Tensor, ...]:
    """The backward by a kernel that takes the call; which one gave the logsumexp does not matter. ``how`` begins
    with the scale (see :func:`backward_by_hand`)."""
    (q, k, v), scale = qkv, how[0]
    bias = _bias(q, k, mask, kernel) if kernel else None
    if kernel:
        scale, (q, k, v, grad, out) = of_one_width(scale, q, k, v, grad, out)
    logsumexp = logsumexp.contiguous()  # flash takes any other without an error, and gives wrong gradients
    state = [torch.empty((), dtype=torch.int64, device=q.device)] * 2  # of dropout, which no kernel does here
    made: Sequence[Tensor]
    if kernel == "cpu":
        op = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
        made = op(grad, q, k, v, out, logsumexp, 0.0, causal, attn_mask=bias, scale=scale)
    elif kernel == "cudnn":  # whose compiled graphs are found by the layout of q, k and v alone up to torch 2.11
        op, sizes = aten._scaled_dot_product_cudnn_attention_backward.default, (q.shape[2], k.shape[2])
        grad, out = rows_first(grad), laid_like(out, q)
        rest = (logsumexp[..., None], *state, None, None, None, *sizes, 0.0, causal)
        made = op(grad, q, k, v, out, *rest, scale=scale)
    elif kernel == "flash":
        op, sizes = aten._scaled_dot_product_flash_attention_backward.default, (q.shape[2], k.shape[2])
        made = op(grad, q, k, v, out, logsumexp, None, None, *sizes, 0.0, causal, *state, scale=scale)
    elif kernel == "efficient":
        op, many = aten._scaled_dot_product_efficient_attention_backward.default, [per_query_head(t, q) for t in (k, v)]
        out = rows_first(out)  # 16 bits are read so, whatever its strides
        rows = F.pad(logsumexp, (0, -q.shape[2] % ALIGNED), value=torch.inf)
        wanted = [True, True, True, False]
        made = op(grad, q, *many, bias, out, rows, *state, 0.0, wanted, causal, scale=scale)
        made = (made[0], per_key_head(made[1], k), per_key_head(made[2], v))
    else:
        made = backward_by_hand(grad, qkv, out, logsumexp, mask, causal, *how)
    grad_q, grad_k, grad_v = (laid_like(x[..., : like.shape[-1]], like) for x, like in zip(made, qkv, strict=False))
    return grad_q, grad_k, grad_v, q.new_empty(0) if kernel else made[3]
