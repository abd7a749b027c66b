"""Numbers and gradients of what is zero, infinite or no number at all, beside those of one device."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
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
    "along a dim": lambda x: x.prod(1),
    "kept": lambda x: x.prod(0, keepdim=True),
    "complex": lambda x: torch.complex(x, x * 2).prod(1),
}
AMONG: dict[str, dict[tuple[int, int], float]] = {
    "a zero": {(1, 2): 0.0},
    "two zeros": {(1, 2): 0.0, (1, 4): 0.0},
    "none": {(1, 2): math.nan},
    "none and a zero": {(1, 2): math.nan, (1, 0): 0.0},
    "none and two zeros": {(1, 2): math.nan, (1, 0): 0.0, (3, 1): 0.0},
    "infinite": {(2, 2): math.inf},
    "far": {(0, 0): 1e200, (0, 3): 1e200},
    "near": {(0, 0): 1e-200, (0, 3): 1e-200},
}


@pytest.mark.long
@pytest.mark.parametrize("name", PRODUCTS)
def test_the_gradient_of_a_product_is_chosen_by_its_numbers(name: str) -> None:
    """The plan is made for numbers without zeros, and a trace has one formula."""
    x = torch.randn(4, 6, dtype=F64, generator=torch.Generator().manual_seed(0))
    check = planned(PRODUCTS[name], (x,), args_0="-, r")
    for among in AMONG.values():
        data = x.clone()
        for at, number in among.items():
            data[at] = number
        check(data)


@pytest.mark.parametrize("of", [lambda x: x.mean(1), lambda x: (x - 3).abs().mean()], ids=["rows", "all"])
def test_a_mean_of_half_numbers_whose_sum_is_beyond_their_range(of: Callable[[Tensor], Tensor]) -> None:
    x = torch.linspace(100, 3000, 256).view(4, 64).to(torch.float16)
    with torch.no_grad():
        pm = sx.parallelize(Done(of), sx.Mesh(r=2), sx.Hints((x,), specs={"args.0": "-, r"}))
        torch.testing.assert_close(pm(x), of(x), rtol=2e-3, atol=0)
    assert pm.verify(), pm.verify().why


DEVIATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "std": lambda x: x.std(1),
    "all": lambda x: torch.std(x, correction=2),
    "std_mean": lambda x: torch.cat(torch.std_mean(x, 1)),
    "var": lambda x: x.var(1, unbiased=False),
    "var_mean": lambda x: torch.cat(torch.var_mean(x, 1)),
}


@pytest.mark.one_in(5)
@pytest.mark.parametrize("spec", ["dp, -", "-, dp"])
@pytest.mark.parametrize("name", DEVIATIONS)
def test_deviations_of_numbers_whose_squares_are_out_of_range(name: str, spec: str) -> None:
    of = DEVIATIONS[name]
    torch.manual_seed(0)
    ranges = {torch.float16: (300, 3e4, 1e-5), torch.bfloat16: (1e20,), torch.float32: (1e20, 1e-25), F64: (1, 1e150)}
    for dtype, scales in ranges.items():
        whole = torch.randn(4, 8, dtype=F64).clamp(-1, 1)
        pm = sx.parallelize(Done(of), sx.Mesh(dp=2), sx.Hints((whole.to(dtype),), specs={"args.0": spec}), virtual=True)
        for scale in scales:
            x = (whole * scale).to(dtype)
            near = torch.finfo(dtype).eps * 4
            torch.testing.assert_close(pm(x), of(x), rtol=near, atol=near * scale, equal_nan=True)
        if dtype == F64:
            for each in (math.inf, -math.inf, math.nan):
                x = whole.index_put((torch.tensor(1), torch.tensor(2)), torch.tensor(each, dtype=F64))
                torch.testing.assert_close(pm(x), of(x), equal_nan=True)


def test_constants_that_are_no_number_are_the_same_in_all_iterations() -> None:
    def of_positive(out: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(torch.nan_to_num(out.masked_fill(out < 0, torch.nan), 0.5), y)

    torch.manual_seed(1)
    model = nn.Linear(6, 3)
    x, y = torch.randn(8, 6), torch.randint(3, (8,))
    hints = sx.Hints((x,), loss=of_positive, targets=(y,), specs={"args.0": "dp, -"}, grad_accumulation=2)
    pm = sx.parallelize(model, sx.Mesh(dp=2), hints, virtual=True)
    torch.testing.assert_close(pm(x, y).detach(), of_positive(model(x), y).detach())
