"""Which part of an input a rank reads: of an image that is sharded over ranks its own tile, and no more."""

from __future__ import annotations

from difflib import get_close_matches

from shardfx.ir.dim_sharding import in_stretches
from shardfx.ir.errors import Error
from shardfx.ir.graph import Graph, InputKind, Value

GIVEN = (InputKind.ARGUMENT, InputKind.TARGET)


def input_value(graph: Graph, name: str, where: str) -> Value:
    """The value of an argument or a target.

    Raises:
        Error: no input has this name.
    """
    known = {given.name: given.value for given in graph.inputs if given.kind in GIVEN}
    if name not in known:
        near = get_close_matches(name, known, 1)
        raise Error(
            f"there is no input {name!r}",
            where=where,
            expected=f"one of {', '.join(known)}",
            got=name,
            remedy=f"did you mean {near[0]!r}?" if near else None,
        )
    return known[name]


def tile_of(graph: Graph, name: str, rank: int, halo: int = 0) -> tuple[slice, ...]:
    """The slices of a whole input that a rank of a planned graph reads, with ``halo`` rows more of every dim that is
    sharded, but the first.

    Raises:
        Error: no input has this name; a halo that is no number of rows; a dim is sharded so that the rank reads several
            stretches of it.
    """
    if not isinstance(halo, int) or halo < 0:
        raise Error(
            "a halo is so many rows on each side",
            where=f"pm.tile({name!r}, halo=...)",
            expected="0 or more",
            got=repr(halo),
            remedy="say halo=0, or how many rows of its neighbours' a rank reads as well",
        )
    value, mesh = input_value(graph, name, f"pm.tile({name!r})"), graph.mesh
    coords = mesh.coords(rank)
    assert value.spec is not None
    found = []
    for dim, (size, sharding) in enumerate(zip(value.shape, value.spec.dims, strict=True)):
        if in_stretches(sharding) or any(mesh[axis].loop for axis in sharding.axes):
            raise Error(
                f"a rank reads several stretches of dim {dim}",
                where=f"pm.tile({name!r})",
                expected="each dim split into one stretch for each rank",
                got=value.spec.text(value.shape),
                remedy="give the whole input to pm(...), which shards it",
            )
        start, length = sharding.span(size, mesh, coords)
        more = halo if dim and sharding.axes else 0
        found.append(slice(max(start - more, 0), min(start + length + more, size)))
    return tuple(found)
