"""The mesh: ranks and coordinates, groups, torch's DeviceMesh, and mistakes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardfx.ir.errors import Error
from shardfx.ir.mesh import Axis, Link, Loop, Mesh

SIZES = st.lists(st.integers(1, 4), min_size=1, max_size=3)


def mesh_of(sizes: list[int]) -> Mesh:
    return Mesh(links=None, **{f"a{i}": size for i, size in enumerate(sizes)})


@given(SIZES)
def test_rank_is_the_inverse_of_coords(sizes: list[int]) -> None:
    mesh = mesh_of(sizes)
    assert [mesh.rank(mesh.coords(rank)) for rank in range(mesh.size)] == list(range(mesh.size))
    assert len({tuple(mesh.coords(rank).items()) for rank in range(mesh.size)}) == mesh.size


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


def test_an_axis_of_time_has_no_ranks() -> None:
    mesh = Mesh(pp=2, mb=Loop(8), tp=2)
    assert mesh.size == 4
    assert mesh.extent(["mb", "tp"]) == 16
    assert mesh.space == (Axis("pp", 2), Axis("tp", 2))
    assert mesh.coords(3) == {"pp": 1, "tp": 1}
    assert mesh.signature == "pp2.tp2"
    assert repr(mesh) == "Mesh(pp=2, mb=Loop(8), tp=2)"


@pytest.mark.parametrize("size", [0, -1, 2.0, True, "2", Loop(0)])
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
    with pytest.raises(Error, match="'a b' cannot name a mesh axis"):
        Mesh(links=None, **{"a b": 2})
    with pytest.raises(Error, match="unknown mesh axis 'tq'") as caught:
        mesh["tq"]
    assert caught.value.expected == "one of dp, tp"
    with pytest.raises(Error, match="no rank 4"):
        mesh.coords(4)
    with pytest.raises(Error, match="positive bandwidth"):
        Link(bandwidth=0)
    with pytest.raises(Error, match="positive bandwidth"):
        Link(latency=-1e-6)


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


@pytest.mark.usefixtures("six_ranks")
def test_a_device_mesh_that_has_no_description() -> None:
    with pytest.raises(Error, match="no dimension names"):
        Mesh.from_device_mesh(dist.init_device_mesh("cpu", (2, 3)))
    backwards = dist.DeviceMesh("cpu", [[5, 4, 3], [2, 1, 0]], mesh_dim_names=("dp", "tp"))
    with pytest.raises(Error, match="in order"):
        Mesh.from_device_mesh(backwards)
