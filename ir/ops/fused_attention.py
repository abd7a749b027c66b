"""Attention as one op, forward and backward, on any device: ``softmax(q k' * scale + mask) v``.

    out[b h s v], logsumexp[b h s] = shardfx.attention(q[b h s e], k[b g t e], v[b g t v], mask, causal, scale, ...)

The ``h`` query heads share the ``g`` key heads in groups of ``h / g``. A mask has 2 or 4 dims that broadcast to
``[b, h, s, t]``: bool (False is left out) or of the dtype of ``q`` (added). ``causal``: query ``i`` sees the keys up to
``i``; ``window``, ``[left, right]``: those from ``i - left`` to ``i + right``, without any mask. A query that sees no
key gets zeros, and a logsumexp of 0. ``scale`` is ``1 / sqrt(e)`` where it is None. A rank's ``box`` of the global
``[b, h, s, t]`` says what its queries see, and what dropout of ``p`` draws.

Torch's fused kernels compute it where they can, and :func:`forward_by_hand` where not. All of them give the same
logsumexp, so that a forward by one may have its backward by another. On CUDA the kernel is torch's own choice
(``torch.nn.attention.sdpa_kernel`` restricts it): cuDNN, flash, memory-efficient.

Memory layout, on every device and by every kernel: the logsumexp is contiguous, ``out`` is laid out as
``torch.empty_like(q)`` (contiguous where values have another size than keys), each gradient as ``torch.empty_like`` of
its operand: what a kernel gives otherwise is copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

from .computing.library import LIBRARY, define
from .context.causal_rows import backward_from, forward_from, seen_mask
from .context.plain_attention import (
    Given,
    Scale,
    Tensors,
    backward_by_hand,
    bias_of,
    drawn,
    forward_by_hand,
    per_key_head,
    per_query_head,
    wide,
)
from .context.window_tiles import QueryTile, backward_by_tiles, forward_by_tiles, own_rows, tiles

aten = torch.ops.aten

HOW = "Tensor? mask=None, bool causal=False, float? scale=None"
DRAW = "float p=0.0, Tensor? seed=None, int number=0, int[] box=[], int[] window=[]"
ALIGNED = 32
"""The row alignment of a logsumexp in torch's memory-efficient kernel."""
TILE = 128
"""The tile size of queries and keys in cuDNN's kernels."""


# ---- memory layout ---------------------------------------------------------------------------------------------


def _dense(*tensors: Tensor) -> list[Tensor]:
    """The tensors with a last dim of stride 1, which fused kernels need; the CPU's gives wrong numbers for others."""
    return [t if t.stride(-1) == 1 or t.shape[-1] == 1 else t.contiguous() for t in tensors]


def _laid_like(x: Tensor, like: Tensor) -> Tensor:
    """``x`` in the memory layout of ``torch.empty_like(like)``, copied if necessary."""
    strides = torch.empty_like(like, device="meta").stride()
    if all(a == b or n == 1 for n, a, b in zip(x.shape, x.stride(), strides, strict=True)):
        return x
    return torch.empty_like(like).copy_(x)


