"""How a rank's piece of a parameter lives in torch: as a ``DTensor`` of the model's whole shape.

=======  =========================  ================================================================================
plain    ``64{dp}``, ``64{dp,tp}``  the piece is one box of the whole: a DTensor, and nothing more to say
boxes    ``(3 64{tp})``             the piece is several boxes: the DTensor's local tensor is a :class:`Boxes`, which
                                    tells ``torch.distributed.checkpoint`` where each of them stands
guarded  ``(3 64{tp,dp})``          no DTensor placement gives these pieces (see :mod:`.placements`): the one it has
                                    says along which axes it is cut, and no more. Optimizers, norms and checkpoints
                                    work; ``full_tensor()`` and ``redistribute()`` are errors
=======  =========================  ================================================================================
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils._pytree import tree_map_only

from shardfx.ir.errors import Error
from shardfx.ir.mesh import Mesh
from shardfx.ir.spec import Spec

from .placements import placements, runs

Tensor = torch.Tensor
Box = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""Offsets in the whole, sizes, and offsets in the local tensor."""


aten = torch.ops.aten
MAKES = {aten.new_empty_strided.default: 3, aten.new_empty.default: 2, aten.new_zeros.default: 2, aten.new_ones.default: 2}
"""Ops that make a tensor of a shape that DTensor derives from the placement; and how many arguments say it."""


class Boxes(Tensor):
    """A local tensor that is several boxes of its whole, side by side. Elementwise results are so, too."""

    data_: Tensor
    boxes: tuple[Box, ...]
    guarded: bool

    @staticmethod
    def __new__(cls, data: Tensor, boxes: tuple[Box, ...], guarded: bool = False) -> Boxes:
        made = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, data.shape, strides=data.stride(), dtype=data.dtype, device=data.device
        )
        made.data_, made.boxes, made.guarded = data, boxes, guarded
        return made  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        mine: dict[int, Boxes] = {}

        def open_(tensor: Boxes) -> Tensor:
            mine[id(tensor.data_)] = tensor
            return tensor.data_

        args, kwargs = tree_map_only(Boxes, open_, (args, dict(kwargs or {})))
        first = next(iter(mine.values()))
        if first.guarded and func in MAKES:
            args = (first.data_, first.shape, first.stride())[: MAKES[func]] + args[MAKES[func] :]
        result = func(*args, **kwargs)
        like = {tensor.shape: tensor for tensor in mine.values()}
        guarded = any(tensor.guarded for tensor in mine.values())
        if guarded and func.namespace == "_c10d_functional":
            raise _cannot_say(func)

        def close(tensor: Tensor) -> Tensor:
            if id(tensor) in mine:
                return mine[id(tensor)]
            twin = like.get(tensor.shape)
            if twin is not None:
                return Boxes(tensor, twin.boxes, twin.guarded)
            if guarded and tensor.dim():
                raise _cannot_say(func)
            return tensor

        return tree_map_only(Tensor, close, result)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["data_"], (self.boxes, self.guarded)

    @staticmethod
    def __tensor_unflatten__(inner: Mapping[str, Tensor], context: Any, size: Any, stride: Any) -> Boxes:
        return Boxes(inner["data_"], *context)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return Boxes, (self.data_, self.boxes, self.guarded)

    def __deepcopy__(self, memo: dict[int, Any]) -> Boxes:
        return Boxes(self.data_.clone(), self.boxes, self.guarded)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"Boxes({self.data_!r}, {self.boxes})"

    # What torch.distributed.checkpoint asks of a DTensor's local tensor.

    def __create_write_items__(self, fqn: str, whole: Any) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self.data_)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=whole.size()),
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
        "DTensor cannot describe how this parameter is cut, and would compute something else",
        where=str(func),
        expected="elementwise operations, and norms of everything",
        got="an operation that depends on which rows a rank holds",
        remedy="take whole tensors from pm.full_state_dict() and pm.full_grads()",
    )


@dataclass(frozen=True)
class Home:
    """Makes a rank's piece of one value a DTensor, and gives it back; both share the piece's memory."""

    kind: str
    template: Any
    boxes: tuple[Box, ...] = ()

    @staticmethod
    def of(spec: Spec, shape: Sequence[int], dtype: torch.dtype, mesh: Mesh, device_mesh: DeviceMesh, rank: int) -> Home:
        coords = mesh.coords(rank)
        piece = torch.empty(spec.local_shape(shape, mesh, coords), dtype=dtype, device="meta")
        held = [runs(cut, size, mesh, coords) for cut, size in zip(spec.dims, shape, strict=True)]
        found = placements(spec, shape, mesh)
        if found is None:
            dims = {axis: dim for dim, cut in enumerate(spec.dims) for axis in cut.axes}
            nearest = [Shard(dims[a.name]) if a.name in dims else Replicate() for a in mesh.space]
            return Home("guarded", _dtensor_spec(piece, shape, device_mesh, nearest), _boxes(held))
        template = _dtensor_spec(piece, shape, device_mesh, found)
        if any(cut.parts for cut in spec.dims):
            return Home("boxes", template, _boxes(held))
        return Home("plain", template)

    def wrap(self, piece: Tensor) -> DTensor:
        local = piece if self.kind == "plain" else Boxes(piece, self.boxes, self.kind == "guarded")
        return DTensor(local, self.template, requires_grad=False)  # type: ignore[call-arg]

    def unwrap(self, tensor: Tensor) -> Tensor:
        local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        return local.data_ if isinstance(local, Boxes) else local


def _dtensor_spec(piece: Tensor, shape: Sequence[int], device_mesh: DeviceMesh, found: Sequence[Any]) -> Any:
    """The private spec that DTensors of this placement share: taken from one, made the public way."""
    stride = torch.empty(tuple(shape), device="meta").stride()
    made = DTensor.from_local(piece, device_mesh, found, run_check=False, shape=torch.Size(shape), stride=stride)
    return made._spec


def _boxes(held: Sequence[Sequence[tuple[int, int]]]) -> tuple[Box, ...]:
    """All combinations of the runs of each dim."""
    columns = []
    for runs_of_dim in held:
        at, column = 0, []
        for start, length in runs_of_dim:
            column.append((start, length, at))
            at += length
        columns.append(column)
    boxes = []
    for combination in itertools.product(*columns):
        starts, lengths, ats = zip(*combination, strict=True)
        boxes.append((starts, lengths, ats))
    return tuple(boxes)
