"""Microbenchmarks of ops as programs call them, by amount of work.

A program's operands were made a while ago, its results are kept for a while, and between two calls of one op are many
of others: neither operands, memory for results nor the op's own code are at hand. So a probe goes round among many
operands and keeps as many results. On a CPU it has a product between any two calls, whose time is taken off again; on
CUDA the calls are queued, so that what the host needs for them is not in it (:func:`.calibrate.on_device`), and
those that compute for long run until the device's clock has settled (:func:`.calibrate.sustained`).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from shardfx.ir.ops.fused_attention import attention, attention_backward
from shardfx.ir.ops.traits import base_name_of

from . import calibrate
from .curve import NARROW, PRODUCT, TOUCH, VIEW, Curve, of_dtype
from .flops import CAUSAL, formula

aten = torch.ops.aten
RING = {"cpu": 1 << 24, "cuda": 1 << 28}
"""The bytes of operands and results in a probe's ring: more than a cache holds."""
MOST, PASSES = 64, 5
"""The maximum number of calls in a round, and the number of timed rounds."""
ROUND = 0.1
"""The maximum duration of a round of several calls, in seconds."""
BETWEEN = 96
"""The size of the matrix product between two calls."""
WIDTH = {"cpu": 256, "cuda": 2048}
"""The number of columns of operands that are not square."""
Clock = Callable[[], float]


@dataclass(frozen=True)
class ProbeSite:
    """The device and dtype of a probe's operands."""

    device: torch.device
    dtype: torch.dtype = torch.float32

    def random(self, *shape: int) -> Tensor:
        """Random numbers, as some devices compute faster on equal ones."""
        return torch.randn(shape, dtype=self.dtype, device=self.device)

    @property
    def is_cuda(self) -> bool:
        """Whether the device is a GPU, for which sizes are those of large models."""
        return self.device.type == "cuda"


Make = Callable[[int, ProbeSite], tuple[Any, ...]]


def _rows(count: int) -> Make:
    return lambda rows, at: tuple(at.random(rows, WIDTH[at.device.type]) for _ in range(count))


