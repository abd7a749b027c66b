"""Random numbers of a forward, as counter-based ops of which each rank computes its own shard.

    torch.rand(4, 8)   ->   a hash of the step's seed, the draw's number, and each element's place in the global tensor

So draws are the same however they are sharded, and in the backward. Other distributions are made of uniform numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from shardfx.ir.builder import Call, GraphBuilder
from shardfx.ir.graph import InputKind, Value
from shardfx.ir.ops.dropout import FACTORS, GOLDEN, LAST, draw
from shardfx.ir.ops.traits import with_defaults
from shardfx.ir.spec import TensorType

aten = torch.ops.aten
DIGITS = {torch.float64: 53, torch.float32: 24, torch.bfloat16: 8, torch.float16: 11}


def seed_of(builder: GraphBuilder) -> tuple[Value, int]:
    """The seed of a step, and a number for the next draw."""
    if builder.seed is None:
        builder.seed = builder.input(InputKind.SEED, "seed", TensorType((), torch.int64))
    builder.random += 1
    return builder.seed, builder.random


def uniform(builder: GraphBuilder, type: TensorType) -> Value:
    """Numbers from 0 to below 1, each a multiple of the smallest step that the dtype has there."""
    state: Value = builder.add(draw, seed_of(builder))
    for dim, size in enumerate(type.shape):
        place = builder.add(aten.arange.start_step, (0, size, 1), dtype=torch.int64)
        place = builder.add(aten.view.default, (place, [size, *[1] * (len(type.shape) - dim - 1)]))
        state = _mixed(builder, builder.add(aten.add.Tensor, (state, builder.add(aten.mul.Scalar, (place, GOLDEN)))))
    digits = DIGITS[type.dtype]
    state = _shifted(builder, state, 64 - digits)
    made = builder.add(aten._to_copy.default, (state,), dtype=type.dtype)
    result: Value = builder.add(aten.mul.Scalar, (made, 2.0**-digits))
    return result


def normal(builder: GraphBuilder, type: TensorType) -> Value:
    """Normal numbers, by the method of Box and Muller."""
    dtype = type.dtype if type.dtype in (torch.float32, torch.float64) else torch.float32
    wide = TensorType(type.shape, dtype)
    left = builder.add(aten.rsub.Scalar, (uniform(builder, wide), 1.0))  # above 0
    radius = builder.add(
        aten.sqrt.default, (builder.add(aten.mul.Scalar, (builder.add(aten.log.default, (left,)), -2.0)),)
    )
    angle = builder.add(aten.mul.Scalar, (uniform(builder, wide), 2 * math.pi))
    made = builder.add(aten.mul.Tensor, (radius, builder.add(aten.cos.default, (angle,))))
    result: Value = made if dtype is type.dtype else builder.add(aten._to_copy.default, (made,), dtype=type.dtype)
    return result


def draws_nothing(op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Attention carries a dropout probability that is mostly zero."""
    return with_defaults(op, args, kwargs).get("dropout_p") == 0.0


def _mixed(builder: GraphBuilder, x: Value) -> Value:
    for shift, factor in FACTORS:
        x = builder.add(aten.bitwise_xor.Tensor, (x, _shifted(builder, x, shift)))
        x = builder.add(aten.mul.Scalar, (x, factor))
    result: Value = builder.add(aten.bitwise_xor.Tensor, (x, _shifted(builder, x, LAST)))
    return result


def _shifted(builder: GraphBuilder, x: Value, by: int) -> Value:
    """A shift to the right that fills up with zeros."""
    shifted = builder.add(aten.__rshift__.Scalar, (x, by))
    result: Value = builder.add(aten.bitwise_and.Scalar, (shifted, 2 ** (64 - by) - 1))
    return result


Args = tuple[Any, ...]


