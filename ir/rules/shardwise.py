"""Decompositions that hang on how the first operand is sharded: in how many equal shards its samples and rows lie.

    batch_norm(x[8{dp}, c, 64{h}, ...])   ->   the moments of each of dp h shards, and from these the moments of all

It is the op, whatever the numbers: the shards only say what is worth computing apart.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shardfx.ir.dim_sharding import DimSharding
from shardfx.ir.graph import Node
from shardfx.ir.mesh import Mesh
from shardfx.ir.spec import Spec

FEW = 4
"""Of more axes than these it is not tried what each of them may have sharded."""
MOST = 64
"""In more shards than this, what all ranks exchange is more than the sums that each would add to."""


@dataclass(frozen=True)
class Shardwise:
    """A decomposition: ``function(*args, shards=...)``, with a number for each dim of the first operand but the second,
    of samples and space; none where all is one shard."""

    function: Callable[..., Any]
    shards: tuple[int, ...] = ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, shards=self.shards, **kwargs)


def for_shards(expand: Any, node: Node, shardings: Sequence[DimSharding], mesh: Mesh) -> Any:
    """The decomposition of a node whose first operand is sharded so: by shards that are equal."""
    if not isinstance(expand, Shardwise):
        return expand
    every = list(zip(node.operands[0].shape, shardings, strict=False))
    dims = every[:1] + every[2:]
    shards = tuple(mesh.extent(sharding.axes) for _, sharding in dims)
    equal = all(
        not sharding.parts
        and bool(sharding.axes) is (n > 1)
        and size % n == 0
        and size >= n  # axes of one rank split it
        for (size, sharding), n in zip(dims, shards, strict=True)
    )
    return replace(expand, shards=shards) if equal and 1 < math.prod(shards) <= MOST else expand


def choices(expand: Any, node: Node, specs: Iterable[Spec], mesh: Mesh) -> list[Any]:
    """The decompositions that somebody may have taken of a node whose first operand is held so; or was, before another
    placement of it was found to be better: what each axis of the mesh may have sharded, one of the dims or none."""
    if not isinstance(expand, Shardwise):
        return [expand]
    likely = [
        shardings
        for spec in specs
        for shardings in itertools.product(*(tuple(map(DimSharding, _some(sharding.axes))) for sharding in spec.dims))
    ]
    found = dict.fromkeys(for_shards(expand, node, shardings, mesh) for shardings in reversed(likely))
    names, dims = [axis.name for axis in mesh.axes], range(node.operands[0].type.ndim)
    for places in itertools.product((None, *dims), repeat=len(names)) if len(names) <= FEW else ():
        over = (tuple(name for name, at in zip(names, places, strict=True) if at == dim) for dim in dims)
        found.setdefault(for_shards(expand, node, [DimSharding(axes) for axes in over], mesh))
    found.setdefault(expand)
    return list(found)


def _some(axes: tuple[str, ...]) -> list[tuple[str, ...]]:
    return [some for n in range(1 + len(axes)) for some in itertools.combinations(axes, n)]
