"""Numbers that are zero, infinite or none, also in partial sums, which are treated as the sum."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardfx as sx

F64 = torch.float64


class Done(nn.Module):
    """What a function makes of its inputs."""

    def __init__(self, of: Callable[..., Any]) -> None:
        super().__init__()
        self.of = of

    def forward(self, *given: Tensor) -> Tensor:
        made: Tensor = self.of(*given)
        return made


def weighed(out: Tensor, weight: Tensor) -> Tensor:
    made = (out * weight).sum()
    return made.real + 2 * made.imag if made.is_complex() else made


def planned(of: Callable[..., Any], example: tuple[Tensor, ...], **specs: str) -> Callable[..., None]:
    """A check of numbers and gradients against one device's, on other data than the plan's."""
    given = tuple(each.clone().requires_grad_(each.dtype.is_floating_point or each.is_complex()) for each in example)
    out = of(*example)
    weight = torch.linspace(-1, 2, out.numel(), dtype=F64).to(out.dtype).view_as(out)
    sharding = {name.replace("_", "."): spec for name, spec in specs.items()}
    pm = sx.parallelize(Done(of), sx.Mesh(r=2), sx.Hints(given, loss=weighed, targets=(weight,), specs=sharding))

    def check(*data: Tensor) -> None:
        pairs = list(zip(data, given, strict=True))
        ours, theirs = ([each.clone().requires_grad_(like.requires_grad) for each, like in pairs] for _ in range(2))
        loss, made = pm(*ours, weight, with_results=True)
        alone = of(*theirs)
        loss.backward()
        weighed(alone, weight).backward()
        torch.testing.assert_close(made, alone, rtol=1e-10, atol=1e-12, equal_nan=True)
        for mine, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine.grad, other.grad, rtol=1e-10, atol=1e-12, equal_nan=True)

    return check


PRODUCTS: dict[str, Callable[[Tensor], Tensor]] = {
    "all": lambda x: x.prod(),
    "complex": lambda x: torch.complex(x, x * 2).prod(1),
}


@pytest.mark.long
@pytest.mark.parametrize("name", PRODUCTS)
def test_gradient_of_a_product_with_zeros_matches_single_device(name: str) -> None:
    """The plan is made for numbers without zeros."""
    x = torch.randn(4, 6, dtype=F64, generator=torch.Generator().manual_seed(0))
    check = planned(PRODUCTS[name], (x,), args_0="-, r")
    for columns in ([], [2], [2, 4]):
        data = x.clone()
        data[1, columns] = 0
        check(data)


def test_a_mean_of_half_numbers_whose_sum_is_beyond_their_range() -> None:
    def of(x: Tensor) -> Tensor:
        return x.mean(1)

    x = torch.linspace(100, 3000, 256).view(4, 64).to(torch.float16)
    with torch.no_grad():
        pm = sx.parallelize(Done(of), sx.Mesh(r=2), sx.Hints((x,), specs={"args.0": "-, r"}))
        torch.testing.assert_close(pm(x), of(x), rtol=2e-3, atol=0)
    assert pm.verify(), pm.verify().why


DEVIATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "all": lambda x: torch.std(x, correction=2),
    "std_mean": lambda x: torch.cat(torch.std_mean(x, 1)),
    "var": lambda x: x.var(1, unbiased=False),
}


@pytest.mark.long
@pytest.mark.parametrize("name", DEVIATIONS)
def test_deviations_of_numbers_whose_squares_are_out_of_range(name: str) -> None:
    of = DEVIATIONS[name]
    torch.manual_seed(0)
    ranges = {torch.float16: (300, 3e4, 1e-5), torch.bfloat16: (1e20,), torch.float32: (1e20, 1e-25), F64: (1, 1e150)}
    for dtype, scales in ranges.items():
        whole = torch.randn(4, 8, dtype=F64).clamp(-1, 1)
        pm = sx.parallelize(
            Done(of), sx.Mesh(dp=2), sx.Hints((whole.to(dtype),), specs={"args.0": "-, dp"}), virtual=True
        )
        for scale in scales:
            x = (whole * scale).to(dtype)
            near = torch.finfo(dtype).eps * 4
            torch.testing.assert_close(pm(x), of(x), rtol=near, atol=near * scale, equal_nan=True)
        if dtype == F64:
            for each in (math.inf, -math.inf, math.nan):
                x = whole.index_put((torch.tensor(1), torch.tensor(2)), torch.tensor(each, dtype=F64))
                torch.testing.assert_close(pm(x), of(x), equal_nan=True)


INF = float("inf")
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
    "div by a tensor of 0": lambda y: (y / like(y, 0)).clamp(-3, 3),
    "xlogy": lambda y: torch.xlogy(y, like(y, 0)).clamp(-3, 3),
    "addcmul": lambda y: torch.addcmul(y, y, like(y, INF)).clamp(-3, 3),
    "add times inf": lambda y: torch.add(y, y, alpha=INF).clamp(-3, 3),
    "mul by a product with inf": lambda y: (y * (like(y, INF)[:, None] @ like(y, 1)[None])[0]).clamp(-3, 3),
    "mul by log_softmax": lambda y: (y * like(y, 0).masked_fill(torch.arange(8) > 0, -INF).log_softmax(0)).clamp(-3, 3),
    "div by a cast": lambda y: (y / like(y, 0.5).long()).clamp(-3, 3),
}
"""Infinite whatever the terms are: the terms of one sum, of two signs, make NaN."""

CASTS: dict[str, Op] = {
    "sum": lambda y: y.sum(1, dtype=torch.int64),
    "cumsum": lambda y: y.cumsum(1, dtype=torch.int64),
    "to": lambda y: y.to(torch.int64),
    "half the bits": lambda y: y.sign().view(torch.int32) % 1000,
    "count": lambda y: torch.count_nonzero(y, 1),
}

ROUNDED: Op = lambda y: y.mean(1, dtype=torch.float16)  # noqa: E731
"""Exact for a whole row alone: of a row in parts each part is rounded, as in a product of such numbers."""

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
@pytest.mark.parametrize("op", SPECIAL.values(), ids=SPECIAL)
def test_no_partial_sum_is_multiplied_by_what_may_be_infinite(op: Op) -> None:
    check(op, SHARDING_SUM)


@pytest.mark.parametrize("op", [*CASTS.values(), ROUNDED], ids=[*CASTS, "mean in half"])
def test_a_sum_is_cast_and_not_its_terms(op: Op) -> None:
    check(lambda y: op(y.detach() * 3).double().sum() + y.sum(), SHARDING_SUM)


@pytest.mark.parametrize("name", ["cumsum", "half the bits"])
def test_casts_of_sharded_values(name: str) -> None:
    check(lambda y: CASTS[name](y.detach() * 3).double().sum() + y.sum(), SHARDING_COLUMNS)


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
