"""The mesh and placements: ranks, groups, boxes that tile the tensor, torch's own splitting of it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardfx.ir.dim_sharding import REPLICATED, DimSharding, Part, chunk, compound, project
from shardfx.ir.errors import Error
from shardfx.ir.mesh import Axis, Link, Loop, Mesh
from shardfx.ir.shards import local_shard
from shardfx.ir.spec import Spec, as_it_lies
from shardfx.runtime.distributed.dtensor_shard import MultiBoxTensor, placements, runs

MESH = Mesh(a=2, b=3, c=2, t=Loop(2), one=1)


def all_coords(mesh: Mesh) -> Iterator[dict[str, int]]:
    """Every rank at every iteration."""
    for index in itertools.product(*(range(axis.size) for axis in mesh.axes)):
        yield dict(zip(mesh.names, index, strict=True))


def held(spec: Spec, shape: Sequence[int], coords: Mapping[str, int]) -> Any:
    """The flat indices of the elements that are held there, in order."""
    everything = np.arange(math.prod(shape)).reshape(spec.sub_shape(shape))
    return everything[tuple(slice(s, s + n) for s, n in spec.box(shape, MESH, coords))].reshape(-1)


def same(a: Spec, a_shape: Sequence[int], b: Spec, b_shape: Sequence[int]) -> bool:
    """Whether all ranks hold the same elements of both, in the same order."""
    return all(np.array_equal(held(a, a_shape, c), held(b, b_shape, c)) for c in all_coords(MESH))


@st.composite
def parts(draw: st.DrawFn, smallest: int = 1) -> list[Part]:
    """Some sub-dims, each sharded over axes of its own."""
    sizes = draw(st.lists(st.integers(smallest, 7), min_size=1, max_size=4))
    axes = draw(st.permutations(MESH.names))
    places = draw(st.lists(st.integers(0, 2 * len(sizes)), min_size=len(axes), max_size=len(axes)))
    return [
        Part(size, tuple(axis for axis, place in zip(axes, places, strict=True) if place == i))
        for i, size in enumerate(sizes)
    ]


@st.composite
def placed(draw: st.DrawFn) -> tuple[tuple[int, ...], Spec]:
    """A shape and a placement: dims plain or compound, even or not, nested."""
    found = draw(parts())
    dims: list[list[Part]] = [[]]
    for part in found:
        if draw(st.booleans()) and dims[-1]:
            dims.append([])
        dims[-1].append(part)
    shape = tuple(math.prod(part.size for part in dim) for dim in dims)
    return shape, Spec(tuple(compound(dim, MESH) for dim in dims))


# ---- what a rank holds -------------------------------------------------------------------------------------


@given(placed())
def test_the_boxes_tile_the_tensor(case: tuple[tuple[int, ...], Spec]) -> None:
    shape, spec = case
    counts = np.zeros(math.prod(shape), dtype=int)
    for coords in all_coords(MESH):
        mine = held(spec, shape, coords)
        counts[mine] += 1
        assert len(mine) == math.prod(spec.local_shape(shape, MESH, coords))
        assert len(mine) <= spec.local_numel(shape, MESH)
    assert set(counts) == {MESH.extent(MESH.names) // MESH.extent(spec.axes)}


@given(st.integers(0, 40), st.integers(1, 9))
def test_a_chunk_is_torchs_unless_that_leaves_nothing_to_some(size: int, count: int) -> None:
    given_by_torch = [len(shard) for shard in torch.arange(size).chunk(count)] if size else []
    given_by_torch += [0] * (count - len(given_by_torch))
    ours = [chunk(size, count, index) for index in range(count)]
    lengths = [length for _, length in ours]
    if size >= count and given_by_torch[-1] == 0:
        assert lengths[-1] and sum(lengths) == size and lengths == sorted(lengths, reverse=True)
        assert lengths[0] == given_by_torch[0]
    else:
        assert lengths == given_by_torch
    assert [start for start, length in ours if length] == [sum(lengths[:i]) for i in range(count) if lengths[i]]


# ---- compounds and views -----------------------------------------------------------------------------------


@given(parts(), st.data())
def test_a_projection_holds_the_same(found: list[Part], data: st.DataObject) -> None:
    """Of any factors of the dim: a projection is the same sharding, or there is none."""
    size = math.prod(part.size for part in found)
    factors: list[int] = []
    left = size
    while left > 1 and len(factors) < 4:
        factors.append(data.draw(st.sampled_from([f for f in range(2, left + 1) if left % f == 0])))
        left //= factors[-1]
    factors.append(left)
    sharding = compound(found, MESH)
    projected = project(sharding, size, factors, MESH)
    assume(projected is not None)
    assert projected is not None
    assert same(Spec((sharding,)), [size], Spec(projected), factors)


def test_projections() -> None:
    mesh = Mesh(dp=2, tp=2)
    dp, tp, both = DimSharding(("dp",)), DimSharding(("tp",)), DimSharding(("dp", "tp"))
    assert project(dp, 8, (2, 4), mesh) == (dp, REPLICATED)
    assert project(both, 8, (2, 4), mesh) == (dp, tp)
    assert project(both, 8, (4, 2), mesh) == (both, REPLICATED)
    assert project(tp, 6, (3, 2), mesh) is None
    assert project(tp, 5, (5, 1), mesh) == (tp, REPLICATED)
    assert project(tp, 5, (1, 5), mesh) == (REPLICATED, tp)
    assert project(REPLICATED, 6, (3, 2), mesh) == (REPLICATED, REPLICATED)
    assert project(dp, 0, (0, 4), mesh) is None
    qkv = DimSharding(("tp",), (Part(3), Part(64, ("tp",))))
    assert compound([Part(3), Part(64, ("tp",))], mesh) == qkv
    assert project(qkv, 192, (3, 64), mesh) == (REPLICATED, tp)
    assert project(qkv, 192, (3, 4, 16), mesh) == (REPLICATED, tp, REPLICATED)
    assert project(qkv, 192, (12, 16), mesh) == (DimSharding(("tp",), (Part(3), Part(4, ("tp",)))), REPLICATED)
    assert compound([Part(2, ("dp",)), Part(4, ("tp",))], mesh) == both
    assert compound([Part(1), Part(4, ("tp",)), Part(1)], mesh) == tp
    assert compound([Part(1), Part(1)], mesh) == REPLICATED


# ---- a spec checks itself ----------------------------------------------------------------------------------


def test_an_axis_is_used_once() -> None:
    with pytest.raises(Error, match="'tp' is used twice"):
        Spec((DimSharding(("tp",)), DimSharding(("tp",))))
    with pytest.raises(Error, match="'tp' is used twice"):
        Spec((DimSharding(("tp",)),), (("tp", "sum"),))
    with pytest.raises(Error, match="unknown reduction 'mean'"):
        Spec((REPLICATED,), (("dp", "mean"),))


def test_parse() -> None:
    mesh = Mesh(dp=2, tp=2, pp=2)
    assert Spec.parse("dp tp, -", mesh) == Spec((DimSharding(("dp", "tp")), REPLICATED))
    assert Spec.parse("", mesh, 0) == Spec(())
    assert Spec.parse(" - ", mesh, 1) == Spec.replicated(1)
    with pytest.raises(Error, match="one entry per dim") as caught:
        Spec.parse("dp", mesh, 2, where="hint 'w'")
    assert caught.value.where == "hint 'w'"
    assert caught.value.expected == "2 entries, such as '-, -'"


def test_a_copy_lies_as_its_tensor() -> None:
    """Dense in any order, with gaps, with elements that share a place, of no elements; and what has no strides."""
    box = torch.arange(60.0).reshape(3, 4, 5)
    views = (box, box.permute(2, 0, 1), box[:, ::2], box[0, 0].expand(3, 5), torch.arange(9.0).unfold(0, 3, 1), box[:0])
    for tensor in (*views, torch.tensor(3.0), box.to(torch.complex64)):
        made = as_it_lies(tensor)
        assert torch.equal(made, tensor) and made.stride() == tensor.stride()
        assert made.data_ptr() != tensor.data_ptr() or not tensor.numel()
    sparse = torch.eye(3).to_sparse()
    assert torch.equal(as_it_lies(sparse).to_dense(), sparse.to_dense())


SIZES = st.lists(st.integers(1, 4), min_size=1, max_size=3)


def mesh_of(sizes: list[int]) -> Mesh:
    return Mesh(links=None, **{f"a{i}": size for i, size in enumerate(sizes)})


@given(SIZES, st.data())
def test_groups_partition_the_ranks(sizes: list[int], data: st.DataObject) -> None:
    mesh = mesh_of(sizes)
    axes = data.draw(st.permutations(mesh.names))[: data.draw(st.integers(1, len(sizes)))]
    groups = {mesh.group_name(rank, axes): mesh.group(rank, axes) for rank in range(mesh.size)}
    assert sorted(rank for group in groups.values() for rank in group) == list(range(mesh.size))
    assert {len(group) for group in groups.values()} == {mesh.extent(axes)}
    for rank in range(mesh.size):
        assert rank in groups[mesh.group_name(rank, axes)]


def test_the_last_axis_varies_fastest() -> None:
    mesh = Mesh(dp=2, tp=3)
    assert mesh.size == 6
    assert mesh.coords(4) == {"dp": 1, "tp": 1}
    assert list(mesh.coords(4)) == ["dp", "tp"]
    assert mesh.group(4, ["tp"]) == (3, 4, 5)
    assert mesh.group(4, ["dp"]) == (1, 4)
    assert mesh.group(0, ["tp", "dp"]) == (0, 3, 1, 4, 2, 5)
    assert mesh.sort(["tp", "dp", "tp"]) == ("dp", "tp")

    mesh = Mesh(pp=2, mb=Loop(8), tp=2)  # a loop axis has no ranks
    assert mesh.size == 4
    assert mesh.extent(["mb", "tp"]) == 16
    assert mesh.space == (Axis("pp", 2), Axis("tp", 2))
    assert mesh.coords(3) == {"pp": 1, "tp": 1}
    assert mesh.signature == "pp2.tp2"
    assert repr(mesh) == "Mesh(pp=2, mb=Loop(8), tp=2)"


@pytest.mark.parametrize("size", [0, True, "2", Loop(0)])
def test_a_size_must_be_a_count(size: object) -> None:
    with pytest.raises(Error, match="'dp' has no valid size") as caught:
        Mesh(dp=size)  # type: ignore[arg-type]
    assert caught.value.got == size


def test_mistakes_are_named() -> None:
    mesh = Mesh(dp=2, tp=2)
    with pytest.raises(Error, match="needs at least one axis"):
        Mesh()
    with pytest.raises(Error, match="unknown axes"):
        Mesh(dp=2, links={"tp": Link()})
    with pytest.raises(Error, match="no rank 4"):
        mesh.coords(4)
    with pytest.raises(Error, match="positive bandwidth"):
        Link(bandwidth=0)


@pytest.fixture
def six_ranks() -> Iterator[None]:
    """A process group of six ranks, five of which do not exist."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=6)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.usefixtures("six_ranks")
