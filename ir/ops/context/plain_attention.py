"""Attention op by op, forward and backward, and the dropout of its weights.

    scores[b h s t] = q k' * scale + mask,   logsumexp[b h s],   out = exp(scores - logsumexp) v
    with a soft cap c: scores = c * tanh(q k' * scale / c) + mask;   flat: 0 + mask, with the gradients of these

For what no kernel of torch's takes. Needs torch alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..computing.library import Ints
from ..dropout import GOLDEN, kept, keyed, mix_
from .causal_rows import box_places

Given = Tensor | None
Tensors = tuple[Tensor, Tensor, Tensor]
Scale = float | None


def wide(dtype: torch.dtype) -> torch.dtype:
    """The accumulation dtype of scores, and the dtype of the logsumexp."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def bias_of(mask: Given, dtype: torch.dtype) -> Tensor | None:
    """A mask as an additive bias: 0 where it is True, -inf where it is False."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros((), dtype=dtype, device=mask.device).where(mask, -torch.inf)


def _products(q: Tensor, k: Tensor, scale: Scale, softcap: float) -> Tensor:
    """The scaled products ``[b h s t]``; with a soft cap, their hyperbolic tangents."""
    dtype = wide(q.dtype)
    products = (q.to(dtype) @ per_query_head(k, q).to(dtype).mT).mul_(scale_of(q, scale))
    return products.div_(softcap).tanh_() if softcap else products


def _scores(q: Tensor, k: Tensor, mask: Given, causal: bool, scale: Scale, softcap: float, flat: bool) -> Tensor:
    """The scores ``[b h s t]``, -inf where a query does not see a key."""
    scores = q.new_zeros((*q.shape[:3], k.shape[2]), dtype=wide(q.dtype)) if flat else _products(q, k, scale, softcap)
    if softcap:
        scores.mul_(softcap)
    bias = bias_of(mask, scores.dtype)
    if bias is not None:
        scores.add_(bias)
    if causal:
        unseen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu_(1)
        scores.masked_fill_(unseen, -torch.inf)
    return scores


def scale_of(q: Tensor, scale: float | None) -> float:
    """The scaling factor of scores."""
    return q.shape[-1] ** -0.5 if scale is None else scale


def per_query_head(k: Tensor, q: Tensor) -> Tensor:
    """Keys or values repeated for each query head."""
    return k.repeat_interleave(q.shape[1] // k.shape[1], 1) if k.shape[1] != q.shape[1] else k


def per_key_head(grad: Tensor, k: Tensor) -> Tensor:
    """The gradient of keys or values, summed over the query heads that share them."""
    return grad.unflatten(1, (k.shape[1], -1)).sum(2) if k.shape[1] != grad.shape[1] else grad


def forward_by_hand(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Given,
    causal: bool,
    scale: Scale,
    keep: Given = None,
    p: float = 0.0,
    softcap: float = 0.0,
    flat: bool = False,
) -> tuple[Tensor, Tensor]:
    """Attention op by op; ``keep`` (bool, ``[b, h, s, t]``) says what dropout leaves of the weights."""
    scores = _scores(q, k, mask, causal, scale, softcap, flat)
    logsumexp = scores.logsumexp(-1)
    logsumexp.masked_fill_(logsumexp == -torch.inf, 0.0).masked_fill_(logsumexp == torch.inf, torch.nan)  # as softmax
    weights = _kept(scores.sub_(logsumexp[..., None]).exp_(), keep, p)
    return (weights @ per_query_head(v, q).to(weights.dtype)).to(q.dtype), logsumexp


def backward_by_hand(
    grad: Tensor, qkv: Tensors, out: Tensor, logsumexp: Tensor, mask: Given, causal: bool, scale: Scale, *how: Any
) -> tuple[Tensor, ...]:
    """The gradients of q, k, v and (if asked for) of the mask, op by op, from what the forward gave; ``how`` is
    whether it is, ``keep``, ``p``, the soft cap, and whether scores are flat."""
    defaults: tuple[Any, ...] = False, None, 0.0, 0.0, False
    (q, k, v), (of_mask, keep, p, softcap, flat) = qkv, (*how, *defaults[len(how) :])
    dtype = wide(q.dtype)
    weights = _scores(q, k, mask, causal, scale, softcap, flat).sub_(logsumexp[..., None]).exp_()
    wide_grad = grad.to(dtype)
    of_weights = _kept(wide_grad @ per_query_head(v, q).to(dtype).mT, keep, p)
    of_scores = (of_weights - (wide_grad * out.to(dtype)).sum(-1, keepdim=True)).mul_(weights)
    grad_mask = q.new_empty(0)
    if of_mask and mask is not None:
        grad_mask = of_scores.sum_to_size(*mask.shape).to(mask.dtype)
    if softcap:
        of_scores = of_scores * (1 - _products(q, k, scale, softcap).square_())
    grad_q = (of_scores @ per_query_head(k, q).to(dtype)).mul_(scale_of(q, scale))
    grad_k = per_key_head(of_scores.mT @ q.to(dtype), k) * scale_of(q, scale)
    grad_v = per_key_head(_kept(weights, keep, p).mT @ wide_grad, v)
    return grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype), grad_mask


def with_sinks(out: Tensor, logsumexp: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Attention with a further logit ``sinks[h]`` of each query, whose weight is lost: ``out`` times
    ``sigmoid(logsumexp - sinks)``. The gradients of queries, keys and values are those by the new result and logsumexp.
    """
    total = torch.logaddexp(logsumexp, sinks.to(logsumexp.dtype)[:, None])
    return out * (logsumexp - total).exp_()[..., None].to(out.dtype), total


def gradient_of_sinks(grad: Tensor, out: Tensor, logsumexp: Tensor, sinks: Tensor) -> Tensor:
    """Of each query, the weight of its sink times what its gradient has of its result."""
    dtype = logsumexp.dtype
    weights = (sinks.to(dtype)[:, None] - logsumexp).exp_()
    return (grad.to(dtype) * out.to(dtype)).sum(-1).mul_(weights).sum((0, 2)).neg_().to(sinks.dtype)


def _kept(weights: Tensor, keep: Given, p: float) -> Tensor:
    return weights if keep is None else (weights * keep).mul_(1.0 / (1.0 - p) if p < 1 else 0.0)


def drawn(q: Tensor, k: Tensor, p: float, seed: Given = None, number: int = 0, box: Ints = ()) -> Given:
    """The dropout mask (bool, ``[b, h, s, t]``): each element by a hash of seed, number and its global index.

    So ranks agree however it is sharded, and a backward that is sharded otherwise than its forward too.
    """
    if p == 0 or seed is None:
        return None
    state = keyed(seed, number)
    shape = (*q.shape[:3], k.shape[2])
    *rows, columns = box_places(shape, box, q.device)
    hashes = mix_(state + columns * GOLDEN)
    for dim, place in enumerate(rows):
        state = mix_(state + place.view(-1, *[1] * (2 - dim)) * GOLDEN)
    return kept(state[..., None], hashes, p)
