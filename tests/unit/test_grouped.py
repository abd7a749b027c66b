"""Products by group: our ops beside a loop over the groups, and the forms in which others have them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import shardfx as sx
from shardfx.ir.graph import op_name
from shardfx.ir.ops.computing.grouped_product import grouped_mm, grouped_outer, places

ENDS = [2, 2, 5, 6]


def by_hand(x: Tensor, w: Tensor, ends: list[int]) -> Tensor:
    out, begin = torch.zeros(len(x), w.shape[2], dtype=x.dtype), 0
    for group, end in enumerate(ends):
        out[begin:end] = x[begin:end] @ w[group]
        begin = end
    return out


def test_rows_of_no_group_are_zero() -> None:
    x, w = torch.randn(8, 3), torch.randn(4, 3, 5)
    torch.testing.assert_close(grouped_mm(x, w, torch.tensor(ENDS)), by_hand(x, w, ENDS))


def test_the_gradient_is_a_sum_over_the_rows_of_each_group() -> None:
    x, w, grad = torch.randn(8, 3), torch.randn(4, 3, 5, requires_grad=True), torch.randn(8, 5)
    (wanted,) = torch.autograd.grad(by_hand(x, w, ENDS), w, grad)
    torch.testing.assert_close(grouped_outer(x, grad, torch.tensor(ENDS)), wanted)


@pytest.mark.parametrize(
    ("held", "found"),
    [([], [0, 1, 2, 3, 4, 5]), ([6, 2, 3], [2, 3, 4]), ([2, 0, 2, 3, 1, 2], [1, 2, 4, 5]), ([6, 6, 0], [])],
    ids=["all", "a stretch", "stretches", "nothing"],
)
def test_what_is_held_of_the_whole(held: list[int], found: list[int]) -> None:
    assert list(places(held, 6)) == found


@pytest.mark.parametrize("held", [[6, 1, 4], [3, 0, 3, 2, 1, 1]], ids=["a stretch", "stretches"])
def test_a_rank_multiplies_those_of_its_rows_that_are_in_its_groups(held: list[int]) -> None:
    x, w, ends = torch.randn(6, 3), torch.randn(4, 3, 5), torch.tensor(ENDS)
    here = list(places(held, 6))
    sums = sum(grouped_mm(x[here], w[first : first + 2], ends, held, [4, first, 2]) for first in (0, 2))
    torch.testing.assert_close(sums, by_hand(x, w, ENDS)[here])


class Forms(nn.Module):
    """Torch's product by group, of which there is no kernel for float64."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 16, 8, dtype=torch.bfloat16))

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        rows = nn.functional.grouped_mm(x, self.w, offs=ends)
        columns = nn.functional.grouped_mm(self.w.mT, x.t(), offs=ends)
        outer = nn.functional.grouped_mm(x.t(), rows, offs=ends)
        return rows.sum() + columns.sum() + outer.sum() + nn.functional.grouped_mm(self.w, self.w.mT).sum()


def test_each_form_of_torch_is_one_of_two_ops() -> None:
    args = (torch.randn(16, 16, dtype=torch.bfloat16), torch.tensor([2, 8, 8, 16], dtype=torch.int32))
    graph = sx.trace(Forms(), sx.Hints(args=args))
    called = [op_name(node.op) for node in graph.nodes]
    assert [called.count(f"shardfx.{name}") for name in ("grouped_mm", "grouped_outer")] == [2, 1]
    assert "aten.bmm" in called and "aten._grouped_mm" not in called