def _rows_first(x: Tensor) -> Tensor:
    """``x`` [batch, heads, rows, head] with all heads of a row together, as a projection behind attention gives its
    gradient."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


# ---- torch's kernels -------------------------------------------------------------------------------------------


def _kernel(q: Tensor, k: Tensor, v: Tensor, mask: Given, causal: bool, p: float) -> str:
    """The kernel of torch that takes the call: ``cpu``, ``cudnn``, ``flash``, ``efficient``, or none (``""``).

    The answer is the same forward and backward: torch is asked as for a call that has gradients.
    """
    if p != 0 or q.shape[-1] != v.shape[-1] or not q.numel() or not k.numel():
        return ""
    if q.device.type == "cpu":
        return "cpu"
    if q.shape[-1] % 8:
        return ""
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


def _forward_by(
    kernel: str, q: Tensor, k: Tensor, v: Tensor, mask: Given, causal: bool, scale: Scale, keep: Given, p: float
) -> tuple[Tensor, Tensor]:
    """The forward by the named kernel."""
    bias = _bias(q, k, mask, kernel) if kernel else None
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
        made = forward_by_hand(q, k, v, mask, causal, scale, keep, p)
    out, rows = made[0], made[1][:, :, : q.shape[2]].reshape(q.shape[:3])  # cuDNN's logsumexp has a fourth dim
    return _laid_like(out, q) if out.shape == q.shape else out.contiguous(), rows.contiguous()


def _backward_by(
    kernel: str, grad: Tensor, qkv: Tensors, out: Tensor, logsumexp: Tensor, mask: Given, causal: bool, *how: Any
) -> tuple[Tensor, ...]:
    """The backward by a kernel that takes the call; which one gave the logsumexp does not matter. ``how`` begins
    with the scale (see :func:`backward_by_hand`)."""
    (q, k, v), scale = qkv, how[0]
    bias = _bias(q, k, mask, kernel) if kernel else None
    logsumexp = logsumexp.contiguous()  # flash takes any other without an error, and gives wrong gradients
    state = [torch.empty((), dtype=torch.int64, device=q.device)] * 2  # of dropout, which no kernel does here
    made: Sequence[Tensor]
    if kernel == "cpu":
        op = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
        made = op(grad, q, k, v, out, logsumexp, 0.0, causal, attn_mask=bias, scale=scale)
    elif kernel == "cudnn":  # whose compiled graphs are found by the layout of q, k and v alone up to torch 2.11
        op, sizes = aten._scaled_dot_product_cudnn_attention_backward.default, (q.shape[2], k.shape[2])
        grad, out = _rows_first(grad), _laid_like(out, q)
        rest = (logsumexp[..., None], *state, None, None, None, *sizes, 0.0, causal)
        made = op(grad, q, k, v, out, *rest, scale=scale)
    elif kernel == "flash":
        op, sizes = aten._scaled_dot_product_flash_attention_backward.default, (q.shape[2], k.shape[2])
        made = op(grad, q, k, v, out, logsumexp, None, None, *sizes, 0.0, causal, *state, scale=scale)
    elif kernel == "efficient":
        op, many = aten._scaled_dot_product_efficient_attention_backward.default, [per_query_head(t, q) for t in (k, v)]
        out = _rows_first(out)  # 16 bits are read so, whatever its strides
        rows = F.pad(logsumexp, (0, -q.shape[2] % ALIGNED), value=torch.inf)
        wanted = [True, True, True, False]
        made = op(grad, q, *many, bias, out, rows, *state, 0.0, wanted, causal, scale=scale)
        made = (made[0], per_key_head(made[1], k), per_key_head(made[2], v))
    else:
        made = backward_by_hand(grad, qkv, out, logsumexp, mask, causal, *how)
    grad_q, grad_k, grad_v = (_laid_like(x, like) for x, like in zip(made, qkv, strict=False))
    return grad_q, grad_k, grad_v, q.new_empty(0) if kernel else made[3]


# ---- the ops, and the gradient ---------------------------------------------------------------------------------


def _like_forward(q: Tensor, k: Tensor, v: Tensor, *how: Any) -> tuple[Tensor, Tensor]:
    (q,) = _dense(q)
    out = torch.empty_like(q) if q.shape[-1] == v.shape[-1] else q.new_empty((*q.shape[:3], v.shape[-1]))
    return out, q.new_empty(q.shape[:3], dtype=wide(q.dtype))


def _like_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *how: Any) -> tuple[Tensor, ...]:
    mask, of_mask = how[2] if len(how) > 2 else None, len(how) > 5 and how[5]
    grad_mask = mask.new_empty(mask.shape) if of_mask and mask is not None else q.new_empty(0)
    box, rows = (how[9], how[11]) if len(how) > 11 else ([], [])
    return (*(torch.empty_like(t) for t in own_rows(_dense(q, k, v), box, rows)), grad_mask)


def _with_defaults(args: Sequence[Any], *defaults: Any) -> Sequence[Any]:
    return [*args, *defaults[len(args) :]]


@define(
    f"attention(Tensor q, Tensor k, Tensor v, {HOW}, {DRAW}) -> (Tensor out, Tensor logsumexp)", shapes=_like_forward
)
def attention(q: Tensor, k: Tensor, v: Tensor, mask: Given = None, *how: Any) -> tuple[Tensor, Tensor]:
    """Attention, and the logsumexp of each query's scores."""
    causal, scale, p, seed, number, box, window = _with_defaults(how, False, None, 0.0, None, 0, [], [])
    q, k, v = _dense(q, k, v)
    if window:
        one = lambda tile, *qkv: attention(*qkv, tile.mask, False, scale, p, seed, number, tile.box)  # noqa: E731
        return forward_by_tiles(q, k, v, tiles(q, k, causal, window, box, mask), one)
    keep, box = drawn(q, k, p, seed, number, box), box if causal else []
    if len(box) == 4 and mask is None and keep is None:
        return forward_from(box[2], q, k, v, lambda own, k, v: attention(q, k, v, None, own, scale))
    mask, causal = (seen_mask(q, k, mask, box), False) if box else (mask, causal)
    return _forward_by(_kernel(q, k, v, mask, causal, p), q, k, v, mask, causal, scale, keep, p)


