"""Arguments of nodes as text: dtypes and constants."""

from __future__ import annotations

import math
from typing import Any

import torch

DTYPES: dict[str, torch.dtype] = {
    **{f"f{n}": getattr(torch, f"float{n}") for n in (16, 32, 64)},
    **{f"{s}{n}": getattr(torch, f"{w}int{n}") for s, w in (("i", ""), ("u", "u")) for n in (8, 16, 32, 64)},
    "bf16": torch.bfloat16,
    "c64": torch.complex64,
    "c128": torch.complex128,
    "bool": torch.bool,
}
"""The short names of dtypes; any other is called as torch calls it."""
CONSTANTS: dict[str, Any] = {"None": None, "True": True, "False": False, "inf": math.inf, "nan": math.nan}
"""The words that stand for themselves as arguments."""
TORCH_CONSTANTS = (torch.dtype, torch.layout, torch.memory_format)
