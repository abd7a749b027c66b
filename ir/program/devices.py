"""Device-specific calls of a rank's program: factories get the device, ops its own kernels.

    %2 = aten.arange(16)                    ->  aten.arange.default(16, device=device(type='cpu'))
    %5, %6 = shardfx.attention(%2, %3, %4)  ->  aten._scaled_dot_product_flash_attention_for_cpu.default(q, k, v)

The planned graph names no device, and the same plan serves all kinds. A kernel computes the op for which it stands, so
that the proof takes either; what no kernel here takes is called as it stands, and chooses when it runs (on CUDA from
cuDNN's, flash, memory-efficient and plain attention, see :mod:`shardfx.ir.ops.fused_attention`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

import torch

from shardfx.ir.builder import makes_of_nothing
from shardfx.ir.ops.fused_attention import NAMED, attention, attention_backward
from shardfx.ir.ops.traits import with_defaults
from shardfx.ir.rulebook.dims import argument
from shardfx.ir.rules.local import NodeShard, may_lack

aten = torch.ops.aten
Call = tuple[Any, tuple[Any, ...], dict[str, Any]]
"""An op, its arguments, its keyword arguments."""
Kernel = Callable[[NodeShard, Mapping[str, Any]], Call | None]
"""The call of a device's kernel for a rank's share of a node, from the arguments by name; None: it does not take it."""

CPU = torch.device("cpu")


def _flash_takes(share: NodeShard) -> bool:
    """Whether torch's flash kernel for the CPU serves: it adds a mask of the queries' own dtype, and divides by zero
    where there is no head."""
    node = share.node
    q, v, mask = (argument(node, name) for name in ("q", "v", "mask"))
    there = all(value.type.numel for value in node.operands)
    if may_lack(node, share.mesh):
        there = there and all(all(share.operand_shape(i)) for i in range(len(node.operands)))
    same = mask is None or mask.type.dtype == q.type.dtype
    return there and same and q.shape[-1] == v.shape[-1] and not argument(node, "p") and not argument(node, "of_mask")


def _flash(share: NodeShard, values: Mapping[str, Any]) -> Call | None:
    if not _flash_takes(share) or values["box"] or any(values[name] not in (None, [], 0.0) for name in NAMED):
        return None
    backward = share.node.op is attention_backward
    names = ("grad", "q", "k", "v", "out", "logsumexp") if backward else ("q", "k", "v")
    op = aten._scaled_dot_product_flash_attention_for_cpu
    kernel = aten._scaled_dot_product_flash_attention_for_cpu_backward.default if backward else op.default
    named = {"attn_mask": values["mask"], "scale": values["scale"]}
    args = (*(values[name] for name in names), 0.0, values["causal"])
    return kernel, args, {name: arg for name, arg in named.items() if arg is not None}


KERNELS: dict[Any, dict[str, Kernel]] = {attention: {"cpu": _flash}, attention_backward: {"cpu": _flash}}
"""What a kind of device has for an op, where a program calls it."""


@cache
def is_device_specific(op: Any) -> bool:
    """Whether the op is called otherwise on another kind of device."""
    return op in KERNELS or makes_of_nothing(op)


def on_device(share: NodeShard | None, call: Call, device: torch.device) -> Call:
    """A call of a rank's program, specialized for ``device``; ``share`` is the rank's share of the node that it is
    for."""
    op, args, kwargs = call
    if makes_of_nothing(op):
        return op, args, {**kwargs, "device": device}
    kernel = KERNELS.get(op, {}).get(device.type)
    made = kernel(share, with_defaults(op, args, kwargs)) if kernel is not None and share is not None else None
    return made or call


def kernel_variants(share: NodeShard, call: Call) -> Iterator[Call]:
    """The legal variants of a call in a program: itself, or the kernel of some device."""
    op, args, kwargs = call
    yield call
    for kernel in KERNELS.get(op, {}).values():
        made = kernel(share, with_defaults(op, args, kwargs))
        if made is not None:
            yield made
