"""FlexAttention compiled for a GPU: the kernel of attention with soft caps, for which no fused kernel of torch's is.

    query i sees key j where low[i] <= at[j] <= high[i], and q_ids[b, i] == k_ids[b, j] where there are ids
    score   c * tanh(s / c) + bias[h, at[j] - rows[i] + n // 2]     gradient of s   gradient * (1 - tanh(s / c) ** 2)

Forward and backward are torch's higher-order ops ``flex_attention`` and ``flex_attention_backward``, each traced
to a graph that TorchInductor compiles, once for what calls have in common: terms of the score, sizes and strides of the
tensors. So neither autograd nor Dynamo takes part, and a backward computes no forward. Causal masks, windows and the
place of a rank are tensors, as ids are: all layers and ranks call one kernel. Blocks of 128 queries and 128 keys, of
which no pair is seen, are skipped; which these are is computed on the device, in the same compiled graph.

Attention that hides keys alone is left to fused kernels, tile by tile. Needs torch alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from importlib.util import find_spec
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention.flex_attention import BlockMask

from ..computing.library import Ints, places
from .attention_kernels import laid_like
from .plain_attention import Given, Tensors, scale_of
from .striped_rows import ranges_of
from .window_tiles import own_rows, reach

BLOCK = 128
"""The size of a block of queries and of keys: a multiple of the tile of any kernel that torch configures."""
FAR = 2**30
"""A distance beyond that of any two places."""
OPTIONS: dict[str, Any] = {
    "BACKEND": "TRITON",
    "PRESCALE_QK": False,
    "ROWS_GUARANTEED_SAFE": False,
    "BLOCKS_ARE_CONTIGUOUS": False,
    "WRITE_DQ": True,
    "OUTPUT_LOGSUMEXP": True,
    "OUTPUT_MAX": False,
}
"""What torch's own ``flex_attention`` says to its kernels."""
OF_INDUCTOR = {"triton.cudagraphs": False}
"""A program's own CUDA graphs record these kernels."""


class Limits(NamedTuple):
    """What compiled FlexAttention takes: kinds of device, dtypes, widths of heads."""

    devices: tuple[str, ...] = ("cuda",)
    dtypes: tuple[torch.dtype, ...] = (torch.float16, torch.bfloat16, torch.float32)
    narrowest: int = 16
    """The least width of a product in Triton."""
    widest: int = 256
    """The width up to which torch has configurations of its own for a GPU."""
    capability: tuple[int, int] = (8, 0)
    """The least compute capability: that of bfloat16 in Triton."""


LIMITS = Limits()


class ScoreTerms(NamedTuple):
    """The numbers of scores that are compiled into a kernel, and which tensors it has."""

    scale: float
    softcap: float
    flat: bool
    ids: bool
    bias: bool


# ---- which calls -------------------------------------------------------------------------------------------------


@cache
def _compiles(device: torch.device) -> bool:
    """Whether there is a compiler for a GPU."""
    return find_spec("triton") is not None and torch.cuda.get_device_capability(device) >= LIMITS.capability


def flex_takes(q: Tensor, k: Tensor, v: Tensor, mask: Given, p: float, softcap: float, flat: bool) -> bool:
    """Whether a call is for compiled FlexAttention: one that no fused kernel takes, and that it does.

    As fused kernels, it is one of those that ``torch.nn.attention.sdpa_kernel`` disables in favour of plain ops.
    """
    if (not softcap and not flat) or mask is not None or p or q.device.type not in LIMITS.devices:
        return False
    if q.dtype not in LIMITS.dtypes or not all(each.numel() and each.dtype == q.dtype for each in (q, k, v)):
        return False
    if not all(LIMITS.narrowest <= each.shape[-1] <= LIMITS.widest for each in (q, v)):
        return False
    return torch.backends.cuda.mem_efficient_sdp_enabled() and _compiles(q.device)


# ---- what is computed --------------------------------------------------------------------------------------------


