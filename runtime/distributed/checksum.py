"""A number for the content of a tensor: equal for equal bits in the same order, on any device."""

from __future__ import annotations

import torch

Tensor = torch.Tensor
CHUNK = 1 << 18
"""So many words are multiplied at once: what it holds beside the tensor."""
ODD = 0x2545F4914F6CDD1D
"""Of Marsaglia's xorshift generators; odd, so that multiplying loses nothing."""


def checksum(x: Tensor) -> int:
    """The sum of the words of ``x``, each times a number for its place, modulo 2**64."""
    flat = x.detach().contiguous().reshape(-1).view(torch.uint8)
    rest = flat.numel() % 8
    if rest:
        flat = torch.cat([flat, flat.new_zeros(8 - rest)])
    elif flat.storage_offset() % 8:
        flat = flat.clone()
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    for i, words in enumerate(flat.view(torch.int64).split(CHUNK)):
        place = torch.arange(i * CHUNK + 1, i * CHUNK + 1 + words.numel(), device=x.device) * ODD
        mixed = (words ^ (words >> 29)) * (place | 1)
        total += (mixed ^ (mixed >> 32)).sum()
    return int(total.item())
