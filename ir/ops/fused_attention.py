"""Attention as one op, forward and backward, on any device: ``softmax(q k' * scale + mask) v``.

    out[b h s v], logsumexp[b h s] = shardfx.attention(q[b h s e], k[b g t e], v[b g t v], mask, causal, scale, ...)

The ``h`` query heads share the ``g`` key heads in groups of ``h / g``. A mask has 2 or 4 dims that broadcast to
``[b, h, s, t]``: bool (False is left out) or of the dtype of ``q`` (added). ``causal``: query ``i`` sees the keys up to
``i``; ``window``, ``[left, right]``: those from ``i - left`` to ``i + right``; ``q_ids[b s]``, ``k_ids[b t]``: those
with its id; each hides keys that a mask leaves. A query that sees no key gets zeros, and a logsumexp of 0.
``scale`` is ``1 / sqrt(e)`` where it is None; ``softcap`` ``c`` makes ``c * tanh(s / c)`` of each scaled product ``s``;
``sinks[h]`` are a further logit of each query, of no value; ``relative_bias[h, 2 s - 1]`` is added to scores by the
distance of key ``j`` from query ``i``, at ``j - i + s - 1``; ``flat``: scores are 0, and count in gradients alone. A
rank's ``box`` of the global ``[b, h, s, t]`` says where its queries and keys stand, and what dropout of ``p`` draws.

Torch's fused kernels compute it where they can (:mod:`.context.attention_kernels`), on CUDA else compiled FlexAttention
(:mod:`.context.flex_kernels`), and plain ops where not. All of them give the same logsumexp, so that a forward by one
may have its backward by another. On CUDA the kernel is torch's own choice of cuDNN, flash and memory-efficient
(``torch.nn.attention.sdpa_kernel`` restricts it).

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
from .context.flex_kernels import Scored, flex_backward, flex_forward, flex_takes
from .context.plain_attention import Given, drawn, gradient_of_sinks, wide, with_sinks
from .context.striped_rows import backward_by_stripes, forward_by_stripes, stripes
from .context.window_tiles import QueryTile, backward_by_tiles, forward_by_tiles, none_seen, own_rows, tiles

NAMED = "window", "q_ids", "k_ids", "softcap", "sinks", "relative_bias", "flat"
"""The arguments that graphs give by name: what queries see, and how scores are changed."""
NAMES = "causal", "scale", "p", "seed", "number", "box", *NAMED
HOW = "Tensor? mask=None, bool causal=False, float? scale=None"
DRAW = "float p=0.0, Tensor? seed=None, int number=0, int[] box=[], "
DRAW += "int[] window=[], Tensor? q_ids=None, Tensor? k_ids=None, float softcap=0.0, Tensor? sinks=None, "
DRAW += "Tensor? relative_bias=None, bool flat=False"
DEFAULTS: tuple[Any, ...] = False, None, 0.0, None, 0, [], [], None, None, 0.0, None, None, False
"""Of the arguments from ``causal`` on."""
BACKWARD: tuple[Any, ...] = None, *DEFAULTS[:2], False, *DEFAULTS[2:], []
"""Of the arguments of the backward from ``mask`` on."""


def _like_forward(q: Tensor, k: Tensor, v: Tensor, *how: Any) -> tuple[Tensor, Tensor]:
    (q,) = dense_rows(q)
    out = torch.empty_like(q) if q.shape[-1] == v.shape[-1] else q.new_empty((*q.shape[:3], v.shape[-1]))
    return out, q.new_empty(q.shape[:3], dtype=wide(q.dtype))


def _like_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *how: Any) -> tuple[Tensor, ...]:
    *_, mask, _, _, of_mask, _, _, _, box, _, _, _, _, sinks, bias, _, rows = [*how, *BACKWARD[max(len(how) - 2, 0) :]]
    of_mask, of_bias = _wanted(of_mask, mask, bias)
    made = (q.new_empty(0) if each is None else each.new_empty(each.shape) for each in (of_mask, sinks, of_bias))
    return *(torch.empty_like(t) for t in own_rows(dense_rows(q, k, v), box, rows)), *made


def _wanted(asked: bool, mask: Given, bias: Given) -> tuple[Given, Given]:
    """The mask and the relative bias that get gradients."""
    return mask if asked and mask is not None and mask.is_floating_point() else None, bias if asked else None


def _by_tiles(window: Sequence[int], ids: Sequence[Given], softcap: float, bias: Given, flat: bool) -> bool:
    """Whether attention is computed by tiles of queries."""
    return bool(window) or ids[0] is not None or softcap != 0 or bias is not None or flat


def _forward(q: Tensor, k: Tensor, v: Tensor, mask: Given, causal: bool, *how: Any) -> tuple[Tensor, Tensor]:
    return forward_by(kernel_for(q, k, v, mask, causal, *how[-3:]), q, k, v, mask, causal, *how)


def _backward(grad: Tensor, qkv: Any, *given: Any) -> tuple[Tensor, ...]:
    (q, k, v), (_, _, mask, causal, _, of_mask, *_) = qkv, given
    return backward_by("" if of_mask else kernel_for(q, k, v, mask, causal, *given[-3:]), grad, qkv, *given)


@define(
    f"attention(Tensor q, Tensor k, Tensor v, {HOW}, {DRAW}) -> (Tensor out, Tensor logsumexp)", shapes=_like_forward
)
def attention(q: Tensor, k: Tensor, v: Tensor, mask: Given = None, *how: Any) -> tuple[Tensor, Tensor]:
    """Attention, and the logsumexp of each query's scores."""
    given = [*how, *DEFAULTS[len(how) :]]
    causal, scale, p, seed, number, box, window, *ids, softcap, sinks, bias, flat = given
    q, k, v = dense_rows(q, k, v)
    if sinks is not None:
        rest = p, seed, number, box, window, *ids, softcap, None, bias, flat
        out, logsumexp = attention(q, k, v, mask, causal, scale, *rest)
        out, logsumexp = with_sinks(out, logsumexp, sinks)
        return laid_like(out, q) if out.shape == q.shape else out.contiguous(), logsumexp
    if flat and none_seen(ids):
        out, logsumexp = _like_forward(q, k, v)
        return out.zero_(), logsumexp.zero_()
    if flex_takes(q, k, v, mask, p, softcap, flat):
        return flex_forward(q, k, v, Scored(causal, scale, box, window, ids, softcap, bias, flat))
    if len(striped := stripes(q, k, box, mask, ids[0])) > 1:
        named = dict(zip(NAMES, given, strict=True))
        return forward_by_stripes(attention, striped, _like_forward(q, k, v), (q, k, v), named)
    if _by_tiles(window, ids, softcap, bias, flat):

        def one(tile: QueryTile, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            keep = drawn(q, k, p, seed, number, tile.box)
            return _forward(q, k, v, tile.mask, False, scale, keep, p, softcap, flat)

        return forward_by_tiles(q, k, v, tiles(q, k, causal, box, window, ids, (), mask, bias), one)
    keep, box = drawn(q, k, p, seed, number, box), box if causal else []
    if len(box) == 4 and mask is None and keep is None:
        return forward_from(box[2], q, k, v, lambda own, k, v: attention(q, k, v, None, own, scale))
    mask, causal = (seen_mask(q, k, mask, box), False) if box else (mask, causal)
    return _forward(q, k, v, mask, causal, scale, keep, p, softcap, flat)


@define(
    f"attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor logsumexp, {HOW}, "
    f"bool of_mask=False, {DRAW}, int[] rows=[]) "
    "-> (Tensor grad_q, Tensor grad_k, Tensor grad_v, Tensor grad_mask, Tensor grad_sinks, Tensor grad_bias)",
    shapes=_like_backward,
)
def attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor, mask: Given = None, *how: Any
) -> tuple[Tensor, ...]:
    """The gradients of q, k, v, of the mask and the relative bias (if asked for), and of the sinks; in a window, those
    of some ``rows`` alone, ``[first, number]``: of queries, which see keys before and behind them, and of the keys
    there, which others see too.
    """
    given = [*how, *BACKWARD[1 + len(how) :]]
    causal, scale, of_mask, p, *draw, window, q_ids, k_ids, softcap, sinks, bias, flat, rows = given
    grad, q, k, v, out = dense_rows(grad, q, k, v, out)
    if sinks is not None:
        rest = mask, causal, scale, of_mask, p, *draw, window, q_ids, k_ids, softcap, None, bias, flat, rows
        grads: tuple[Tensor, ...] = attention_backward(grad, q, k, v, out, logsumexp, *rest)
        grad, out, logsumexp = (own_rows((each, k, v), draw[2], rows)[0] for each in (grad, out, logsumexp))
        return *grads[:4], gradient_of_sinks(grad, out, logsumexp, sinks), grads[5]
    if flat and none_seen((q_ids, k_ids)):
        grads = _like_backward(grad, q, k, v, out, logsumexp, mask, *how)
        return tuple(each.zero_() for each in grads)
    if flex_takes(q, k, v, bias if of_mask and mask is None else mask, p, softcap, flat):
        how = Scored(causal, scale, draw[2], window, (q_ids, k_ids), softcap, bias, flat)
        return *flex_backward(grad, (q, k, v), out, logsumexp, how, rows), *(q.new_empty(0) for _ in range(3))
    if len(striped := stripes(q, k, draw[2], mask, q_ids)) > 1:
        wanted, named = _wanted(of_mask, mask, bias), dict(zip(NAMES, (*given[:2], *given[3:-1]), strict=True))
        return backward_by_stripes(attention_backward, striped, (grad, q, k, v, out, logsumexp), wanted, named)
    if _by_tiles(window, (q_ids, k_ids), softcap, bias, flat):

        def one(tile: QueryTile, *qkv: Tensor) -> tuple[Tensor, ...]:
            of_rows = (each[:, :, tile.rows] for each in (out, logsumexp))
            keep = drawn(qkv[0], qkv[1], p, draw[0], draw[1], tile.box)
            how = tile.mask, False, scale, of_mask, keep, p, softcap, flat
            return _backward(grad[:, :, tile.rows], qkv, *of_rows, *how)

        parts = tiles(q, k, causal, draw[2], window, (q_ids, k_ids), rows, mask, bias)
        made = backward_by_tiles(q, k, v, parts, one, *_wanted(of_mask, mask, bias))
        own = own_rows((q, k, v), draw[2], rows), own_rows(made[:3], draw[2], rows)
        return *(laid_like(grad, like) for like, grad in zip(*own, strict=True)), made[3], q.new_empty(0), made[4]
    keep, box = drawn(q, k, p, *draw), draw[2] if causal else []
    if len(box) == 4 and mask is None and keep is None:
        backward = lambda own, *kv: attention_backward(grad, q, kv[0], kv[1], out, logsumexp, None, own, scale)  # noqa: E731
        return *backward_from(box[2], q, k, v, backward), *(q.new_empty(0) for _ in range(2))
    mask, causal = (seen_mask(q, k, mask, box), False) if box else (mask, causal)
    made = _backward(grad, (q, k, v), out, logsumexp, mask, causal, scale, of_mask, keep, p, softcap, flat)
    return *made, *(q.new_empty(0) for _ in range(2))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, mask, causal, scale, p, seed, number, box, window, q_ids, k_ids, softcap, sinks, bias, flat = inputs
    ctx.save_for_backward(q, k, v, *output, mask, seed, q_ids, k_ids, sinks, bias)
    ctx.how, ctx.draw, ctx.scores = (causal, scale), (p, number, box, window), (softcap, flat)
    ctx.set_materialize_grads(False)


