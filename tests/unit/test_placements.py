"""Our shards as DTensor's placements: where there are some, torch's own splitting gives the same rows."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from shardfx import Mesh, Spec
from shardfx.ir.dim_sharding import DimSharding, Part, compound
from shardfx.ir.shards import local_shard
from shardfx.runtime.distributed.dtensor_shard import MultiBoxTensor, placements, runs

MESH = Mesh(dp=2, tp=2)
SHARDINGS = [
    (8, DimSharding(("dp", "tp")), (Shard(0), Shard(0))),
    (7, DimSharding(("dp", "tp")), (Shard(0), Shard(0))),
    (8, DimSharding(("tp",)), (Replicate(), Shard(0))),
    (8, DimSharding(("tp", "dp")), (_StridedShard(0, split_factor=2), Shard(0))),
    (192, compound([Part(3), Part(64, ("tp",))], MESH), (Replicate(), _StridedShard(0, split_factor=3))),
    (21, compound([Part(3), Part(7, ("tp",))], MESH), (Replicate(), _StridedShard(0, split_factor=3))),
    (96, compound([Part(4, ("dp",)), Part(24, ("tp",))], MESH), (Shard(0), _StridedShard(0, split_factor=2))),
    # torch gathers this one wrongly, and these it cannot say.
    (192, compound([Part(3), Part(64, ("tp", "dp"))], MESH), None),
    (105, compound([Part(3), Part(7, ("tp",)), Part(5, ("dp",))], MESH), None),
]


@pytest.mark.parametrize(
    ("size", "sharding", "expected"), SHARDINGS, ids=lambda x: str(x) if isinstance(x, int) else ""
)
def test_placements(size: int, sharding: DimSharding, expected: object) -> None:
    assert placements(Spec((sharding,)), (size,), MESH) == expected


@pytest.mark.parametrize("size", [5, 7, 8, 13, 16])
def test_any_order_of_axes_is_said_rightly_or_not_at_all(size: int) -> None:
    mesh = Mesh(a=2, b=3, c=2)
    said = 0
    for count in (1, 2, 3):
        for axes in itertools.permutations("abc", count):
            spec = Spec((DimSharding(axes),))
            found = placements(spec, (size,), mesh)
            if found is None:
                continue
            said += 1
            for rank in range(mesh.size):
                rows = torch.arange(size)
                for axis, placement in zip(mesh.space, found, strict=True):
                    if not isinstance(placement, Replicate):
                        shards, _ = placement._split_tensor(rows, axis.size, with_padding=False)  # type: ignore[attr-defined]
                        rows = shards[mesh.coords(rank)[axis.name]]
                assert torch.equal(rows, local_shard(torch.arange(size), spec, mesh, rank))
    assert said >= 7


@pytest.mark.parametrize(("size", "sharding"), [(size, sharding) for size, sharding, _ in SHARDINGS])
def test_runs_are_the_rows_that_a_rank_holds(size: int, sharding: DimSharding) -> None:
    whole = torch.arange(size)
    for rank in range(MESH.size):
        held = local_shard(whole, Spec((sharding,)), MESH, rank)
        rows = [whole[start : start + length] for start, length in runs(sharding, size, MESH, MESH.coords(rank))]
        assert torch.equal(torch.cat(rows), held)


def boxes(guarded: bool = False) -> MultiBoxTensor:
    return MultiBoxTensor(torch.arange(8.0).view(4, 2), (((0, 0), (2, 2), (0, 0)), ((6, 0), (2, 2), (2, 0))), guarded)


def test_what_optimizers_make_of_boxes_stands_where_they_stand() -> None:
    local = boxes()
    for made in (torch.zeros_like(local), local * 2, local.clone(), local.detach(), local.add_(1)):
        assert isinstance(made, MultiBoxTensor)
        assert made.__create_chunk_list__() == local.__create_chunk_list__()
    assert not isinstance(local.norm(), MultiBoxTensor)
    first, second = local.__create_chunk_list__()
    assert (tuple(first.offsets), tuple(second.offsets), tuple(second.sizes)) == ((0, 0), (6, 0), (2, 2))
    items = local.__create_write_items__("w", torch.empty(10, 2))
    assert torch.equal(local.__get_tensor_shard__(items[1].index), local.data_[2:])


def test_guarded_boxes_do_only_what_does_not_ask_for_rows() -> None:
    local = boxes(guarded=True)
    assert isinstance(local * 2, MultiBoxTensor) and (local * 2).guarded
    assert local.norm().item() == local.data_.norm().item()
    made = local.new_zeros((40, 2))
    assert isinstance(made, MultiBoxTensor) and made.shape == local.shape
    with pytest.raises(Exception, match="DTensor cannot describe"):
        local[:2]
