"""Whether two runs differ by rounding alone.

Rounding moves a number by a few units of its last place, times how much of what it is the sum of cancels. How much does
is not seen in the number: the gradient of a key's bias is zero, and its rounded one is not. So where two runs differ by
more than a few units of what is largest, the same two runs in a wider precision are compared: what is rounding there is
a millionth of what it was, and what is another function is as far apart as before. Kernels that add up in a wider
precision anyway do not show it so: what still differs may do so as far as what is computed moves, a few times, when
parameters and inputs are moved by a unit of their last place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from shardfx.ir.graph import Graph, Value
from shardfx.ir.shards import wide

SHARE = 0.75
"""Rounding is at most the unit of the last place to this power, of the largest number among those that differ: 6e-6 in
float32, 2e-12 in float64."""
UNKNOWN = 0.5
"""The same, where nothing else is known of how much cancels."""
MARGIN = 2.0**-9
"""Of rounding that was seen once, another time there is less than this part more."""
OF_ROUNDING = 2.0**-29 / MARGIN
"""In float64 rounding is at most this share of what it is in float32, which is 2**29 times as coarse."""

OF_MOVED = 30.0
"""What inputs moved by a rounding do to a result is its rounding to within this factor."""


def units(graph: Graph) -> dict[Value, float]:
    """The unit of the last place of the coarsest floating number that each value is made of."""
    found: dict[Value, float] = {}
    for given in graph.inputs:
        found[given.value] = unit(given.value.type.dtype)
    for node in graph.nodes:
        of_operands = max((found[value] for value in node.operands), default=0.0)
        for value in node.outs:
            found[value] = max(of_operands, unit(value.type.dtype))
    return found


def unit(dtype: torch.dtype) -> float:
    """The unit of the last place of a floating number near 1; 0 of others."""
    return torch.finfo(dtype).eps if dtype.is_floating_point or dtype.is_complex else 0.0


def apart(ours: Tensor, theirs: Tensor) -> Tensor:
    """How far each element lies from that of another tensor of the same shape: infinitely where one is no number."""
    ours, theirs = wide(ours.detach()), wide(theirs.detach())
    same = (ours == theirs) | (ours.isnan() & theirs.isnan())
    return torch.where(same, 0.0, (ours - theirs).abs().nan_to_num(torch.inf, torch.inf, torch.inf))


def is_rounding(ours: Tensor, theirs: Tensor, share: float, further: float = 0.0) -> bool:
    """Whether what differs does so by a ``share`` of the largest number among it, and ``further``, at the most."""
    if ours.shape != theirs.shape:
        return False
    far = apart(ours, theirs)
    worst = far.max().item() if far.numel() else 0.0
    if worst == 0.0:
        return True
    there = wide(theirs.detach()).abs()[far > 0]
    scale = there.nan_to_num(0.0, 0.0, 0.0).max().item()
    return worst <= share * scale + further


def differing(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], units: Mapping[str, float]) -> Iterator[str]:
    """What differs by more than rounding; what one run does not have is zero in the other."""
    for name in dict.fromkeys((*ours, *theirs)):
        mine, other = ours.get(name), theirs.get(name)
        if mine is None or other is None:
            there = mine if mine is not None else other
            if there is not None and wide(there).count_nonzero():
                yield name
        elif not is_rounding(mine, other, units.get(name, unit(other.dtype)) ** SHARE):
            yield name
