"""A value in memory of its own, in programs whose memory a compiler plans. Needs torch alone."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.compiler import is_compiling

_library = torch.library.Library("shardfx", "FRAGMENT")
_library.define("materialize(Tensor x) -> Tensor")
_library.impl("materialize", torch.clone, "CompositeExplicitAutograd")


def materialize(x: Tensor) -> Tensor:
    """``x``, which a compiler computes once: it is opaque to what would compute it where it is used."""
    return torch.ops.shardfx.materialize(x) if is_compiling() else x
