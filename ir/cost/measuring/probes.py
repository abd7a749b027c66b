"""What calls take as programs make them: some ops, by how much they do.

A program's operands were made a while ago, its results are kept for a while, and between two calls of one op are many
of others: neither operands, memory for results nor the op's own code are at hand. So a probe goes round among many
operands, keeps as many results, and has a product between any two calls, whose time is taken off again.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from shardfx.ir.cost.curve import PRODUCT, TOUCH, VIEW, Curve
from shardfx.ir.cost.flops import formula
from shardfx.ir.ops.traits import base_name_of

aten = torch.ops.aten
RING = 1 << 24
"""The bytes of operands and results that a probe goes round among."""
MOST, PASSES = 64, 5
"""So many calls are in a round at most, and so many rounds are timed."""
BETWEEN = 96
"""The rows and columns of the product between two calls."""
WIDTH = 256
Clock = Callable[[], float]
Make = Callable[[int, torch.device], tuple[Any, ...]]


def _random(*shape: int, device: torch.device) -> Tensor:
    return torch.randn(shape, device=device)


def _rows(count: int) -> Make:
    return lambda rows, device: tuple(_random(rows, WIDTH, device=device) for _ in range(count))


def _square(n: int, device: torch.device) -> tuple[Any, ...]:
    return _random(n, n, device=device), _random(n, n, device=device)


def _normalized(rows: int, device: torch.device) -> tuple[Any, ...]:
    (x,), scale = _rows(1)(rows, device), torch.ones(WIDTH, device=device)
    return x, [WIDTH], scale, scale, 1e-5


def _normalized_backward(rows: int, device: torch.device) -> tuple[Any, ...]:
    x, *more = _normalized(rows, device)
    _, mean, deviation = aten.native_layer_norm.default(x, *more)
    return torch.ones_like(x), x, [WIDTH], mean, deviation, more[1], more[2], [True, True, True]


def _queries(length: int, device: torch.device) -> tuple[Any, ...]:
    return (*(_random(2, 4, length, 32, device=device) for _ in range(3)), 0.0, True)


def _queries_backward(length: int, device: torch.device) -> tuple[Any, ...]:
    q, k, v, *more = _queries(length, device)
    out, normalizer = aten._scaled_dot_product_flash_attention_for_cpu.default(q, k, v, *more)
    return torch.ones_like(out), q, k, v, out, normalizer, *more


def _image(size: int, device: torch.device) -> tuple[Any, ...]:
    x, weight = _random(2, 32, size, size, device=device), _random(32, 32, 3, 3, device=device)
    return x, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1


def _image_backward(size: int, device: torch.device) -> tuple[Any, ...]:
    x, weight, _, *more = _image(size, device)
    return torch.ones_like(x), x, weight, None, *more, [True, True, False]


ROWS = (4, 64, 512, 4096)
KINDS: dict[Any, tuple[Make, Sequence[int]]] = {
    aten.exp.default: (_rows(1), ROWS),
    aten.tanh.default: (_rows(1), ROWS),
    aten.sigmoid.default: (_rows(1), ROWS),
    aten.silu.default: (_rows(1), ROWS),
    aten.silu_backward.default: (_rows(2), ROWS),
    aten.gelu.default: (_rows(1), ROWS),
    aten.gelu_backward.default: (_rows(2), ROWS),
    aten._softmax.default: (lambda n, d: (*_rows(1)(n, d), -1, False), ROWS),
    aten._softmax_backward_data.default: (lambda n, d: (*_rows(2)(n, d), -1, torch.float32), ROWS),
    aten._log_softmax.default: (lambda n, d: (*_rows(1)(n, d), -1, False), ROWS),
    aten._log_softmax_backward_data.default: (lambda n, d: (*_rows(2)(n, d), -1, torch.float32), ROWS),
    aten.native_layer_norm.default: (_normalized, ROWS),
    aten.native_layer_norm_backward.default: (_normalized_backward, ROWS),
    aten.sum.dim_IntList: (lambda n, d: (*_rows(1)(n, d), [0]), ROWS),
    aten.convolution.default: (_image, (8, 32, 64)),
    aten.convolution_backward.default: (_image_backward, (8, 32, 64)),
}
"""Ops that take longer, or less, than what they touch or compute says: how operands are made, and of which sizes."""
ON_CPU: dict[Any, tuple[Make, Sequence[int]]] = {
    aten._scaled_dot_product_flash_attention_for_cpu.default: (_queries, (32, 128, 512)),
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: (_queries_backward, (32, 128, 512)),
}
"""Those that the CPU alone has."""


def curves(device: torch.device, clock: Clock) -> dict[str, Curve]:
    """Seconds of calls by kind: of products and of what only touches memory, and of some ops under their names; on a
    CPU, where they are not hidden behind others, of views."""
    found = {
        PRODUCT: _curve(aten.mm.default, _square, (16, 32, 64, 128, 256, 512), device, clock),
        TOUCH: _curve(aten.add.Tensor, _rows(2), (*ROWS, 32768), device, clock),
    }
    on_cpu = device.type == "cpu"
    for op, (make, sizes) in (KINDS | ON_CPU if on_cpu else KINDS).items():
        found[base_name_of(op)] = _curve(op, make, sizes, device, clock)
    if on_cpu:
        found[VIEW] = Curve(((0.0, _seconds(aten.t.default, [_rows(1)(1, device)] * MOST, device, clock)),))
    return found


def _curve(op: Any, make: Make, sizes: Sequence[int], device: torch.device, clock: Clock) -> Curve:
    with torch.no_grad():
        return Curve.of([_point(op, make, size, device, clock) for size in sizes])


def _point(op: Any, make: Make, size: int, device: torch.device, clock: Clock) -> tuple[float, float]:
    """How much a call of this size does, and the seconds that it takes in the median round."""
    args = make(size, device)
    amount, touched = _amount(op, args)
    ring = [args, *(make(size, device) for _ in range(min(MOST, int(RING / touched)) - 1))]
    return amount, _seconds(op, ring, device, clock)


def _amount(op: Any, args: tuple[Any, ...]) -> tuple[float, float]:
    """The operations of a call, or the bytes that it touches if it has none; and these bytes."""
    out, count = op(*args), formula(op)
    touched = float(sum(each.nbytes for each in tree_leaves((args, out)) if isinstance(each, Tensor)))
    return (float(count(*args, out_val=out)) if count is not None else touched), touched


def _seconds(op: Any, ring: Sequence[tuple[Any, ...]], device: torch.device, clock: Clock) -> float:
    """Seconds of a call among all operands of a ring: in the median round, after one that warms up."""
    between = _square(BETWEEN, device)
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
