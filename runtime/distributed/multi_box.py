"""The local tensor of a DTensor that is several boxes of its whole: ``(3 64{tp})`` is three.

DTensor itself takes every local tensor for one box, and ``torch.distributed.checkpoint`` with it; but it asks the local
tensor first. :class:`Boxes` answers, and hands its answer on to what optimizers make of it (their moments).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.utils._pytree import tree_map_only

from shardfx.ir.errors import Error

aten = torch.ops.aten
Tensor = torch.Tensor

Box = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""Offsets in the whole, sizes, and offsets in the local tensor."""
MAKES = {
    aten.new_empty_strided.default: 3,
    aten.new_empty.default: 2,
    aten.new_zeros.default: 2,
    aten.new_ones.default: 2,
}
"""Ops that make a tensor of a shape that DTensor derives from the placement; and how many arguments say it."""


class MultiBoxTensor(Tensor):
    """A local tensor that is several boxes of its whole, side by side. Elementwise results are so, too."""

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

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["data_"], (self.boxes, self.guarded)

    @staticmethod
    def __tensor_unflatten__(inner: Mapping[str, Tensor], context: Any, size: Any, stride: Any) -> MultiBoxTensor:
        return MultiBoxTensor(inner["data_"], *context)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return MultiBoxTensor, (self.data_, self.boxes, self.guarded)

    def __deepcopy__(self, memo: dict[int, Any]) -> MultiBoxTensor:
        return MultiBoxTensor(self.data_.clone(), self.boxes, self.guarded)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
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
