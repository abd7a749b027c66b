"""Rules that are wrong, each with a model whose plan goes by it."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType

import torch
from torch import Tensor, nn

import shardfx as sx
from shardfx.ir.rules import Emit, RuleEntry

aten = torch.ops.aten


@torch.library.custom_op("shardfx_tests::by_fours", mutates_args=())
def by_fours(x: Tensor) -> Tensor:
    """Of x[4 n, d] each row plus the sum of its four."""
    return x + x.unflatten(0, (-1, 4)).sum(1).repeat_interleave(4, 0)


@torch.library.custom_op("shardfx_tests::numbered", mutates_args=())
def numbered(x: Tensor) -> Tensor:
    """Row i of x[n, d], plus i."""
    return x + torch.arange(x.shape[0], dtype=x.dtype)[:, None]


@torch.library.custom_op("shardfx_tests::mean_rows", mutates_args=())
def mean_rows(x: Tensor) -> Tensor:
    """The mean of each row."""
    return x.mean(1)


@torch.library.custom_op("shardfx_tests::ranked", mutates_args=())
def ranked(x: Tensor, y: Tensor) -> Tensor:
    """A product of each pair."""
    return x * y


@by_fours.register_fake
def _(x: Tensor) -> Tensor:
    assert x.shape[0] % 4 == 0, "rows come in fours"
    return torch.empty_like(x)


numbered.register_fake(lambda x: torch.empty_like(x))
mean_rows.register_fake(lambda x: x.new_empty(x.shape[0]))
ranked.register_fake(lambda x, y: torch.empty_like(x))


class Calls(nn.Module):
    """A function as a module."""

    def __init__(self, call: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.call = call if isinstance(call, FunctionType) else lambda x: call(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.call(x)


def doubled(emit: Emit) -> object:
    """Twice what the op gives."""
    return emit.call(aten.mul.Tensor, emit.call(emit.node.op, *emit.args), 2)


def from_zero(emit: Emit) -> object:
    """As if every rank's rows began at 0."""
    return emit.call(emit.node.op, *emit.args)


def without_nan(emit: Emit) -> object:
    """0 where the op gives NaN."""
    return emit.call(aten.where.ScalarOther, emit.call(aten.gt.Scalar, emit.args[0], 0), emit.args[0], 0.0)


def halves_up(emit: Emit) -> object:
    """Not to the even number."""
    return emit.call(aten.floor.default, emit.call(aten.add.Tensor, emit.args[0], 0.5))


def of_few_bits(emit: Emit) -> object:
    """As far as 16 bits go."""
    few = emit.call(aten._to_copy.default, emit.args[0], dtype=torch.int16)
    return emit.call(aten._to_copy.default, emit.call(emit.node.op, few), dtype=torch.int64)


def of_no_sign(emit: Emit) -> object:
    """A number where the op gives NaN."""
    return emit.call(emit.node.op, emit.call(aten.abs.default, emit.args[0]))


def within_bounds(emit: Emit) -> object:
    """Another one far out."""
    return emit.call(emit.node.op, emit.call(aten.clamp.default, emit.args[0], -20, 20))


def by_zeros(emit: Emit) -> object:
    """A product with zeros where the op leaves out."""
    start, _ = emit.result_bounds(0, 1)
    ones = emit.call(aten.full.default, list(emit.result_shape(0)), 1.0, dtype=torch.float64)
    return emit.call(aten.mul.Tensor, emit.args[0], emit.call(aten.tril.default, ones, -start))


ops = torch.ops.shardfx_tests
COLUMNS, ROWS = "-, r", "r, -"
WRONG: dict[str, tuple[RuleEntry, Callable[[Tensor], Tensor], str]] = {
    "softmax along its dim": (sx.rule(aten._softmax.default, "n d -> n d"), lambda x: x.softmax(1), COLUMNS),
    "cumsum": (sx.rule(aten.cumsum.default, "n d -> n d"), lambda x: x.cumsum(0), ROWS),
    "a maximum that is added up": (sx.rule(aten.amax.default, "n d -> n"), lambda x: x.amax(1), COLUMNS),
    "a maximum of sums": (sx.rule(aten.relu.default, "n d -> n d", linear="0"), lambda x: (x @ x.mT).relu(), COLUMNS),
    "sort": (sx.rule(aten.sort.default, "n d -> n d, n d"), lambda x: x.sort(0)[0], ROWS),
    "flip": (sx.rule(aten.flip.default, "n d -> n d"), lambda x: x.flip(0), ROWS),
    "roll": (sx.rule(aten.roll.default, "n d -> n d"), lambda x: x.roll(1, 0), ROWS),
    "tril": (sx.rule(aten.tril.default, "n d -> n d"), lambda x: x.tril(), ROWS),
    "positions": (sx.rule(ops.numbered.default, "n d -> n d", local=from_zero), numbered, ROWS),
    "a mean that stays a sum": (sx.rule(ops.mean_rows.default, "n d -> n"), mean_rows, COLUMNS),
    "a sum of which the largest is kept": (
        sx.rule(aten.sum.dim_IntList, "n d -> n", reduce="max"),
        lambda x: x.sum(1),
        COLUMNS,
    ),
    "a false linear": (sx.rule(aten.exp.default, "n d -> n d", linear="0"), lambda x: (x @ x.mT).exp(), COLUMNS),
    "a product of two sums": (
        sx.rule(ops.ranked.default, "n d, n d -> n d", linear="0&1"),
        lambda x: ranked(x @ x.mT, x @ x.mT),
        COLUMNS,
    ),
    "a share that is another": (sx.rule(aten.tanh.default, "n d -> n d", local=doubled), lambda x: x.tanh(), ROWS),
    "wrong for NaN": (sx.rule(aten.relu.default, "n d -> n d", local=without_nan), lambda x: x.relu(), ROWS),
    "wrong for halves": (sx.rule(aten.round.default, "n d -> n d", local=halves_up), lambda x: x.round(), ROWS),
    "wrong for large integers": (
        sx.rule(aten.neg.default, "n d -> n d", local=of_few_bits),
        lambda x: (9 * x).long().neg(),
        ROWS,
    ),
    "wrong for what is negative": (
        sx.rule(aten.sqrt.default, "n d -> n d", local=of_no_sign),
        lambda x: x.sqrt(),
        ROWS,
    ),
    "wrong far out": (sx.rule(aten.exp.default, "n d -> n d", local=within_bounds), lambda x: x.exp(), ROWS),
    "left out by zeros": (sx.rule(aten.tril.default, "n! d -> n! d", local=by_zeros), lambda x: x.tril(), COLUMNS),
    "linear within bounds": (
        sx.rule(aten.clamp.default, "n d -> n d", linear="0"),
        lambda x: (x @ x.mT).clamp(-100, 100),
        COLUMNS,
    ),
    "argmax": (sx.rule(aten.argmax.default, "n d -> d", reduce="max"), lambda x: x.argmax(0), ROWS),
}


def planned(rule: RuleEntry, call: Callable[[Tensor], Tensor], spec: str) -> sx.ParallelModule:
    x = torch.randn(8, 12, dtype=torch.float64)
    hints = sx.Hints(args=(x,), specs={"args.0": spec}, rules=[rule], strict=True)
    return sx.parallelize(Calls(call), sx.Mesh(r=2), hints, virtual=True)
