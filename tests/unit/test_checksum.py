"""A checksum tells contents apart, and nothing else."""

from __future__ import annotations

import pytest
import torch

from shardfx.runtime.distributed.checksum import checksum

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
