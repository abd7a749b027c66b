"""Data movement in rank programs, beside the model's ops: packing, collectives and messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shardfx.ir.ops import pack
from shardfx.ir.ops.loop import stage_transfer

from .proof.elements import Elements, cat

aten = torch.ops.aten
c10d = torch.ops._c10d_functional

PACKING: dict[Any, Callable[..., Any]] = {
    f: f
    for f in (
        *(pack.pack, pack.unpack_gathered, pack.pack_scattered, pack.unpack_scattered, pack.pack_exchange),
        *(pack.unpack_exchange, pack.pack_rows, pack.unpack_rows, pack.take, pack.flatten),
        *(pack.part_of, pack.unflatten),
    )
}
ATEN_MOVES: dict[Any, Callable[..., Any]] = {
    aten.reshape.default: Elements.reshape,
    aten.view.default: Elements.view,
    aten.slice.Tensor: Elements.slice,
    aten.narrow.default: Elements.narrow,
    aten.cat.default: cat,
    aten.permute.default: Elements.permute,
    aten.transpose.int: Elements.transpose,
    aten.t.default: Elements.t,
    aten.select.int: Elements.select,
    aten.split.Tensor: Elements.split,
    aten.split_with_sizes.default: Elements.split,
    aten.unsqueeze.default: Elements.unsqueeze,
    aten.squeeze.dim: Elements.squeeze,
}
"""Data movement ops that may be in a program without being ops of the model."""
COLLECTIVES = {
    c10d.all_reduce.default,
    c10d.all_gather_into_tensor.default,
    c10d.reduce_scatter_tensor.default,
    c10d.all_to_all_single.default,
}
MESSAGES = {stage_transfer.send, stage_transfer.receive}
"""Point-to-point messages between ranks."""
