"""A rank's shard of a parameter as a ``DTensor`` of the model's global shape.

=======  =========================  ================================================================================
plain    ``64{dp}``, ``64{dp,tp}``  the shard is one box of the whole: a DTensor, and nothing more to say
boxes    ``(3 64{tp})``             the shard is several boxes: the DTensor's local tensor is a
                                    :class:`MultiBoxTensor`, which tells ``torch.distributed.checkpoint`` where
                                    each of them stands
guarded  ``(3 64{tp,dp})``          no DTensor placement gives these shards (see :func:`placements`): the one
                                    it has says along which axes it is sharded, and no more. Optimizers, norms and
                                    checkpoints work; ``full_tensor()`` and ``redistribute()`` are errors
=======  =========================  ================================================================================
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._pytree import tree_map_only

from shardfx.ir.dim_sharding import Coords, DimSharding, bounds
from shardfx.ir.errors import Error
from shardfx.ir.mesh import Mesh
from shardfx.ir.spec import Spec

aten = torch.ops.aten
Tensor = torch.Tensor
Span = tuple[int, int]
"""Start and length of consecutive rows."""
Box = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""Offsets in the global tensor, sizes, and offsets in the local tensor."""
MAKES = {
    aten.new_empty_strided.default: 3,
    aten.new_empty.default: 2,
    aten.new_zeros.default: 2,
    aten.new_ones.default: 2,
}
"""Ops that make a tensor of a shape that DTensor derives from the placement; and how many arguments say it."""


@dataclass(frozen=True)
class DTensorShard:
    """Converts a rank's shard of one value to a DTensor and back; both share the shard's memory."""

    template: Any
    boxes: tuple[Box, ...] | None = None
    """The boxes of a shard that is several, or guarded."""
    guarded: bool = False

    @staticmethod
    def of(
        spec: Spec, shape: Sequence[int], dtype: torch.dtype, mesh: Mesh, device_mesh: DeviceMesh, coords: Coords
    ) -> DTensorShard:
        """The DTensor view of a rank's shard, at ``coords``. ``device_mesh`` has the axes of ranks of ``mesh``."""
        shard = torch.empty(spec.local_shape(shape, mesh, coords), dtype=dtype, device="meta")
        found: Sequence[Placement] | None = placements(spec, shape, mesh)
        guarded, boxes = found is None, None
        if found is None:
            dims = {axis: dim for dim, sharding in enumerate(spec.dims) for axis in sharding.axes}
            found = [Shard(dims[a.name]) if a.name in dims else Replicate() for a in mesh.space]
        if guarded or any(sharding.parts for sharding in spec.dims):
            boxes = _boxes([runs(each, size, mesh, coords) for each, size in zip(spec.dims, shape, strict=True)])
        stride = torch.empty(tuple(shape), device="meta").stride()
        made = DTensor.from_local(shard, device_mesh, found, run_check=False, shape=torch.Size(shape), stride=stride)
        return DTensorShard(made._spec, boxes, guarded)

    def wrap(self, shard: Tensor) -> DTensor:
        """The DTensor around a rank's plain shard; both share memory.

        It says that it begins where its memory does, also where the shard does not: torch copies no others
        (``copy.deepcopy`` of a module, of a state dict).
        """
        if self.boxes is not None:
            return DTensor(MultiBoxTensor(shard, self.boxes, self.guarded), self.template, requires_grad=False)
        if not shard.storage_offset():
            return DTensor(shard, self.template, requires_grad=False)
        made = DTensor(shard.as_strided(shard.shape, shard.stride(), 0), self.template, requires_grad=False)
        made._local_tensor = shard
        return made

    def parameter(self, shard: Tensor, trained: bool) -> nn.Parameter:
        """A shard as a parameter, as ``nn.Parameter`` makes one of a DTensor, and as :meth:`wrap` says it."""
        made: Any = self.wrap(shard).requires_grad_(trained)
        made._is_param = True
        return made  # type: ignore[no-any-return]

    def plain(self, tensor: Tensor) -> Tensor | None:
        """The plain shard behind ``tensor``, which is the shard itself where it is plain; None: it is placed
        otherwise."""
        if not isinstance(tensor, DTensor):
            return tensor
        spec, mine = tensor._spec, self.template
        alike = spec is mine or (spec.placements, spec.mesh, spec.shape) == (mine.placements, mine.mesh, mine.shape)
        return self.unwrap(tensor) if alike else None

    @staticmethod
    def unwrap(tensor: Tensor) -> Tensor:
        """The plain shard of a rank, of a DTensor or of what DTensor hands to an op. Shares memory."""
        local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        return local.data_ if isinstance(local, MultiBoxTensor) else local