def _bounds(x: Tensor) -> tuple[Tensor, Tensor]:
    """The least and the greatest of each block of the last dim."""
    size = x.shape[-1]
    blocks = -(-size // BLOCK)
    places = torch.arange(blocks * BLOCK, device=x.device).clamp_max(size - 1)
    least, greatest = x[..., places].unflatten(-1, (blocks, BLOCK)).aminmax(dim=-1)
    return least, greatest


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """The number of blocks in each row, and their indices, first."""
    numbers = blocks.to(torch.int32)
    order = numbers.argsort(dim=-1, descending=True, stable=True)
    return numbers.sum(-1, dtype=torch.int32), order.to(torch.int32)


def seen_blocks(low: Tensor, high: Tensor, at: Tensor, ids: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """The blocks ``[b or 1, 1, rows, keys]`` that may have a pair that is seen and one that is not; and those of which
    each pair is seen. A last block that is not complete is none of the latter."""
    (least_low, most_low), (least_high, most_high), (first, last) = map(_bounds, (low, high, at))
    some = (most_high[:, None] >= first) & (least_low[:, None] <= last)
    each = (most_low[:, None] <= first) & (least_high[:, None] >= last)
    complete = [torch.arange(1, -(-x.shape[0] // BLOCK) + 1, device=x.device) * BLOCK <= x.shape[0] for x in (low, at)]
    each = (each & complete[0][:, None] & complete[1])[None, None]
    some = some[None, None]
    if ids:
        least, most = (x[:, None, :, None] for x in _bounds(ids[0]))
        k_least, k_most = (x[:, None, None] for x in _bounds(ids[1]))
        some = some & (least <= k_most) & (k_least <= most)
        each = each & (least == k_most) & (k_least == most)
    return some & ~each, each


def _seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor, low: Tensor, high: Tensor, at: Tensor, *ids: Tensor) -> Tensor:
    """Whether query ``i`` sees key ``j``."""
    seen = (at[j] >= low[i]) & (at[j] <= high[i])
    return seen & (ids[0][b, i] == ids[1][b, j]) if ids else seen


class _Scores(NamedTuple):
    """The functions of scores that torch's ops are given."""

    terms: ScoreTerms

    def forward(self, s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor, *of_bias: Tensor) -> Tensor:
        """The score from the product of query ``i`` and key ``j``."""
        terms = self.terms
        if terms.flat:
            s = torch.zeros_like(s)
        elif terms.softcap:
            s = torch.tanh(s / terms.softcap) * terms.softcap
        if not of_bias:
            return s
        bias, rows, at = of_bias
        numbers = bias.shape[1]
        return s + bias[h, (at[j] - rows[i] + numbers // 2).clamp(0, numbers - 1)]

    def backward(
        self, s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor, grad: Tensor, *of_bias: Tensor
    ) -> list[Tensor | None]:
        """The gradient of the product from that of the score; flat scores count in gradients as others do."""
        if cap := self.terms.softcap:
            grad = grad * (1 - torch.tanh(s / cap).square())
        return [grad, *[None] * (4 + len(of_bias))]


def _tensors(terms: ScoreTerms, where: Sequence[Tensor]) -> tuple[Any, tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Of ``low, high, at, q_ids, k_ids, bias, rows`` (as far as they are) torch's form of a block mask, the tensors of
    scores and those of masks."""
    low, high, at, *rest = where
    ids = rest[:2] if terms.ids else []
    of_bias = (*rest[-2:], at) if terms.bias else ()
    some, each = seen_blocks(low, high, at, ids)
    lists: dict[str, Any] = {"mask_mod": _seen}
    for name, blocks in (("kv", some), ("full_kv", each), ("q", some.mT), ("full_q", each.mT)):
        lists[f"{name}_num_blocks"], lists[f"{name}_indices"] = _listed(blocks)
    sizes = low.shape[0], at.shape[0]
    mask = BlockMask(seq_lengths=sizes, BLOCK_SIZE=(BLOCK, BLOCK), **lists)
    return mask.as_tuple(), of_bias, (low, high, at, *ids)


Function = Callable[..., tuple[Tensor, ...]]


def forward_of(terms: ScoreTerms) -> Function:
    """The function of ``q, k, v`` and the tensors of masks and scores that gives the result and the logsumexp."""
    scores = _Scores(terms)

    def function(q: Tensor, k: Tensor, v: Tensor, *where: Tensor) -> tuple[Tensor, ...]:
        mask, of_scores, of_masks = _tensors(terms, where)
        how = terms.scale, OPTIONS, of_scores, of_masks
        out, rows, _ = torch.ops.higher_order.flex_attention(q, k, v, scores.forward, mask, *how)
        rows = rows * math.log(2)  # theirs is a binary logarithm
        return out, rows.masked_fill(rows == -torch.inf, 0.0)

    return function


def backward_of(terms: ScoreTerms) -> Function:
    """The function of gradient, ``q, k, v``, result, logsumexp and the tensors of masks and scores that gives the
    gradients of q, k and v."""
    scores = _Scores(terms)

    def function(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, rows: Tensor, *where: Tensor
    ) -> tuple[Tensor, ...]:
        mask, of_scores, of_masks = _tensors(terms, where)
        of_rows = grad, torch.zeros_like(rows), scores.forward, scores.backward
        how = mask, terms.scale, OPTIONS, of_scores, of_masks
        made = torch.ops.higher_order.flex_attention_backward(q, k, v, out, rows / math.log(2), *of_rows, *how)
        return made[0], made[1], made[2]

    return function


# ---- compilation -------------------------------------------------------------------------------------------------

COMPILED: dict[Any, Function] = {}
"""Compiled functions, by what they are compiled for."""
LOCK = Lock()


def compiled(make: Callable[[ScoreTerms], Function], terms: ScoreTerms, tensors: Sequence[Tensor]) -> Function:
    """The function that ``make`` makes of terms, compiled for such tensors."""
    layouts = ((x.shape, x.stride(), x.dtype, x.device) for x in tensors)
    key = make, terms, torch.backends.cuda.matmul.fp32_precision, *layouts
    with LOCK:
        if key not in COMPILED:
            with FakeTensorMode():  # each is a tensor of its own there: a graph would take equal ones for one
                fakes = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device) for x in tensors]
            graph = make_fx(make(terms), tracing_mode="fake")(*fakes)
            COMPILED[key] = torch._inductor.compile(graph, fakes, OF_INDUCTOR)  # type: ignore[arg-type]
        return COMPILED[key]


def _called(make: Callable[[ScoreTerms], Function], terms: ScoreTerms, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The results of a compiled function; an expanded tensor is copied, for kernels write gradients laid out alike."""
    own = [x.contiguous() if 0 in x.stride() else x for x in tensors]
    with torch.no_grad():
        return tuple(compiled(make, terms, own)(*own))


class Scored(NamedTuple):
    """How queries see keys, and what scores are: the arguments of the op that matter here."""

    causal: bool
    scale: float | None
    box: Ints
    window: Ints
    ids: Sequence[Given]
    softcap: float
    bias: Given
    flat: bool

    def terms(self, q: Tensor) -> ScoreTerms:
        """What is compiled into the kernel."""
        has_bias = self.bias is not None
        return ScoreTerms(scale_of(q, self.scale), self.softcap, self.flat, self.ids[0] is not None, has_bias)

    def tensors(self, q: Tensor, k: Tensor, own: Ints = ()) -> list[Tensor]:
        """``low, high, at, q_ids, k_ids, bias, rows``, as far as they are. ``own`` are the places of queries and of
        keys, ``[first, number]``, one of which is in each pair that is seen; all, where it is empty."""
        ranges = ranges_of((*q.shape[:3], k.shape[2]), self.box)
        rows, at = (places(each, each[1], q.device).to(torch.int32) for each in ranges[2:])
        left, right = (max(-FAR, min(FAR, each)) for each in reach(self.causal, self.window))
        low, high = rows - left, rows + right
        if own:
            others = (rows < own[0]) | (rows >= own[0] + own[1])
            low = low.where(~others, low.clamp_min(own[0]))
            high = high.where(~others, high.clamp_max(own[0] + own[1] - 1))
        ids = [each for each in self.ids if each is not None]
        return [low, high, at, *ids, *([] if self.bias is None else [self.bias, rows])]


def flex_forward(q: Tensor, k: Tensor, v: Tensor, how: Scored) -> tuple[Tensor, Tensor]:
    """The result, laid out as the queries, and the logsumexp."""
    out, rows = _called(forward_of, how.terms(q), [q, k, v, *how.tensors(q, k)])
    return laid_like(out, q) if out.shape == q.shape else out.contiguous(), rows.contiguous()


def flex_backward(
    grad: Tensor, qkv: Tensors, out: Tensor, logsumexp: Tensor, how: Scored, own: Ints = ()
) -> tuple[Tensor, ...]:
    """The gradients of queries, keys and values, of the rows that are a rank's own."""
    q, k, v = qkv
    tensors = [grad, q, k, v, out, logsumexp.contiguous(), *how.tensors(q, k, own)]
    made = _called(backward_of, how.terms(q), tensors)
    grads = zip(own_rows(made, how.box, own), own_rows(qkv, how.box, own), strict=True)
    return tuple(laid_like(each, like) for each, like in grads)
