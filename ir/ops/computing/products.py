"""Matrix products by the library that is faster at hand.

Torch hands float32 products on a CPU to MKL. On processors of other makers that one keeps to AVX2, and oneDNN, which
torch has too, takes less than half of the time with AVX-512: from 128 x 128 x 128 on, for it takes longer to begin.
Which one is taken hangs on the processor and on shapes and strides alone, so that ranks that compute the same get the
same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from shardfx.ir.ops.time import turns

Tensor = torch.Tensor
aten = torch.ops.aten
LARGE = 1 << 21
"""So many products of elements are worth the begin."""
WORKSPACE, FEW = 1 << 20, 32
"""What is added to, or written into, other memory is made in stretches of so many bytes at most, of as many rows at
least (else it is left to MKL)."""
CPUS = Path("/proc/cpuinfo")


@cache
def pays() -> bool:
    """Whether oneDNN is faster here."""
    has = torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()
    wide = torch.backends.cpu.get_cpu_capability() == "AVX512"
    lines = CPUS.read_text(encoding="utf-8").splitlines() if has and wide and CPUS.is_file() else []
    makers = {line.partition(":")[2].strip() for line in lines if line.startswith("vendor_id")}
    return bool(makers) and "GenuineIntel" not in makers


def instead() -> dict[Any, Callable[..., Tensor]]:
    """What to call in the place of products on a CPU; nothing where it makes no difference."""
    return FORMS if pays() else {}


def mm(a: Tensor, b: Tensor, *, out: Tensor | None = None) -> Tensor:
    """``a @ b``, or the same written into ``out``."""
    if out is None:
        return _linear(a, b.t(), None, "none", [], "") if _suits(a, b) else torch.mm(a, b)
    rows = _stretch(b)
    if rows < FEW or out.shape != (a.shape[0], b.shape[1]) or not _suits(a, b):
        return torch.mm(a, b, out=out)
    for at in range(0, a.shape[0], rows):
        out[at : at + rows].copy_(mm(a[at : at + rows], b))
    return out


def addmm(bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """``bias + a @ b``."""
    plain = beta == alpha == 1 and bias.dim() == 1 and bias.dtype is torch.float32 and bias.is_contiguous()
    if plain and bias.shape[0] == b.shape[1] and _suits(a, b):
        return _linear(a, b.t(), bias, "none", [], "")
    return torch.addmm(bias, a, b, beta=beta, alpha=alpha)


def add_product(total: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """As :func:`shardfx.ir.ops.time.turns.add_product`."""
    rows = _stretch(b)
    if total.dim() != 2 or total.dtype is not torch.float32 or rows < FEW or not _suits(a, b):
        return turns.add_product(total, a, b)
    for at in range(0, a.shape[0], rows):
        total[at : at + rows].add_(mm(a[at : at + rows], b))
    return total


FORMS: dict[Any, Callable[..., Tensor]] = {
    aten.mm.default: mm,
    aten.mm.out: mm,
    aten.addmm.default: addmm,
    turns.add_product: add_product,
}
_linear: Callable[..., Tensor] = torch.ops.mkldnn._linear_pointwise.default._op


def _suits(a: Tensor, b: Tensor) -> bool:
    """Whether oneDNN does a product: a large one, of float32, of operands whose rows, or columns, have no gaps and lie
    apart (it knows no others)."""
    return (
        a.is_cpu
        and a.dtype is torch.float32
        and b.dtype is torch.float32
        and a.shape[0] * a.shape[1] * b.shape[1] >= LARGE
        and _is_dense(a)
        and _is_dense(b)
    )


def _is_dense(x: Tensor) -> bool:
    (rows, columns), (down, across) = x.shape, x.stride()
    return (across == 1 and down >= columns) or (down == 1 and across >= rows)


def _stretch(b: Tensor) -> int:
    """The rows of a product with ``b`` that are made at a time."""
    return WORKSPACE // max(b.shape[1] * b.element_size(), 1)