def _drawn(distribution: Callable[[GraphBuilder, TensorType], Value], shift: str = "", scale: str = "") -> Any:
    """The lowering of an op to numbers of a distribution, times its argument ``scale`` and plus ``shift``."""

    def lowered(builder: GraphBuilder, op: Any, args: Args, kwargs: dict[str, Any], types: Any) -> Value:
        bound, made = with_defaults(op, args, kwargs), distribution(builder, types)
        return _affine(builder, made, bound[scale], bound[shift]) if shift else made

    return lowered


def _affine(builder: GraphBuilder, drawn: Value, by: Any, to: Any) -> Value:
    scaled = builder.add(aten.mul.Scalar, (drawn, by))
    result: Value = builder.add(aten.add.Scalar, (scaled, to))
    return result


def _uniform(builder: GraphBuilder, op: Any, args: Args, kwargs: dict[str, Any], types: Any) -> Value:
    bound = with_defaults(op, args, kwargs)
    return _affine(builder, uniform(builder, types), bound["to"] - bound["from"], bound["from"])


def _exponential(builder: GraphBuilder, op: Any, args: Args, kwargs: dict[str, Any], types: Any) -> Value:
    left = builder.add(aten.rsub.Scalar, (uniform(builder, types), 1.0))
    rate = with_defaults(op, args, kwargs)["lambd"]
    result: Value = builder.add(aten.mul.Scalar, (builder.add(aten.log.default, (left,)), -1.0 / rate))
    return result


def _bernoulli(builder: GraphBuilder, op: Any, args: Args, kwargs: dict[str, Any], types: Any) -> Value:
    """Bernoulli draws: uniform numbers below the probability, which is a number, a tensor, or the operand itself."""
    chance = args[1] if len(args) > 1 else args[0]
    fine = torch.float64 if types.dtype is torch.float64 else torch.float32
    drawn = uniform(builder, TensorType(types.shape, fine))
    below = builder.add(aten.lt.Tensor if isinstance(chance, Value) else aten.lt.Scalar, (drawn, chance))
    result: Value = builder.add(aten._to_copy.default, (below,), types, dtype=types.dtype)
    return result


def _rrelu(builder: GraphBuilder, op: Any, args: Args, kwargs: dict[str, Any], types: Any) -> list[Value]:
    """Below zero a slope is drawn for each element in training, and is the mean one else; the slopes are kept."""
    bound = with_defaults(op, args, kwargs)
    x, low, high = bound["self"], bound["lower"], bound["upper"]
    if not bound["training"]:
        return [builder.add(aten.leaky_relu.default, (x, (low + high) / 2), types[0]), bound["noise"]]
    drawn = _affine(builder, uniform(builder, types[1]), high - low, low)
    slopes = builder.add(aten.where.ScalarOther, (builder.add(aten.le.Scalar, (x, 0)), drawn, 1.0), types[1])
    return [builder.add(aten.mul.Tensor, (x, slopes), types[0]), slopes]


RANDOM: dict[Any, Callable[..., Any]] = {
    aten.rand.default: _drawn(uniform),
    aten.rand_like: _drawn(uniform),
    aten.randn.default: _drawn(normal),
    aten.randn_like: _drawn(normal),
    aten.uniform.default: _uniform,
    aten.normal_functional.default: _drawn(normal, "mean", "std"),
    aten.normal.float_float: _drawn(normal, "mean", "std"),
    aten.exponential.default: _exponential,
    aten.bernoulli.p: _bernoulli,
    aten.bernoulli.default: _bernoulli,
    aten.bernoulli.Tensor: _bernoulli,
    aten.rrelu_with_noise_functional: _rrelu,
}
"""The lowering of each of torch's random ops."""
DRAWN = frozenset(RANDOM.values())


def calls_of(made: Value | list[Value], op: Any, args: Args, kwargs: dict[str, Any]) -> dict[Value, Call]:
    """The call of torch's that each value stands for which was made of one that draws."""
    if isinstance(made, Value):
        return {made: (op, args, kwargs)}

    def result(at: int) -> Callable[..., Any]:
        return lambda *args, **kwargs: op(*args, **kwargs)[at]

    return {each: (result(at), args, kwargs) for at, each in enumerate(made) if each not in args}
