"""Random ops of the IR: a mask is a function of a seed, the node's number and the *box* of the whole that is drawn.

So replicas agree, shards differ, and a seed reproduces, whatever the order in which ranks run.
"""

from __future__ import annotations

import torch

_library = torch.library.Library("shardfx", "DEF")
_library.define("dropout(Tensor x, float p, Tensor seed, int number, int[] box) -> (Tensor, Tensor)")


def _generator(x: torch.Tensor, seed: torch.Tensor, number: int, box: list[int]) -> torch.Generator:
    state = int(seed) & (2**63 - 1)
    for part in (number, *box):
        state = (state * 6364136223846793005 + part * 1442695040888963407 + 1) & (2**64 - 1)
        state ^= state >> 29
    return torch.Generator(x.device).manual_seed(state & (2**63 - 1))


def _dropout(
    x: torch.Tensor, p: float, seed: torch.Tensor, number: int, box: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    keep = torch.empty(x.shape, dtype=torch.bool, device=x.device)
    keep.bernoulli_(1.0 - p, generator=_generator(x, seed, number, box))
    return (x * keep).mul_(1.0 / (1.0 - p) if p < 1 else 0.0), keep


def _dropout_meta(
    x: torch.Tensor, p: float, seed: torch.Tensor, number: int, box: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), torch.empty_like(x, dtype=torch.bool)


_library.impl("dropout", _dropout, "CPU")
_library.impl("dropout", _dropout, "CUDA")
_library.impl("dropout", _dropout_meta, "Meta")
_library.define("draw(Tensor seed, int number) -> Tensor")


def _draw_number(seed: torch.Tensor, number: int) -> torch.Tensor:
    for part in (0, number):
        seed = seed + part
        for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
            seed = (seed ^ ((seed >> shift) & (2 ** (64 - shift) - 1))) * factor
        seed = seed ^ ((seed >> 31) & (2**33 - 1))
    return seed


_library.impl("draw", _draw_number, "CPU")
_library.impl("draw", _draw_number, "CUDA")
_library.impl("draw", lambda seed, number: torch.empty_like(seed), "Meta")

dropout = torch.ops.shardfx.dropout.default
draw = torch.ops.shardfx.draw.default
"""A number (int64) of a seed and the number of a draw: another one for each."""
