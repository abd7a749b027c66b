"""Attention as one op, forward and backward, on any device: ``softmax(q k' * scale + mask) v``.

    out[b h s v], logsumexp[b h s] = shardfx.attention(q[b h s e], k[b g t e], v[b g t v], mask, causal, scale, ...)

The ``h`` query heads share the ``g`` key heads in groups of ``h / g``. A mask has 2 or 4 dims that broadcast to
``[b, h, s, t]``: bool (False is left out) or of the dtype of ``q`` (added). ``causal``: query ``i`` sees the keys up to
``i``; ``window``, ``[left, right]``: those from ``i - left`` to ``i + right``; ``q_ids[b s]``, ``k_ids[b t]``: those
with its id. A window and ids are instead of a mask. A query that sees no key gets zeros, and a logsumexp of 0.
``scale`` is ``1 / sqrt(e)`` where it is None. A rank's ``box`` of the global ``[b, h, s, t]`` says what its queries
see, and what dropout of ``p`` draws.

Torch's fused kernels compute it where they can (:mod:`.context.attention_kernels`), and plain ops where not. All of
them give the same logsumexp, so that a forward by one may have its backward by another. On CUDA the kernel is torch's
own choice (``torch.nn.attention.sdpa_kernel`` restricts it): cuDNN, flash, memory-efficient.

Memory layout, on every device and by every kernel: the logsumexp is contiguous, ``out`` is laid out as
``torch.empty_like(q)`` (contiguous where values have another size than keys), each gradient as ``torch.empty_like`` of
its operand: what a kernel gives otherwise is copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .computing.library import LIBRARY, define
from .context.attention_kernels import backward_by, dense_rows, forward_by, kernel_for, laid_like
from .context.causal_rows import backward_from, forward_from, seen_mask
from .context.plain_attention import Given, drawn, wide
from .context.window_tiles import QueryTile, backward_by_tiles, forward_by_tiles, own_rows, tiles

HOW = "Tensor? mask=None, bool causal=False, float? scale=None"
DRAW = "float p=0.0, Tensor? seed=None, int number=0, int[] box=[], "
DRAW += "int[] window=[], Tensor? q_ids=None, Tensor? k_ids=None"
DEFAULTS: tuple[Any, ...] = False, None, 0.0, None, 0, [], [], None, None
"""Of the arguments from ``causal`` on."""


def _like_forward(q: Tensor, k: Tensor, v: Tensor, *how: Any) -> tuple[Tensor, Tensor]:
    (q,) = dense_rows(q)
    out = torch.empty_like(q) if q.shape[-1] == v.shape[-1] else q.new_empty((*q.shape[:3], v.shape[-1]))
    return out, q.new_empty(q.shape[:3], dtype=wide(q.dtype))


def _like_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *how: Any) -> tuple[Tensor, ...]:
    mask, of_mask = how[2] if len(how) > 2 else None, len(how) > 5 and how[5]
    grad_mask = mask.new_empty(mask.shape) if of_mask and mask is not None else q.new_empty(0)
    box, rows = (how[9], how[13]) if len(how) > 13 else ([], [])
    return (*(torch.empty_like(t) for t in own_rows(dense_rows(q, k, v), box, rows)), grad_mask)


def _with_defaults(args: Sequence[Any], *defaults: Any) -> Sequence[Any]:
    return [*args, *defaults[len(args) :]]


def _by_tiles(mask: Given, window: Sequence[int], ids: Sequence[Given]) -> bool:
    """Whether keys are seen by tiles."""
    found = bool(window) or ids[0] is not None
    if found and mask is not None:
        raise ValueError("attention takes a mask, or a window and ids")
    return found


@define(
    f"attention(Tensor q, Tensor k, Tensor v, {HOW}, {DRAW}) -> (Tensor out, Tensor logsumexp)", shapes=_like_forward
)
def attention(q: Tensor, k: Tensor, v: Tensor, mask: Given = None, *how: Any) -> tuple[Tensor, Tensor]:
    """Attention, and the logsumexp of each query's scores."""
    causal, scale, p, seed, number, box, window, *ids = _with_defaults(how, *DEFAULTS)
    q, k, v = dense_rows(q, k, v)
    if _by_tiles(mask, window, ids):
        one = lambda tile, *qkv: attention(*qkv, tile.mask, False, scale, p, seed, number, tile.box)  # noqa: E731
        return forward_by_tiles(q, k, v, tiles(q, k, causal, box, window, ids), one)
    keep, box = drawn(q, k, p, seed, number, box), box if causal else []
    if len(box) == 4 and mask is None and keep is None:
        return forward_from(box[2], q, k, v, lambda own, k, v: attention(q, k, v, None, own, scale))
    mask, causal = (seen_mask(q, k, mask, box), False) if box else (mask, causal)
    return forward_by(kernel_for(q, k, v, mask, causal, p), q, k, v, mask, causal, scale, keep, p)


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
    defaults: Any = *DEFAULTS[:2], False, *DEFAULTS[2:], []
    causal, scale, of_mask, p, *draw, window, q_ids, k_ids, rows = _with_defaults(how, *defaults)
    grad, q, k, v, out = dense_rows(grad, q, k, v, out)
    if _by_tiles(mask, window, (q_ids, k_ids)):

        def one(tile: QueryTile, *qkv: Tensor) -> tuple[Tensor, ...]:
            of_rows = (each[:, :, tile.rows] for each in (out, logsumexp))
            given = (grad[:, :, tile.rows], *qkv, *of_rows, tile.mask)
            grads: tuple[Tensor, ...] = attention_backward(*given, False, scale, False, p, *draw[:2], tile.box)
            return grads

        made = backward_by_tiles(q, k, v, tiles(q, k, causal, draw[2], window, (q_ids, k_ids), rows), one)
        own = own_rows((q, k, v), draw[2], rows), own_rows(made[:3], draw[2], rows)
        return *(laid_like(grad, like) for like, grad in zip(*own, strict=True)), made[3]
    keep, box = drawn(q, k, p, *draw), draw[2] if causal else []
    if len(box) == 4 and mask is None and keep is None:
        backward = lambda own, *kv: attention_backward(grad, q, kv[0], kv[1], out, logsumexp, None, own, scale)  # noqa: E731
        return backward_from(box[2], q, k, v, backward)
    mask, causal = (seen_mask(q, k, mask, box), False) if box else (mask, causal)
    kernel = "" if of_mask else kernel_for(q, k, v, mask, causal, p)
    return backward_by(kernel, grad, (q, k, v), out, logsumexp, mask, causal, scale, of_mask, keep, p)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, mask, causal, scale, p, seed, *draw, q_ids, k_ids = inputs
    ctx.save_for_backward(q, k, v, *output, mask, seed, q_ids, k_ids)
    ctx.how, ctx.draw = (causal, scale), (p, *draw)
    ctx.set_materialize_grads(False)


def _gradient(ctx: Any, grad: Tensor | None, of_logsumexp: Tensor | None) -> tuple[Any, ...]:
    if grad is None:
        return (None,) * 13
    q, k, v, out, logsumexp, mask, seed, *ids = ctx.saved_tensors
    p, *draw = ctx.draw
    of_mask = mask is not None and ctx.needs_input_grad[3]
    grads = attention_backward(grad, q, k, v, out, logsumexp, mask, *ctx.how, of_mask, p, seed, *draw, *ids)
    return (*grads[:3], grads[3] if of_mask else None, *[None] * 9)


torch.library.register_autograd("shardfx::attention", _gradient, setup_context=_setup, lib=LIBRARY)
