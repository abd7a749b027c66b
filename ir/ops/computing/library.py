"""Definition of ops in ``torch.ops.shardfx``: a schema, a kernel of plain torch ops, and the shapes of results.

    @define("fade(Tensor x, int dim) -> Tensor", shapes=lambda x, dim: x.new_empty(x.shape))
    def fade(x, dim): ...                     torch.ops.shardfx.fade.default, on CPU, CUDA and meta

Needs torch alone, as all files that define such ops do: an exported program has them beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

Ints = Sequence[int]
Tensor = torch.Tensor
Kernel = Callable[..., Any]

LIBRARY = torch.library.Library("shardfx", "FRAGMENT")
SOURCES: dict[Any, str] = {}
"""The file that defines each op."""


def places(ranges: Ints, size: int, device: torch.device) -> Tensor:
    """The global indices of a shard's elements, in order: ``ranges`` has for each sub-dim its size, and start and
    length of the local part; empty if all ``size`` elements are local."""
    found = torch.zeros(1, dtype=torch.int64, device=device)
    for full, start, length in zip(*[iter(ranges or (size, 0, size))] * 3, strict=True):
        found = (found[:, None] * full + torch.arange(start, start + length, device=device)).flatten()
    return found


def define(
    schema: str, *, shapes: Kernel | None = None, cuda: Kernel | None = None, composite: str = "Explicit"
) -> Callable[[Kernel], Any]:
    """Decorate a kernel: its name then is the op.

    Args:
        shapes: computes the results on ``meta``; without it the kernel serves every device, ``meta`` too.
        cuda: another kernel for CUDA.
        composite: ``Implicit`` to let a compiler decompose the op.
    """

    def decorate(kernel: Kernel) -> Any:
        name = schema.partition("(")[0]
        if not hasattr(torch.ops.shardfx, name):  # shardfx and the files of an exported program, in one process
            LIBRARY.define(schema)
            if shapes is None:
                LIBRARY.impl(name, kernel, f"Composite{composite}Autograd")
            else:
                for key, each in (("CPU", kernel), ("CUDA", cuda or kernel), ("Meta", shapes)):
                    LIBRARY.impl(name, each, key)
        op = getattr(torch.ops.shardfx, name).default
        SOURCES[op] = kernel.__code__.co_filename
        return op

    return decorate
