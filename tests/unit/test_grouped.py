"""Products by group: our ops beside a loop over the groups, and the forms in which others have them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import shardfx as sx
from shardfx.ir.graph import op_name
from shardfx.ir.ops.computing import grouped_product, library
from shardfx.ir.ops.computing.grouped_product import _aligned, grouped_mm, grouped_outer

ENDS = [2, 2, 5, 6]


def places(ranges: Sequence[int], size: int) -> list[int]:
    return library.places(ranges, size, torch.device("cpu")).tolist()  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Share:
    """Rows and groups that a rank holds, of 12 rows and of the groups that ``ends`` has."""

    ends: list[int]
    rows: tuple[int, ...] = ()
    groups: tuple[int, ...] = ()


SHARES = {
    "even": Share([4, 8, 12]),
    "uneven": Share([1, 3, 12]),
    "empty groups": Share([0, 0, 5, 5, 9, 9]),
    "all in one": Share([0, 12, 12, 12]),
    "no rows in groups": Share([0, 0, 0]),
    "one group": Share([7]),
    "more groups than rows": Share([1, 1, 2, 2, 2, 5, 5, 6, 8, 8, 8, 9, 9, 9, 10]),
    "some groups": Share([2, 2, 5, 8, 8, 11], groups=(6, 2, 3)),
    "the last group": Share([2, 4, 9], groups=(3, 2, 1)),
    "groups apart": Share([2, 2, 5, 8, 8, 11], groups=(2, 0, 2, 3, 1, 2)),
    "no groups": Share([2, 4, 9], groups=(3, 3, 0)),
    "some rows": Share([2, 2, 5, 8, 8, 11], rows=(12, 3, 4)),
    "rows apart": Share([2, 2, 5, 8, 8, 11], rows=(3, 0, 3, 4, 1, 2)),
    "no rows": Share([2, 4, 9], rows=(12, 12, 0)),
    "rows and groups": Share([2, 2, 5, 8, 8, 11], rows=(3, 0, 3, 4, 1, 3), groups=(3, 0, 3, 2, 1, 1)),
}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
WAYS = {
    "op": (grouped_mm, grouped_outer),
    "blocks": (grouped_product._mm_on_device, grouped_product._outer_on_device),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", SHARES)
def test_grouped_products_and_gradients_equal_a_loop(name: str, way: str, device: str) -> None:
    check(SHARES[name], *WAYS[way], device, torch.float64, 1e-12)


@pytest.mark.gpu
@pytest.mark.parametrize("name", SHARES)
def test_grouped_kernel_equals_a_loop(name: str) -> None:
    """In bfloat16, to its rounding."""
    check(SHARES[name], grouped_mm, grouped_outer, "cuda", torch.bfloat16, 2e-2)


def check(
    share: Share, mm: Callable[..., Tensor], outer: Callable[..., Tensor], device: str, dtype: Any, tol: float
) -> None:
    ends = torch.tensor(share.ends)
    rows, groups = places(share.rows, 12), places(share.groups, len(ends))
    numbers = torch.Generator().manual_seed(0)
    x, w, grad = (
        torch.randn(shape, dtype=torch.float64, generator=numbers).to(dtype).double().requires_grad_()
        for shape in ((12, 8), (len(ends), 8, 16), (12, 16))
    )
    held = torch.zeros(12, len(ends), dtype=torch.bool)
    for row in rows:
        for group in groups:
            held[row, group] = ([0, *share.ends])[group] <= row < share.ends[group]
    wanted = sum(held[:, [g]] * (x @ w[g]) for g in range(len(ends)))
    of_x, of_w = torch.autograd.grad(wanted, (x, w), grad)
    here = ends.to(device), list(share.rows), list(share.groups)
    mine, theirs, matrices = (
        each.detach()[at].to(device, dtype) for each, at in ((x, rows), (grad, rows), (w, groups))
    )
    made = mm(mine, matrices, *here), mm(theirs, matrices.mT, *here), outer(mine, theirs, *here)
    for got, right in zip(made, (wanted[rows], of_x[rows], of_w[groups]), strict=True):
        torch.testing.assert_close(got.cpu().double(), right.detach(), rtol=tol, atol=tol)


def test_grouped_products_read_no_number_of_rows() -> None:
    """A fake tensor has no content: who reads it on the host raises."""
    with FakeTensorMode() as mode:
        x, w, y, ends = (
            torch.ones(12, 8),
            torch.ones(2, 8, 16),
            torch.ones(12, 16),
            mode.from_tensor(torch.tensor(ENDS)),
        )
        assert WAYS["blocks"][0](x, w, ends, [], [4, 1, 2]).shape == (12, 16)
        assert WAYS["blocks"][1](x, y, ends, [], [4, 1, 2]).shape == (2, 8, 16)


def test_matrices_are_laid_out_as_the_grouped_kernel_takes_them() -> None:
    """Its shape function has the checks of the kernel."""
    base = torch.empty(3, 24, 33, dtype=torch.bfloat16, device="meta")
    layouts = (base[..., :16], base.mT[:, :16, :16].mT, base[:, :16, :16], base[:1].expand(3, -1, -1)[..., :16])
    x, ends = torch.empty(5, 27, dtype=base.dtype, device="meta"), torch.empty(3, dtype=torch.int32, device="meta")
    for w in layouts:
        rows = x[:, : w.shape[1]]
        assert torch._grouped_mm(_aligned(rows), _aligned(w), offs=ends).shape == (5, 16)
    for kept in (base.new_empty(3, 24, 16), base.new_empty(3, 16, 24).mT, base.new_empty(3, 24, 32)[..., :16]):
        assert _aligned(kept) is kept


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
    graph = sx.api.trace(Forms(), sx.Hints(args=args))
    called = [op_name(node.op) for node in graph.nodes]
    assert [called.count(f"shardfx.{name}") for name in ("grouped_mm", "grouped_outer")] == [2, 1]
    assert "aten.bmm" in called and "aten._grouped_mm" not in called
