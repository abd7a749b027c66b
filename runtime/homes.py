"""How a rank's piece of a parameter lives in torch: as a ``DTensor`` of the model's whole shape, where that is possible.

=========  =========================  ==============================================================================
plain      ``64{dp}``, ``64{dp,tp}``  the piece is one box of the whole: a DTensor, and nothing more to say
strided    ``(3 64{tp})``             the piece is several boxes: the DTensor's local tensor is a :class:`Boxes`, which
                                      tells ``torch.distributed.checkpoint`` where each of them stands
stacked    ``7{tp,dp}`` and such      DTensor cannot say it (see :mod:`.placements`): it holds the pieces of all ranks
                                      stacked, padded to one shape. Optimizers, norms and checkpoints of the same plan
                                      work; ``full_tensor()`` and ``shape`` are those of the stack
=========  =========================  ==============================================================================
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

from shardfx.ir.mesh import Mesh
from shardfx.ir.spec import Spec

from .placements import placements, runs

Tensor = torch.Tensor
Box = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""Offsets in the whole, sizes, and offsets in the local tensor."""


class Boxes(Tensor):
    """A local tensor that is several boxes of its whole, side by side. Elementwise results are so, too."""

    data_: Tensor
    boxes: tuple[Box, ...]

    @staticmethod
    def __new__(cls, data: Tensor, boxes: tuple[Box, ...]) -> Boxes:
        made = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, data.shape, strides=data.stride(), dtype=data.dtype, device=data.device
        )
        made.data_, made.boxes = data, boxes
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
        result = func(*args, **kwargs)
        like = {tensor.shape: tensor.boxes for tensor in mine.values()}

        def close(tensor: Tensor) -> Tensor:
            if id(tensor) in mine:
                return mine[id(tensor)]
            return Boxes(tensor, like[tensor.shape]) if tensor.shape in like else tensor

        return tree_map_only(Tensor, close, result)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["data_"], self.boxes

    @staticmethod
    def __tensor_unflatten__(inner: Mapping[str, Tensor], boxes: Any, size: Any, stride: Any) -> Boxes:
        return Boxes(inner["data_"], boxes)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return Boxes, (self.data_, self.boxes)

    def __deepcopy__(self, memo: dict[int, Any]) -> Boxes:
        return Boxes(self.data_.clone(), self.boxes)

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


@dataclass(frozen=True)
class Home:
    """Makes a rank's piece of one value a DTensor, and gives it back."""

    kind: str
    template: Any
    local_shape: tuple[int, ...]
    boxes: tuple[Box, ...] = ()

    @staticmethod
    def of(spec: Spec, shape: Sequence[int], dtype: torch.dtype, mesh: Mesh, device_mesh: DeviceMesh, rank: int) -> Home:
        coords = mesh.coords(rank)
        local = spec.local_shape(shape, mesh, coords)
        found = placements(spec, shape, mesh)
        if found is None:
            largest = spec.local_shape(shape, mesh, dict.fromkeys(mesh.names, 0))
            stack = (mesh.extent(spec.axes), *largest)
            cut = tuple(Shard(0) if a.name in spec.axes else Replicate() for a in mesh.space)
            piece = torch.empty((1, *largest), dtype=dtype, device="meta")
            return Home("stacked", _dtensor_spec(piece, stack, device_mesh, cut), local)
        piece = torch.empty(local, dtype=dtype, device="meta")
        template = _dtensor_spec(piece, shape, device_mesh, found)
        held = [runs(cut, size, mesh, coords) for cut, size in zip(spec.dims, shape, strict=True)]
        if all(len(runs_of_dim) <= 1 for runs_of_dim in held):
            return Home("plain", template, local)
        return Home("strided", template, local, _boxes(held))

    def wrap(self, piece: Tensor) -> DTensor:
        """This rank's piece as a DTensor that shares its memory (a stacked one is padded, and does not)."""
        if self.kind == "stacked":
            padded = piece.new_zeros((1, *self.template.tensor_meta.shape[1:]))
            self._inside(padded).copy_(piece)
            piece = padded
        elif self.kind == "strided":
            piece = Boxes(piece, self.boxes)
        return DTensor(piece, self.template, requires_grad=False)  # type: ignore[call-arg]

    def unwrap(self, tensor: Tensor) -> Tensor:
        """The piece within what :meth:`wrap` made, sharing its memory."""
        local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        if isinstance(local, Boxes):
            return local.data_
        return self._inside(local) if self.kind == "stacked" and local.shape != self.local_shape else local

    def _inside(self, padded: Tensor) -> Tensor:
        return padded[0][tuple(slice(size) for size in self.local_shape)]


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
