"""Which rows are an iteration's own: by the formula, and by what is sharded of a whole tensor."""

from __future__ import annotations

import pytest
import torch

from shardfx.ir.mesh import Loop, Mesh
from shardfx.ir.program.loops.loop_nest import iteration_place, iteration_rows
from shardfx.ir.shards import Shards
from shardfx.ir.spec import Spec

MESH = Mesh(mb=Loop(3), dp=2, chunk=Loop(2))


@pytest.mark.parametrize("text", ["mb dp, -", "dp mb, chunk", "mb chunk, dp", "chunk, mb", "-, dp mb chunk"])
@pytest.mark.parametrize("shape", [(12, 12), (7, 13), (13, 7)])
def test_a_iterations_rows_lie_where_shards_put_them(text: str, shape: tuple[int, int]) -> None:
    spec, whole = Spec.parse(text, MESH), torch.arange(shape[0] * shape[1]).reshape(shape)
    shards = Shards.of(spec, shape, MESH)
    local = [shards.sharding(whole, shard) for shard in range(shards.count)]
    assert torch.equal(shards.join(local), whole)
    for rank in range(MESH.size):
        held = local[shards.by_rank[rank]]
        for at in MESH.along(MESH.coords(rank), ["mb", "chunk"]):
            part, left = held, held
            for dim, (start, length) in iteration_place(spec, shape, MESH, at).items():
                part = part.narrow(dim, start, length)
            for axis in ("mb", "chunk"):
                for dim, sharding in enumerate(spec.dims):
                    if axis in sharding.axes:
                        left = left.narrow(dim, *iteration_rows(spec, shape, MESH, at, axis, dim))
            spans = [sharding.spans(size, MESH, at)[0] for sharding, size in zip(spec.dims, shape, strict=True)]
            expected = whole
            for dim, span in enumerate(spans):
                expected = expected.narrow(dim, *span)
            assert torch.equal(part, expected) and torch.equal(left, expected)