@define(
    f"attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor logsumexp, {HOW}, "
    f"bool of_mask=False, {DRAW}, int[] rows=[]) -> (Tensor grad_q, Tensor grad_k, Tensor grad_v, Tensor grad_mask)",
    shapes=_like_backward,
)
def attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor, mask: Given = None, *how: Any
) -> tuple[Tensor, ...]:
    """The gradients of q, k, v and (if asked for) of the mask; in a window, those of some ``rows`` alone, ``[first,
    number]``: of queries, which see keys before and behind them, and of the keys there, which others see too."""
    defaults: Any = False, None, False, 0.0, None, 0, [], [], []
    causal, scale, of_mask, p, *draw, window, rows = _with_defaults(how, *defaults)
    grad, q, k, v, out = _dense(grad, q, k, v, out)
    if window:

        def one(tile: QueryTile, *qkv: Tensor) -> tuple[Tensor, ...]:
            of_rows = (each[:, :, tile.rows] for each in (out, logsumexp))
            given = (grad[:, :, tile.rows], *qkv, *of_rows, tile.mask)
            grads: tuple[Tensor, ...] = attention_backward(*given, False, scale, False, p, *draw[:2], tile.box)
            return grads

        made = backward_by_tiles(q, k, v, tiles(q, k, causal, window, draw[2], mask, rows), one)
        own = own_rows((q, k, v), draw[2], rows), own_rows(made[:3], draw[2], rows)
        return *(_laid_like(grad, like) for like, grad in zip(*own, strict=True)), made[3]
    keep, box = drawn(q, k, p, *draw), draw[2] if causal else []
    if len(box) == 4 and mask is None and keep is None:
        backward = lambda own, *kv: attention_backward(grad, q, kv[0], kv[1], out, logsumexp, None, own, scale)  # noqa: E731
        return backward_from(box[2], q, k, v, backward)
    mask, causal = (seen_mask(q, k, mask, box), False) if box else (mask, causal)
    kernel = "" if of_mask else _kernel(q, k, v, mask, causal, p)
    return _backward_by(kernel, grad, (q, k, v), out, logsumexp, mask, causal, scale, of_mask, keep, p)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, mask, causal, scale, p, seed, *draw = inputs
    ctx.save_for_backward(q, k, v, *output, mask, seed)
    ctx.how, ctx.draw = (causal, scale), (p, *draw)
    ctx.set_materialize_grads(False)


def _gradient(ctx: Any, grad: Tensor | None, of_logsumexp: Tensor | None) -> tuple[Any, ...]:
    if grad is None:
        return (None,) * 11
    q, k, v, out, logsumexp, mask, seed = ctx.saved_tensors
    p, *draw = ctx.draw
    of_mask = mask is not None and ctx.needs_input_grad[3]
    grads = attention_backward(grad, q, k, v, out, logsumexp, mask, *ctx.how, of_mask, p, seed, *draw)
    return (*grads[:3], grads[3] if of_mask else None, *[None] * 7)


torch.library.register_autograd("shardfx::attention", _gradient, setup_context=_setup, lib=LIBRARY)