def _gradient(ctx: Any, grad: Tensor | None, of_logsumexp: Tensor | None) -> tuple[Any, ...]:
    q, k, v, out, logsumexp, mask, seed, q_ids, k_ids, sinks, bias = ctx.saved_tensors
    p, *draw = ctx.draw
    wanted = [each is not None and ctx.needs_input_grad[i] for i, each in ((3, mask), (15, bias))]
    how = mask, *ctx.how, any(wanted), p, seed, *draw, q_ids, k_ids, ctx.scores[0], sinks, bias, ctx.scores[1]
    grads: list[Any] = [None] * 6
    if grad is not None:
        grads = [*attention_backward(grad, q, k, v, out, logsumexp, *how)]
    if of_logsumexp is not None:  # a column of values which are 0, and of results which are -1: weight * its gradient
        rows, minus = (
            torch.nn.functional.pad(each[..., None].to(out.dtype), (0, out.shape[-1] - 1))
            for each in (of_logsumexp, torch.full_like(of_logsumexp, -1))
        )
        more = attention_backward(rows, q, k, torch.zeros_like(v), minus, logsumexp, *how)
        for place in (0, 1, 3, 4, 5):
            grads[place] = more[place] if grads[place] is None else grads[place] + more[place]
    kept = zip((wanted[0], sinks is not None, wanted[1]), grads[3:], strict=True)
    of_mask, of_sinks, of_bias = (grad if each else None for each, grad in kept)
    return (*grads[:3], of_mask, *[None] * 10, of_sinks, of_bias, None)


torch.library.register_autograd("shardfx::attention", _gradient, setup_context=_setup, lib=LIBRARY)
