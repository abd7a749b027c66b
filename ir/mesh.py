"""The device mesh: named axes of ranks (space) and of loop iterations (time), and the links between ranks.

A mesh is a pure description. ``Mesh(dp=128, tp=128)`` plans for 16,384 ranks and starts no process.

    >>> mesh = Mesh(dp=2, tp=4)
    >>> mesh.size, mesh.coords(5)
    (8, {'dp': 1, 'tp': 1})
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from .errors import Error

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class Link:
    """The link between the ranks along an axis: bytes per second (per rank) and seconds per message."""

    bandwidth: float = 100e9
    latency: float = 5e-6

    def __post_init__(self) -> None:
        if not self.bandwidth > 0 or not self.latency >= 0:
            what = "a link needs a positive bandwidth and a latency that is not negative"
            got = f"Link(bandwidth={self.bandwidth}, latency={self.latency})"
            raise Error(what, expected="Link(bandwidth=bytes/s, latency=s)", got=got)

    def seconds(self, messages: float, nbytes: float) -> float:
        """Seconds to send so many bytes in so many dependent messages."""
        return messages * self.latency + nbytes / self.bandwidth


@dataclass(frozen=True)
class Loop:
    """A loop axis instead of ranks: its parts are computed one after the other.

    With ``interleave`` an iteration goes on while another one waits for what ranks send one another: one's collectives
    are sent while the other computes, and as many iterations are live as are in flight.
    """

    iterations: int
    interleave: bool = False

    def __str__(self) -> str:
        return f"Loop({self.iterations}{', interleave=True' if self.interleave else ''})"


@dataclass(frozen=True)
class Axis:
    """One named axis: ``size`` ranks (space) or iterations (time), which may be interleaved."""

    name: str
    size: int
    loop: bool = False
    link: Link = Link()
    interleave: bool = False

    @property
    def extent(self) -> int | Loop:
        """The size as the :class:`Mesh` constructor takes it."""
        return Loop(self.size, self.interleave) if self.loop else self.size


class Mesh:
    """Named axes, outermost first; rank 0 is all zeros, the last axis varies fastest.

    Args:
        axes: ``name=int`` for ranks, ``name=Loop(int)`` for iterations (see :class:`Loop`).
        links: a :class:`Link` per axis name; the default serves where none is given.
    """

    def __init__(self, *, links: Mapping[str, Link] | None = None, **axes: int | Loop) -> None:
        links = dict(links or {})
        if not axes:
            raise Error("a mesh needs at least one axis", expected="Mesh(dp=2, tp=2)", got="Mesh()")
        unknown = [name for name in links if name not in axes]
        if unknown:
            raise Error(f"links name unknown axes {unknown}", expected=f"among {list(axes)}", got=unknown)
        made = []
        for name, value in axes.items():
            if not name.isidentifier():
                raise Error(f"{name!r} cannot name a mesh axis", expected="a name such as dp or tp_inner", got=name)
            size = value.iterations if isinstance(value, Loop) else value
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                what = f"mesh axis {name!r} has no valid size"
                raise Error(what, expected="an int of at least 1, or Loop(iterations)", got=value)
            interleave = isinstance(value, Loop) and value.interleave
            if not isinstance(interleave, bool):
                raise Error(
                    f"mesh axis {name!r}: iterations are interleaved or not", expected="True or False", got=interleave
                )
            made.append(Axis(name, size, isinstance(value, Loop), links.get(name, Link()), interleave))
        self.axes: tuple[Axis, ...] = tuple(made)

    @cached_property
    def _by_name(self) -> dict[str, Axis]:
        return {axis.name: axis for axis in self.axes}

    @cached_property
    def space(self) -> tuple[Axis, ...]:
        """The axes of ranks, outermost first."""
        return tuple(axis for axis in self.axes if not axis.loop)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of all axes, outermost first."""
        return tuple(axis.name for axis in self.axes)

    @cached_property
    def size(self) -> int:
        """The number of ranks."""
        return math.prod(axis.size for axis in self.space)

    def __getitem__(self, name: str) -> Axis:
        try:
            return self._by_name[name]
        except KeyError:
            expected, remedy = f"one of {', '.join(self.names)}", "spell it as in the Mesh, or add the axis there"
            raise Error(f"unknown mesh axis {name!r}", expected=expected, got=name, remedy=remedy) from None

    def extent(self, axes: Iterable[str]) -> int:
        """The product of the sizes of some axes."""
        return math.prod(self[name].size for name in axes)

    def with_links(self, links: Mapping[str, Link]) -> Mesh:
        """The same mesh with these links alone."""
        return Mesh(links=links, **{axis.name: axis.extent for axis in self.axes})

    def link(self, axes: Iterable[str]) -> Link:
        """The bottleneck link of a group over some axes: the lowest bandwidth, the longest latency."""
        links = [self[name].link for name in axes] or [Link()]
        return Link(min(link.bandwidth for link in links), max(link.latency for link in links))

    def order(self, name: str) -> int:
        """The index of an axis, outermost first: the canonical order where a set of axes is written."""
        return self.names.index(self[name].name)

    def sort(self, axes: Iterable[str]) -> tuple[str, ...]:
        """Axes in the mesh's own order, outermost first."""
        return tuple(sorted(set(axes), key=self.order))

    def coords(self, rank: int) -> dict[str, int]:
        """The coordinates of a rank, by axis of ranks."""
        if not 0 <= rank < self.size:
            raise Error(f"no rank {rank} on this mesh", expected=f"0 .. {self.size - 1}", got=rank)
        result = {}
        for axis in reversed(self.space):
            rank, result[axis.name] = divmod(rank, axis.size)
        return dict(reversed(result.items()))

    def rank(self, coords: Mapping[str, int]) -> int:
        """The inverse of :meth:`coords`."""
        result = 0
        for axis in self.space:
            result = result * axis.size + coords[axis.name]
        return result

    def group(self, rank: int, axes: Iterable[str]) -> tuple[int, ...]:
        """The ranks that differ from ``rank`` along ``axes`` only, the first axis given being the major one."""
        return tuple(self.rank(c) for c in self.along(self.coords(rank), axes))

    def along(self, coords: Mapping[str, int], axes: Iterable[str]) -> list[dict[str, int]]:
        """All coordinates that differ from some along ``axes`` only, the first axis given being the major one."""
        found = [dict(coords)]
        for name in axes:
            found = [{**c, name: i} for c in found for i in range(self[name].size)]
        return found

    def group_name(self, rank: int, axes: Iterable[str]) -> str:
        """A name for :meth:`group` that is the same on all of its ranks, such as ``dp2.tp2/tp@1``."""
        axes = tuple(axes)
        others = [a.name for a in self.space if a.name not in axes]
        coords = self.coords(rank)
        index = 0
        for name in others:
            index = index * self[name].size + coords[name]
        return f"{self.signature}/{'.'.join(axes)}@{index}"

    def group_axes(self, name: str) -> tuple[str, ...]:
        """The axes of a group from its name (see :meth:`group_name`)."""
        shape, _, rest = name.partition("/")
        axes = tuple(rest.partition("@")[0].split("."))
        if shape != self.signature or any(axis not in self.names for axis in axes):
            remedy = "take group names from Mesh.group_name(rank, axes)"
            raise Error("a group of another mesh", expected=f"a group of mesh {self}", got=name, remedy=remedy)
        return axes

    @cached_property
    def signature(self) -> str:
        """The mesh shape as a word, such as ``dp2.tp2``."""
        return ".".join(f"{a.name}{a.size}" for a in self.space)

    @classmethod
    def from_device_mesh(cls, mesh: DeviceMesh) -> Mesh:
        """A mesh from a torch ``DeviceMesh`` with named dimensions, whose ranks are 0, 1, 2, ... in order."""
        if not hasattr(mesh, "mesh_dim_names"):
            expected = "a shardfx.Mesh, such as Mesh(dp=2, tp=4), or a torch DeviceMesh"
            raise Error("this is no mesh", expected=expected, got=f"{mesh!r} of type {type(mesh).__name__}")
        names, ranks, wanted = mesh.mesh_dim_names, mesh.mesh.flatten().tolist(), list(range(mesh.mesh.numel()))
        if not names:
            expected = "init_device_mesh(..., mesh_dim_names=('dp', 'tp'))"
            raise Error("this DeviceMesh has no dimension names", expected=expected, got="mesh_dim_names=None")
        if ranks != wanted:
            what, remedy = "hold the ranks 0, 1, 2, ... in order", "make it with init_device_mesh over the whole world"
            raise Error(f"this DeviceMesh does not {what}", expected=wanted, got=ranks, remedy=remedy)
        return cls(links=None, **dict(zip(names, mesh.mesh.shape, strict=True)))

    def to_device_mesh(self, device_type: str = "cpu") -> DeviceMesh:
        """The torch ``DeviceMesh`` of the axes of ranks (``torch.distributed`` must be initialised)."""
        from torch.distributed.device_mesh import init_device_mesh

        shape = tuple(axis.size for axis in self.space)
        return init_device_mesh(device_type, shape, mesh_dim_names=tuple(axis.name for axis in self.space))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mesh) and self.axes == other.axes

    def __hash__(self) -> int:
        return hash(self.axes)

    def __repr__(self) -> str:
        return f"Mesh({', '.join(f'{axis.name}={axis.extent}' for axis in self.axes)})"