def test_a_device_mesh_there_and_back() -> None:
    mesh = Mesh(dp=2, mb=Loop(4), tp=3)
    device_mesh = mesh.to_device_mesh()
    assert device_mesh.mesh_dim_names == ("dp", "tp")
    assert device_mesh.mesh.tolist() == [list(mesh.group(0, ["tp"])), list(mesh.group(3, ["tp"]))]
    assert Mesh.from_device_mesh(device_mesh) == Mesh(dp=2, tp=3)
    with pytest.raises(Error, match="no dimension names"):
        Mesh.from_device_mesh(dist.init_device_mesh("cpu", (2, 3)))


TORCH_MESH = Mesh(dp=2, tp=2)
SHARDINGS = [
    (8, DimSharding(("dp", "tp")), (Shard(0), Shard(0))),
    (7, DimSharding(("dp", "tp")), (Shard(0), Shard(0))),
    (8, DimSharding(("tp",)), (Replicate(), Shard(0))),
    (8, DimSharding(("tp", "dp")), (_StridedShard(0, split_factor=2), Shard(0))),
    (192, compound([Part(3), Part(64, ("tp",))], TORCH_MESH), (Replicate(), _StridedShard(0, split_factor=3))),
    (21, compound([Part(3), Part(7, ("tp",))], TORCH_MESH), (Replicate(), _StridedShard(0, split_factor=3))),
    (96, compound([Part(4, ("dp",)), Part(24, ("tp",))], TORCH_MESH), (Shard(0), _StridedShard(0, split_factor=2))),
    # torch gathers this one wrongly, and these it cannot say.
    (192, compound([Part(3), Part(64, ("tp", "dp"))], TORCH_MESH), None),
    (105, compound([Part(3), Part(7, ("tp",)), Part(5, ("dp",))], TORCH_MESH), None),
]


@pytest.mark.parametrize(
    ("size", "sharding", "expected"), SHARDINGS, ids=lambda x: str(x) if isinstance(x, int) else ""
)
def test_placements(size: int, sharding: DimSharding, expected: object) -> None:
    assert placements(Spec((sharding,)), (size,), TORCH_MESH) == expected


@pytest.mark.parametrize("size", [7, 16])
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
    for rank in range(TORCH_MESH.size):
        held = local_shard(whole, Spec((sharding,)), TORCH_MESH, rank)
        rows = [
            whole[start : start + length] for start, length in runs(sharding, size, TORCH_MESH, TORCH_MESH.coords(rank))
        ]
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
