"""Copies between pools of memory, and checksums of contents."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from shardfx.ir.cost.fake_calls import FakeCalls, TensorLayout
from shardfx.ir.ops.pools import transfer
from shardfx.runtime.store import checksum

POOLS: dict[str, Callable[[Tensor], Tensor]] = {
    "host": transfer.to_host,
    "disk": transfer.to_disk,
}
FORMS: dict[str, Callable[[], Tensor]] = {
    "columns": lambda: torch.randn(6, 8)[:, 1:5],
    "rows of the transposed": lambda: torch.randn(6, 8).t()[::2],
    "expanded": lambda: torch.randn(6, 1).expand(6, 5),
    "without elements": lambda: torch.randn(6, 8)[:, 3:3],
    "a number": lambda: torch.tensor(3.0),
    "channels last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("pool", ["host", "disk"])
def test_what_is_fetched_lies_as_it_lay(pool: str, form: str) -> None:
    """In its strides, gaps and expanded dims among them; and in memory of its own."""
    x = FORMS[form]()
    away = POOLS[pool](x)
    back = transfer.arrived(transfer.to_device(away))
    for each in (away, back):
        assert torch.equal(each, x) and each.stride() == x.stride()
        assert not each.numel() or each.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()


@pytest.mark.parametrize("form", FORMS)
def test_a_replay_predicts_what_a_copy_holds(form: str) -> None:
    x, calls = FORMS[form](), FakeCalls()
    layout = TensorLayout(tuple(x.shape), x.stride(), x.dtype)
    for copy in (transfer.to_host, transfer.to_device):
        made = calls.made(copy, (layout,), {})
        held = copy(x)
        assert made.fresh == (held.untyped_storage().nbytes(),)
        assert made.results.layout.stride == x.stride()  # type: ignore[union-attr]
    (place,) = calls.made(transfer.to_disk, (layout,), {}).fresh
    assert place == transfer.to_disk(x).untyped_storage().nbytes()


REAL = (torch.float64, torch.float32, torch.bfloat16)
DTYPES = (*REAL, torch.int64, torch.int32, torch.uint8, torch.bool, torch.complex64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_another_content_or_order_is_another_number(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randint(0, 2, (5, 7)).to(dtype)
    assert checksum(x) == checksum(x.clone()) == checksum(x.t().clone().t())
    numbers = [checksum(x.flip(0)), checksum(x)]
    for i in range(x.numel()):
        other = x.clone()
        other.view(-1)[i] = 1 - other.view(-1)[i].to(torch.int32) if dtype is torch.bool else 1 - other.view(-1)[i]
        numbers.append(checksum(other))
    assert len(set(numbers)) == len(numbers)


def test_slices_scalars_and_what_is_empty() -> None:
    x = torch.arange(41, dtype=torch.uint8)
    assert checksum(x[3:11]) == checksum(x[3:11].clone()) != checksum(x[4:12])
    assert checksum(torch.tensor(2.0)) != checksum(torch.tensor(3.0))
    assert checksum(torch.empty(0, 4)) == checksum(torch.empty(4, 0))