def _boxes(local_runs: Sequence[Sequence[Span]]) -> tuple[Box, ...]:
    """The boxes of a shard: all combinations of the runs of each dim."""
    columns = []
    for spans in local_runs:
        ats = itertools.accumulate((length for _, length in spans), initial=0)
        columns.append([(start, length, at) for (start, length), at in zip(spans, ats, strict=False)])
    return tuple(tuple(zip(*each, strict=True)) for each in itertools.product(*columns))  # type: ignore[misc]


# ---- placements


def placements(spec: Spec, shape: Sequence[int], mesh: Mesh) -> tuple[Placement, ...] | None:
    """One placement per axis of ranks; None if DTensor has none that give the same shards::

        dp tp, -            on Mesh(dp, tp)     (Shard(0), Shard(0))
        tp dp, -            on Mesh(dp, tp)     (_StridedShard(0, split_factor=2), Shard(0))
        (3 64{tp}), -       on Mesh(tp)         (_StridedShard(0, split_factor=3),)

    DTensor shards a dim over several mesh axes in the order of the *mesh*, each within what the one before left. An
    axis that has something more major than itself unsharded is strided: it shards each of ``split_factor`` equal
    parts, and joins what it takes of each. Where sizes do not divide, that need not be the same, so every answer is
    tried on row numbers, by torch's own splitting. And torch 2.13 gathers a dim that is sharded by several axes, of
    which one but the last is strided, rightly only where the split is plain (it gives wrong tensors for
    ``(3 64{tp,dp})``, without a word): the others count as what DTensor cannot say.
    """
    found: dict[str, Placement] = {}
    for dim, (sharding, size) in enumerate(zip(spec.dims, shape, strict=True)):
        chosen = _of_dim(sharding, size, dim, mesh)
        if chosen is None:
            return None
        found |= chosen
    return tuple(found.get(axis.name, Replicate()) for axis in mesh.space)


def runs(sharding: DimSharding, size: int, mesh: Mesh, coords: Coords) -> list[Span]:
    """The contiguous row ranges of a rank's shard of a dim, in the shard's order."""
    result = [(0, 1)]
    for part in sharding.sub(size):
        start, length = bounds(part.size, part.axes, mesh, coords)
        if length == part.size:
            result = [(at * length, count * length) for at, count in result]
        else:
            result = [((at + i) * part.size + start, length) for at, count in result for i in range(count)]
    return [(start, length) for start, length in result if length]


def _of_dim(sharding: DimSharding, size: int, dim: int, mesh: Mesh) -> dict[str, Placement] | None:
    axes = mesh.sort(sharding.axes)
    if not sharding.parts and axes == sharding.axes and size % mesh.extent(axes) == 0:
        return {axis: Shard(dim) for axis in axes}
    factors: dict[str, int] = {}
    for axis in axes:
        factors[axis] = _split_factor(sharding, size, axis, factors, mesh)
    if sharding.parts and any(factors[axis] > 1 for axis in axes[:-1]):
        return None
    rows = torch.arange(size)
    for places in itertools.product(*(range(mesh[axis].size) for axis in axes)):
        coords = dict(zip(axes, places, strict=True))
        local = rows
        for axis in axes:
            split = _placement(0, factors[axis])._split_tensor(local, mesh[axis].size, with_padding=False)
            local = split[0][coords[axis]]
        wanted = [rows[start : start + length] for start, length in runs(sharding, size, mesh, coords)]
        if not torch.equal(local, torch.cat(wanted) if wanted else rows[:0]):
            return None
    return {axis: _placement(dim, factors[axis]) for axis in axes}


