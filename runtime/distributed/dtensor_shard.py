"""How a rank's piece of a parameter lives in torch: as a ``DTensor`` of the model's whole shape.

=======  =========================  ================================================================================
plain    ``64{dp}``, ``64{dp,tp}``  the piece is one box of the whole: a DTensor, and nothing more to say
boxes    ``(3 64{tp})``             the piece is several boxes: the DTensor's local tensor is a
                                    :class:`.multi_box.MultiBoxTensor`, which tells ``torch.distributed.checkpoint``
                                    where each of them stands
guarded  ``(3 64{tp,dp})``          no DTensor placement gives these pieces (see :mod:`.dtensor_placements`): the one
                                    it has says along which axes it is cut, and no more. Optimizers, norms and
                                    checkpoints work; ``full_tensor()`` and ``redistribute()`` are errors
=======  =========================  ================================================================================
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from shardfx.ir.cut import Coords
from shardfx.ir.mesh import Mesh
from shardfx.ir.spec import Spec

from .dtensor_placements import placements, runs
from .multi_box import Box, MultiBoxTensor

Tensor = torch.Tensor


@dataclass(frozen=True)
class DTensorShard:
    """Makes a rank's piece of one value a DTensor, and gives it back; both share the piece's memory."""

    kind: str
    template: Any
    boxes: tuple[Box, ...] = ()

    @staticmethod
    def of(
        spec: Spec, shape: Sequence[int], dtype: torch.dtype, mesh: Mesh, device_mesh: DeviceMesh, coords: Coords
    ) -> DTensorShard:
        """How the piece of the rank at ``coords`` is shown: as a plain DTensor, as one of several boxes, or guarded
        where DTensor has no such placement. ``device_mesh`` has the axes of ranks of ``mesh``."""
        piece = torch.empty(spec.local_shape(shape, mesh, coords), dtype=dtype, device="meta")
        held = [runs(cut, size, mesh, coords) for cut, size in zip(spec.dims, shape, strict=True)]
        found = placements(spec, shape, mesh)
        if found is None:
            dims = {axis: dim for dim, cut in enumerate(spec.dims) for axis in cut.axes}
            nearest = [Shard(dims[a.name]) if a.name in dims else Replicate() for a in mesh.space]
            return DTensorShard("guarded", _dtensor_spec(piece, shape, device_mesh, nearest), _boxes(held))
        template = _dtensor_spec(piece, shape, device_mesh, found)
        if any(cut.parts for cut in spec.dims):
            return DTensorShard("boxes", template, _boxes(held))
        return DTensorShard("plain", template)

    def wrap(self, piece: Tensor) -> DTensor:
        """The DTensor around a rank's plain piece; both share memory.

        It says that it begins where its memory does, also where the piece does not: torch copies no others
        (``copy.deepcopy`` of a module, of a state dict).
        """
        if self.kind != "plain":
            boxes = MultiBoxTensor(piece, self.boxes, self.kind == "guarded")
            return DTensor(boxes, self.template, requires_grad=False)
        if not piece.storage_offset():
            return DTensor(piece, self.template, requires_grad=False)
        made = DTensor(piece.as_strided(piece.shape, piece.stride(), 0), self.template, requires_grad=False)
        made._local_tensor = piece
        return made

    def parameter(self, piece: Tensor, trained: bool) -> nn.Parameter:
        """A piece as a parameter, as ``nn.Parameter`` makes one of a DTensor, and as :meth:`wrap` says it."""
        made: Any = self.wrap(piece).requires_grad_(trained)
        made._is_param = True
        return made  # type: ignore[no-any-return]

    def plain(self, tensor: Tensor) -> Tensor | None:
        """The piece that is shown as ``tensor``, which is the piece itself where it is plain; None: it is placed
        otherwise."""
        if not isinstance(tensor, DTensor):
            return tensor
        spec, mine = tensor._spec, self.template
        alike = spec is mine or (spec.placements, spec.mesh, spec.shape) == (mine.placements, mine.mesh, mine.shape)
        return self.unwrap(tensor) if alike else None

    @staticmethod
    def unwrap(tensor: Tensor) -> Tensor:
        """The plain piece of a rank, of a DTensor or of what DTensor hands to an op. Shares memory."""
        local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        return local.data_ if isinstance(local, MultiBoxTensor) else local


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
