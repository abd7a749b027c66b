"""What is done to a partial sum is done to the sum: casts, counts, and numbers that are infinite or zero."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import shardfx as sx

INF = float("inf")
F64 = torch.float64
Op = Callable[[Tensor], Tensor]


class Product(nn.Module):
    def __init__(self, op: Op) -> None:
        super().__init__()
        self.weight, self.op = nn.Parameter(torch.randn(6, 8, dtype=F64)), op

    def forward(self, x: Tensor) -> Tensor:
        """The sum over k is sharded, so ``op`` is given a partial sum, which its own sum would make cheaper to
        reduce."""
        return self.op(x @ self.weight).double().sum()


def like(y: Tensor, number: float) -> Tensor:
    return torch.full((y.shape[1],), number, dtype=y.dtype)


SPECIAL: dict[str, Op] = {
    "mul by inf": lambda y: (y * INF).clamp(-3, 3),
    "mul by a tensor of inf": lambda y: (y * like(y, INF)).clamp(-3, 3),
    "div by 0": lambda y: (y / 0).clamp(-3, 3),
    "div by a tensor of 0": lambda y: (y / like(y, 0)).clamp(-3, 3),
    "xlogy of 0": lambda y: torch.xlogy(y - y, like(y, 0)),
    "xlogy": lambda y: torch.xlogy(y, like(y, 0)).clamp(-3, 3),
    "xlog1py": lambda y: torch.special.xlog1py(y, like(y, -1)).clamp(-3, 3),
    "ldexp": lambda y: torch.ldexp(y, torch.full((8,), 5000)).clamp(-3, 3),
    "lerp": lambda y: torch.lerp(y, 2 * y, like(y, INF)).clamp(-3, 3),
    "addcdiv": lambda y: torch.addcdiv(y, y, like(y, 0)).clamp(-3, 3),
    "addcmul": lambda y: torch.addcmul(y, y, like(y, INF)).clamp(-3, 3),
    "add times inf": lambda y: torch.add(y, y, alpha=INF).clamp(-3, 3),
    "mul by a product with inf": lambda y: (y * (like(y, INF)[:, None] @ like(y, 1)[None])[0]).clamp(-3, 3),
    "mul by log_softmax": lambda y: (y * like(y, 0).masked_fill(torch.arange(8) > 0, -INF).log_softmax(0)).clamp(-3, 3),
    "div by a cast": lambda y: (y / like(y, 0.5).long()).clamp(-3, 3),
    "a mask of -inf": lambda y: (y * torch.full((8, 8), -INF, dtype=y.dtype).triu(1)[: len(y)]).clamp(-3, 3),
}
"""Infinite whatever the terms are: the terms of one sum, of two signs, make NaN."""

CASTS: dict[str, Op] = {
    "sum": lambda y: y.sum(1, dtype=torch.int64),
    "sum of all": lambda y: torch.sum(y, dtype=torch.int64),
    "cumsum": lambda y: y.cumsum(1, dtype=torch.int64),
    "sum as bool": lambda y: y.sum(1, dtype=torch.bool),
    "to": lambda y: y.to(torch.int64),
    "bits": lambda y: y.sign().view(torch.int64) % 1000,
    "half the bits": lambda y: y.sign().view(torch.int32) % 1000,
    "bits of a pair": lambda y: y.sign().float().view(torch.int64) % 1000,
    "count": lambda y: torch.count_nonzero(y, 1),
}

ROUNDED: dict[str, Op] = {
    "mean in half": lambda y: y.mean(1, dtype=torch.float16),
    "sum in single": lambda y: y.sum(1, dtype=torch.float32),
}
"""Exact for a whole row alone: of a row in parts each part is rounded, as in a product of such numbers."""

MEMORY: dict[str, Op] = {
    "as_strided of a transposed one": lambda y: y.t().as_strided((2, 8), (16, 1)),
    "overlapping windows of one": lambda y: (y.t() * 1).as_strided((3, 8), (8, 1)).sin(),
    "as_strided": lambda y: y.as_strided((2, 8), (16, 1)),
    "complex": lambda y: torch.view_as_real(torch.fft.fft(y)),
}

SHARDING_SUM, SHARDING_ROWS, SHARDING_COLUMNS = (
    {"args.0": "-, tp", "weight": "tp, -"},
    {"args.0": "tp, -"},
    {"weight": "-, tp"},
)


def check(op: Op, specs: dict[str, str]) -> None:
    torch.manual_seed(0)
    model, x = Product(op), torch.randn(4, 6, dtype=F64).round(decimals=1)
    pm = sx.parallelize(model, sx.Mesh(tp=2), sx.Hints(args=(x,), specs=specs, loss=torch.sum), virtual=True)
    alone, together = model(x), pm(x)
    alone.backward()
    together.backward()
    exact = {"rtol": 1e-12, "atol": 1e-12, "equal_nan": True}
    torch.testing.assert_close(together, alone, **exact)
    torch.testing.assert_close(pm.full_grads()["weight"], model.weight.grad, **exact)
    assert pm.verify().status != "refuted"


@pytest.mark.long
@pytest.mark.one_in(4)
@pytest.mark.parametrize("op", SPECIAL.values(), ids=SPECIAL)
def test_no_partial_sum_is_multiplied_by_what_may_be_infinite(op: Op) -> None:
    check(op, SHARDING_SUM)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("op", [*CASTS.values(), *ROUNDED.values()], ids=[*CASTS, *ROUNDED])
def test_a_sum_is_cast_and_not_its_terms(op: Op) -> None:
    check(lambda y: op(y.detach() * 3).double().sum() + y.sum(), SHARDING_SUM)


@pytest.mark.long
@pytest.mark.one_in(4)
@pytest.mark.parametrize("specs", [SHARDING_ROWS, SHARDING_COLUMNS], ids=["rows", "columns"])
@pytest.mark.parametrize("op", CASTS.values(), ids=CASTS)
def test_casts_of_sharded_values(op: Op, specs: dict[str, str]) -> None:
    check(lambda y: op(y.detach() * 3).double().sum() + y.sum(), specs)


@pytest.mark.long
@pytest.mark.one_in(4)
@pytest.mark.parametrize("specs", [SHARDING_SUM, SHARDING_ROWS, SHARDING_COLUMNS], ids=["sum", "rows", "columns"])
@pytest.mark.parametrize("op", MEMORY.values(), ids=MEMORY)
def test_ops_that_see_how_a_tensor_lies_in_memory(op: Op, specs: dict[str, str]) -> None:
    check(op, specs)


def test_what_does_not_lie_in_order_in_memory_is_not_taken_for_it() -> None:
    with pytest.raises(sx.Error, match="does not lie in order in memory"):
        check(lambda y: y[:, 1:].as_strided((2, 6), (16, 1)), SHARDING_ROWS)


def test_a_partial_sum_still_passes_what_is_sure_to_be_finite() -> None:
    def op(y: Tensor) -> Tensor:
        return y * torch.rsqrt(torch.ones(8, dtype=F64).pow(2).mean() + 1e-6)

    x = torch.randn(4, 6, dtype=F64)
    pm = sx.parallelize(Product(op), sx.Mesh(tp=2), sx.Hints(args=(x,), specs=SHARDING_SUM), virtual=True)
    scaled = next(node for node in pm.planned.nodes if str(node.op) == "aten.mul.Tensor")
    assert scaled.strategy is not None and scaled.strategy.results[0].partial


@pytest.mark.parametrize("op", [torch.ones_like, lambda y: y.new_ones(3)], ids=["ones_like", "new_ones"])
def test_what_nobody_looks_at_is_not_reduced(op: Op) -> None:
    x = torch.randn(4, 6, dtype=F64)
    model = Product(lambda y: op(y.detach()).sum() * y.sum())
    pm = sx.parallelize(model, sx.Mesh(tp=2), sx.Hints(args=(x,), specs=SHARDING_SUM, loss=torch.sum), virtual=True)
    large = [node for node in pm.planned.nodes if "all_reduce" in str(node.op) and node.operands[0].type.numel > 1]
    assert not large
    torch.testing.assert_close(pm(x), model(x))
    assert pm.verify()
