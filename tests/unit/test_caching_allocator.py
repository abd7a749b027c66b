"""What torch's caching allocator reserves: by hand, in a steady state, and on a GPU as it does itself."""

from __future__ import annotations

import random

import pytest
import torch

import shardfx as sx
from shardfx.ir.cost.caching_allocator import CachingAllocator
from tests.on_gpu import allocated
from tests.stepped import KINDS, small_plan

MB = 1 << 20


def reserved(*sizes: int) -> int:
    """In bytes, for allocations that stay."""
    allocator = CachingAllocator()
    for size in sizes:
        allocator.allocate(size)
    return allocator.reserved


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((0,), 0),
        ((1,), 2 * MB),
        ((1, 1), 2 * MB),
        ((MB, MB), 2 * MB),
        ((MB, MB, 1), 4 * MB),
        ((MB + 1,), 20 * MB),
        ((9 * MB, 9 * MB), 20 * MB),
        ((9 * MB, 9 * MB, 2 * MB), 20 * MB),
        ((9 * MB, 9 * MB, 3 * MB), 40 * MB),
        ((10 * MB,), 10 * MB),
        ((33 * MB + 5,), 34 * MB),
        ((10 * MB - 512, 11 * MB), 32 * MB),
    ],
)
def test_segments_follow_the_class_of_a_request(sizes: tuple[int, ...], expected: int) -> None:
    assert reserved(*sizes) == expected


def test_the_smallest_block_that_fits_is_taken_and_neighbours_merge() -> None:
    allocator = CachingAllocator()
    wide, narrow = allocator.allocate(100 * MB), allocator.allocate(40 * MB)
    allocator.free(wide)
    allocator.free(narrow)
    assert allocator.allocate(30 * MB) == narrow
    parts = [allocator.allocate(25 * MB) for _ in range(4)]
    assert parts == [wide + i * 25 * MB for i in range(4)]
    for part in (parts[2], parts[0], parts[3], parts[1]):
        allocator.free(part)
    assert allocator.allocate(100 * MB) == wide and allocator.reserved == 140 * MB


@pytest.mark.long
def test_a_step_reserves_its_peak_and_the_same_in_every_step() -> None:
    memory = small_plan(KINDS["AdamW"], sx.Mesh(dp=2)).memory()
    assert memory.peak < memory.reserved == 2 * MB and "reserved on CUDA" in str(memory)
    footprint = memory.footprint
    assert footprint.reserved([64 * MB]) == footprint.reserved() + 64 * MB


# ---- as torch does it


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(4))
def test_on_a_gpu_random_allocations_reserve_as_much(seed: int) -> None:
    draw, allocator = random.Random(seed), CachingAllocator()
    allocated()
    before = torch.cuda.memory_reserved()
    held: list[tuple[torch.Tensor, int]] = []
    for _ in range(2000):
        if held and draw.random() < 0.5:
            _, address = held.pop(draw.randrange(len(held)))
            allocator.free(address)
        else:
            size = int(2 ** draw.uniform(6, 25))
            held.append((torch.empty(size, dtype=torch.uint8, device="cuda"), allocator.allocate(size)))
    found = torch.cuda.memory_reserved() - before
    assert abs(allocator.reserved - found) < 0.05 * found, (allocator.reserved, found)