def _placement(dim: int, factor: int) -> Any:
    return Shard(dim) if factor == 1 else _StridedShard(dim, split_factor=factor)


def _split_factor(sharding: DimSharding, size: int, axis: str, done: Container[str], mesh: Mesh) -> int:
    """How many parts ``axis`` splits: the product of what is more major, and not sharded by ``done`` already."""
    factor = 1
    for part in sharding.sub(size):
        if axis in part.axes:
            before = part.axes[: part.axes.index(axis)]
            return factor * mesh.extent(a for a in before if a not in done)
        factor *= math.ceil(part.size / mesh.extent(a for a in part.axes if a in done))
    raise AssertionError(f"{axis} does not shard {sharding}")


# ---- local tensors of several boxes


class MultiBoxTensor(Tensor):
    """A local tensor that is several boxes of its global tensor, side by side. Elementwise results are so, too."""

    data_: Tensor
    boxes: tuple[Box, ...]
    guarded: bool

    @staticmethod
    def __new__(cls, data: Tensor, boxes: tuple[Box, ...], guarded: bool = False) -> MultiBoxTensor:
        made = Tensor._make_wrapper_subclass(
            cls, data.shape, strides=data.stride(), dtype=data.dtype, device=data.device
        )
        made.data_, made.boxes, made.guarded = data, boxes, guarded
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        mine: dict[int, MultiBoxTensor] = {}

        def open_(tensor: MultiBoxTensor) -> Tensor:
            mine[id(tensor.data_)] = tensor
            return tensor.data_

        args, kwargs = tree_map_only(MultiBoxTensor, open_, (args, dict(kwargs or {})))
        first = next(iter(mine.values()))
        guarded = any(tensor.guarded for tensor in mine.values())
        if guarded and func.namespace != "aten":  # type: ignore[attr-defined]  # a collective: before it starts
            raise _cannot_say(func)
        if guarded and func in MAKES:
            args = (first.data_, first.shape, first.stride())[: MAKES[func]] + args[MAKES[func] :]
        result = func(*args, **kwargs)
        like = {tensor.shape: tensor for tensor in mine.values()}

        def close(tensor: Tensor) -> Tensor:
            if id(tensor) in mine:
                return mine[id(tensor)]
            twin = like.get(tensor.shape)
            if twin is not None:
                return MultiBoxTensor(tensor, twin.boxes, twin.guarded)
            if guarded and tensor.dim():
                raise _cannot_say(func)
            return tensor

        return tree_map_only(Tensor, close, result)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return MultiBoxTensor, (self.data_, self.boxes, self.guarded)

    def __deepcopy__(self, memo: dict[int, Any]) -> MultiBoxTensor:
        return MultiBoxTensor(self.data_.clone(), self.boxes, self.guarded)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Boxes({self.data_!r}, {self.boxes})"

    # What torch.distributed.checkpoint asks of a DTensor's local tensor.

    def __create_write_items__(self, fqn: str, full: Any) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self.data_)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=full.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes, _ in self.boxes]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        for offsets, sizes, local in self.boxes:
            if torch.Size(offsets) == index.offset:
                return self.data_[tuple(slice(at, at + size) for at, size in zip(local, sizes, strict=True))]
        raise KeyError(f"no box of {index.fqn} at {index.offset}")


def _cannot_say(func: Any) -> Error:
    return Error(
        "DTensor cannot describe how this parameter is sharded, and would compute something else",
        where=str(func),
        expected="elementwise operations, and norms of everything",
        got="an operation that depends on which rows a rank holds",
        remedy="take global tensors from pm.full_state_dict() and pm.full_grads()",
    )