def _forward(n: int, at: ProbeSite) -> tuple[Any, ...]:
    """The product of a linear layer of n outputs, n / 2 inputs and 2 n tokens."""
    return at.random(2 * n, n // 2), at.random(n, n // 2).t()


def _square(n: int, at: ProbeSite) -> tuple[Any, ...]:
    return at.random(n, n), at.random(n, n)


def _normalized(rows: int, at: ProbeSite) -> tuple[Any, ...]:
    (x,) = _rows(1)(rows, at)
    scale = torch.ones_like(x[0])
    return x, [*scale.shape], scale, scale, 1e-5


def _normalized_backward(rows: int, at: ProbeSite) -> tuple[Any, ...]:
    x, shape, scale, bias, eps = _normalized(rows, at)
    _, mean, deviation = aten.native_layer_norm.default(x, shape, scale, bias, eps)
    return torch.ones_like(x), x, shape, mean, deviation, scale, bias, [True, True, True]


def _queries(length: int, at: ProbeSite) -> tuple[Any, ...]:
    return (*(at.random(2, 4, length, 32) for _ in range(3)), 0.0, True)


def _queries_backward(length: int, at: ProbeSite) -> tuple[Any, ...]:
    q, k, v, *more = _queries(length, at)
    out, normalizer = aten._scaled_dot_product_flash_attention_for_cpu.default(q, k, v, *more)
    return torch.ones_like(out), q, k, v, out, normalizer, *more


TOKENS, HEADS, HEAD = 8192, 16, 128
"""Of a batch in attention on CUDA, whatever the length of its sequences; and the heads, and their width."""


def _attended(causal: bool) -> Make:
    def make(length: int, at: ProbeSite) -> tuple[Any, ...]:
        shape = max(TOKENS // length, 1), length, HEADS, HEAD
        return (*(at.random(*shape).transpose(1, 2) for _ in range(3)), None, causal)

    return make


def _attended_backward(causal: bool) -> Make:
    def make(length: int, at: ProbeSite) -> tuple[Any, ...]:
        q, k, v, *how = _attended(causal)(length, at)
        out, normalizer = attention(q, k, v, *how)
        return torch.randn_like(out), q, k, v, out, normalizer, *how

    return make


def _image(size: int, at: ProbeSite) -> tuple[Any, ...]:
    batch, channels = (16, 64) if at.is_cuda else (2, 32)
    x, weight = at.random(batch, channels, size, size), at.random(channels, channels, 3, 3)
    return x, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1


def _image_backward(size: int, at: ProbeSite) -> tuple[Any, ...]:
    x, weight, _, *more = _image(size, at)
    return torch.ones_like(x), x, weight, None, *more, [True, True, False]


def _reduced(count: int, *more: Any) -> Make:
    return lambda rows, at: (*_rows(count)(rows, at), *more)


def _by_vector(rows: int, at: ProbeSite) -> tuple[Any, ...]:
    (x,) = _rows(1)(rows, at)
    return x, at.random(x.shape[1])


def _of_heads(rows: int, at: ProbeSite) -> tuple[Any, ...]:
    """Attention results and the shape of rows in which a product takes them."""
    return at.random(1, HEADS, rows, HEAD).transpose(1, 2), [rows, HEADS * HEAD]


ROWS: Mapping[str, Sequence[int]] = {"cpu": (4, 64, 512, 4096), "cuda": (4, 256, 4096, 32768)}
TOUCHED: Mapping[str, Sequence[int]] = {"cpu": (*ROWS["cpu"], 32768), "cuda": (4, 64, 512, 2048, 8192, 32768)}
BY_ROWS: dict[Any, Make] = {
    aten.exp.default: _rows(1),
    aten.tanh.default: _rows(1),
    aten.sigmoid.default: _rows(1),
    aten.silu.default: _rows(1),
    aten.silu_backward.default: _rows(2),
    aten.gelu.default: _rows(1),
    aten.gelu_backward.default: _rows(2),
    aten._softmax.default: _reduced(1, -1, False),
    aten._softmax_backward_data.default: _reduced(2, -1, torch.float32),
    aten._log_softmax.default: _reduced(1, -1, False),
    aten._log_softmax_backward_data.default: _reduced(2, -1, torch.float32),
    aten.native_layer_norm.default: _normalized,
    aten.native_layer_norm_backward.default: _normalized_backward,
    aten.sum.dim_IntList: _reduced(1, [0]),
}
"""Ops that take longer, or less, than what they touch says, and how their operands are made. Bytes count, whatever the
dtype."""


@dataclass(frozen=True)
class Heavy:
    """An op that is measured in each dtype of its device, by FLOPs, or by bytes if it has none; under its own name, or
    a ``kind``: the mean over operands of ``make`` and ``more``; on CUDA long calls run ``warm`` seconds before."""

    op: Any
    make: Make
    sizes: Sequence[int]
    kind: str = ""
    more: Sequence[Make] = ()
    warm: float = 0.0

    @property
    def name(self) -> str:
        """The name of its curve."""
        return self.kind or base_name_of(self.op)


GRADIENTS: Sequence[Make] = (
    lambda n, at: (at.random(2 * n, n), at.random(n, n // 2)),
    lambda n, at: (at.random(2 * n, n).t(), at.random(2 * n, n // 2)),
)
"""The products of a linear layer's backward: for its inputs, and for its weight."""
BROADCAST: Sequence[Make] = (
    _by_vector,
    lambda rows, at: (*_rows(1)(rows, at), at.random(rows, 1)),
    lambda rows, at: tuple(x.chunk(2, -1)[0] for x in _by_vector(rows, at)),
)
"""Broadcasts of a vector, of a column, and of half a vector to half of each row, as in rotary embeddings."""
LENGTHS = (256, 1024, 4096, 8192)
LONG_CALL = 2e-5
"""The duration in seconds from which a CUDA call depends more on the clock than on its launch."""
CLOCK_SETTLES = 0.2
"""Seconds of matrix products until the device's clock settles under its power limit."""
HOT = 0.03
"""Seconds of warm-up after other probes that kept the device as busy."""
HEAVY: Mapping[str, Sequence[Heavy]] = {
    "cpu": (
        Heavy(aten.mm.default, _square, (16, 32, 64, 128, 256, 512, 1024), PRODUCT),
        Heavy(aten.convolution.default, _image, (8, 32, 64)),
        Heavy(aten.convolution_backward.default, _image_backward, (8, 32, 64)),
        Heavy(aten._scaled_dot_product_flash_attention_for_cpu.default, _queries, (32, 128, 512)),
        Heavy(aten._scaled_dot_product_flash_attention_for_cpu_backward.default, _queries_backward, (32, 128, 512)),
    ),
    "cuda": (
        Heavy(aten.mm.default, _forward, (128, 256, 512, 1024, 2048, 4096, 8192), PRODUCT, GRADIENTS, CLOCK_SETTLES),
        Heavy(aten.mm.default, lambda n, at: (at.random(n, n), at.random(n, 64)), (256, 1024, 4096, 8192), NARROW),
        Heavy(aten.mul.Tensor, _rows(2), ROWS["cuda"], more=BROADCAST),
        Heavy(
            aten.to.dtype,
            lambda rows, at: (*_rows(1)(rows, at), torch.bfloat16 if at.dtype is torch.float32 else torch.float32),
            ROWS["cuda"],
            "_to_copy",
        ),
        Heavy(aten.reshape.default, _of_heads, ROWS["cuda"]),
        Heavy(
            aten.cat.default,
            lambda rows, at: ([x.chunk(2, -1)[0].contiguous() for x in _rows(2)(rows, at)], -1),
            ROWS["cuda"],
        ),
        Heavy(aten.mean.dim, _reduced(1, [-1]), ROWS["cuda"]),
        Heavy(aten.sum.dim_IntList, _reduced(1, [0]), ROWS["cuda"], more=(_reduced(1, [-1]),)),
        Heavy(aten.convolution.default, _image, (16, 64, 256), warm=HOT),
        Heavy(aten.convolution_backward.default, _image_backward, (16, 64, 256), warm=HOT),
        *(
            Heavy(op, make(causal), LENGTHS, f"{CAUSAL if causal else ''}{base_name_of(op)}", warm=HOT)
            for op, make in ((attention, _attended), (attention_backward, _attended_backward))
            for causal in (True, False)
        ),
    ),
}
DTYPES: Mapping[str, Sequence[torch.dtype]] = {
    "cpu": (torch.float32,),
    "cuda": (torch.float32, torch.bfloat16, torch.float16),
}
"""The dtypes of :data:`HEAVY`; for others only the rate of products is known."""


def products(device: torch.device, clock: Clock) -> dict[torch.dtype, Curve]:
    """Seconds of products by their operations, in each dtype: on CUDA the mean of the three of a linear layer, which
    lie differently in memory; on a CPU square ones."""
    product = HEAVY[device.type][0]
    return {dtype: curve(product, ProbeSite(device, dtype), clock) for dtype in calibrate.DTYPES}


def curves(device: torch.device, clock: Clock, products: Mapping[torch.dtype, Curve]) -> dict[str, Curve]:
    """Seconds of calls by kind: of products and of what only touches memory, and of some ops under their names; on a
    CPU, where they are not hidden behind others, of views."""
    kind, at = device.type, ProbeSite(device)
    found = {PRODUCT: products[torch.float32]}
    if device.type == "cuda":
        found |= {of_dtype(PRODUCT, dtype): each for dtype, each in products.items()}
    found[TOUCH] = curve(Heavy(aten.add.Tensor, _rows(2), TOUCHED[kind]), at, clock)
    for op, make in BY_ROWS.items():
        found[base_name_of(op)] = curve(Heavy(op, make, ROWS[kind]), at, clock)
    for each in HEAVY[kind][1:]:
        for dtype in DTYPES[kind]:
            name = each.name if kind == "cpu" else of_dtype(each.name, dtype)
            found[name] = curve(each, ProbeSite(device, dtype), clock)
    if kind == "cpu":
        found[VIEW] = Curve(((0.0, _seconds(aten.t.default, [_rows(1)(1, at)] * MOST, device, clock)),))
    return found


def curve(heavy: Heavy, at: ProbeSite, clock: Clock) -> Curve:
    """Seconds of an op by its operations, or bytes (a narrow product's, too), up to a size at which it takes long."""
    points: list[tuple[float, float]] = []
    with torch.no_grad():
        for size in heavy.sizes:
            computes = formula(heavy.op) is not None
            if points and (points[-1][1] > calibrate.LONG or (computes and size > calibrate.LARGEST)):
                break
            points.append(_point(heavy, size, at, clock))
    return Curve.of(points)


def _point(heavy: Heavy, size: int, at: ProbeSite, clock: Clock) -> tuple[float, float]:
    """The amount of work of a call of this size, and its time in the median round."""
    op, makes = heavy.op, (heavy.make, *heavy.more)
    ring = [make(size, at) for make in makes]
    amounts = [_amount(op, args) for args in ring]
    amount, touched = (statistics.fmean(each) for each in zip(*amounts, strict=True))
    begin = clock()
    op(*ring[0])
    count = min(MOST, int(RING[at.device.type] / touched), int(ROUND / max(clock() - begin, 1e-9)))
    rounds = max(count // len(makes), 1)
    ring += [make(size, at) for _ in range(rounds - 1) for make in makes]
    seconds = _seconds(op, ring, at.device, clock)
    if at.is_cuda and heavy.warm and seconds > LONG_CALL:
        seconds = calibrate.sustained(op._op, ring, at.device, seconds, heavy.warm)
    return touched if heavy.kind == NARROW else amount, seconds


def _amount(op: Any, args: tuple[Any, ...]) -> tuple[float, float]:
    """The FLOPs of a call, or the bytes that it touches if it has none; and these bytes."""
    out, count = op(*args), formula(op)
    touched = float(sum(each.nbytes for each in tree_leaves((args, out)) if isinstance(each, Tensor)))
    return (float(count(*args, out_val=out)) if count is not None else touched), touched


def _seconds(op: Any, ring: Sequence[tuple[Any, ...]], device: torch.device, clock: Clock) -> float:
    """The time of a call on the operands of a ring: in the median round, after a warm-up."""
    if device.type == "cuda":
        return calibrate.on_device(op._op, ring, device, PASSES)
    between = _square(BETWEEN, ProbeSite(device))
    rounds = [_round(op, ring, between, clock) for _ in range(PASSES + 1)]
    return max(statistics.median(rounds[1:]), 0.0)


def _round(op: Any, ring: Sequence[tuple[Any, ...]], between: tuple[Any, ...], clock: Clock) -> float:
    call, product = op._op, torch.mm
    kept: list[Any] = [None] * len(ring)
    begin = clock()
    for _ in ring:
        product(*between)
    alone = clock()
    for at, args in enumerate(ring):
        product(*between)
        kept[at] = call(*args)
    return (clock() - alone - (alone - begin)) / len(ring)
