"""Placements: the ranks' boxes tile the tensor, views of a sharding are the same sharding, and torch splits as we
do."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

from shardfx.ir.dim_sharding import REPLICATED, DimSharding, Part, chunk, compound, project
from shardfx.ir.errors import Error
from shardfx.ir.mesh import Loop, Mesh
from shardfx.ir.spec import Spec, as_it_lies

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


def sharding_as_torch_does(size: int, counts: list[int]) -> bool:
    """Whether torch leaves nothing for some only where there is not enough, sharding by one count after the other."""
    if not counts:
        return True
    count, *rest = counts
    lengths = {len(shard) for shard in torch.arange(size).chunk(count)}
    if size >= count > len(torch.arange(size).chunk(count)):
        return False
    return all(sharding_as_torch_does(length, rest) for length in lengths)


@given(st.lists(st.integers(0, 11), min_size=1, max_size=3), st.data())
def test_a_plain_sharding_is_dtensors(shape: list[int], data: st.DataObject) -> None:
    """DTensor nests the shardings of a dim in the mesh's own order."""
    mesh = Mesh(a=2, b=3, c=2)
    dims = [data.draw(st.none() | st.integers(0, len(shape) - 1)) for _ in mesh.axes]
    placements = [Replicate() if dim is None else Shard(dim) for dim in dims]
    shardings = tuple(
        DimSharding(tuple(n for n, d in zip(mesh.names, dims, strict=True) if d == i)) for i in range(len(shape))
    )
    spec = Spec(shardings)
    assume(
        all(sharding_as_torch_does(n, [mesh[a].size for a in c.axes]) for n, c in zip(shape, shardings, strict=True))
    )
    for coords in all_coords(mesh):
        local, offset = _compute_local_shape_and_global_offset(
            tuple(shape), tuple(axis.size for axis in mesh.axes), list(coords.values()), placements
        )
        assert spec.local_shape(shape, mesh, coords) == tuple(local)
        if math.prod(local):
            assert tuple(start for start, _ in spec.box(shape, mesh, coords)) == tuple(offset)


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
    with pytest.raises(Error, match="'dp' is used twice"):
        Spec((REPLICATED,), (("dp", "sum"), ("dp", "max")))


def test_a_reduction_is_known() -> None:
    with pytest.raises(Error, match="unknown reduction 'mean'"):
        Spec((REPLICATED,), (("dp", "mean"),))


def test_the_order_of_partial_sums_means_nothing() -> None:
    one, other = (
        Spec((REPLICATED,), (("tp", "sum"), ("dp", "max"))),
        Spec((REPLICATED,), (("dp", "max"), ("tp", "sum"))),
    )
    assert one == other
    assert hash(one) == hash(other)


def test_parse() -> None:
    mesh = Mesh(dp=2, tp=2, pp=2)
    assert Spec.parse("dp tp, -", mesh) == Spec((DimSharding(("dp", "tp")), REPLICATED))
    assert Spec.parse("", mesh, 0) == Spec(())
    assert Spec.parse(" - ", mesh, 1) == Spec.replicated(1)
    with pytest.raises(Error, match="one entry per dim") as caught:
        Spec.parse("dp", mesh, 2, where="hint 'w'")
    assert caught.value.where == "hint 'w'"
    assert caught.value.expected == "2 entries, such as '-, -'"
    with pytest.raises(Error, match="unknown mesh axis 'tq'") as caught:
        Spec.parse("dp, tq", mesh)
    assert caught.value.expected == "one of dp, tp, pp"
    with pytest.raises(Error, match="'dp' is used twice") as caught:
        Spec.parse("dp, dp", mesh, where="hint 'w'")
    assert caught.value.got == "'dp, dp'"


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
