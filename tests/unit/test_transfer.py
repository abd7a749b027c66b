"""Copies between pools of memory: a tensor comes back as it lay, so that kernels round as they would have."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from shardfx.ir.cost.fake_calls import FakeCalls, TensorLayout
from shardfx.ir.ops.pools import transfer

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


def test_files_leave_no_name(tmp_path: Path) -> None:
    away = transfer.to_disk(torch.randn(6, 8)[:, 1:5], str(tmp_path))
    assert away.stride() == (8, 1) and not list(tmp_path.iterdir())
