"""Which parameters lie side by side: those that are gathered together, so that nothing is copied before a gather."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from shardfx.ir.graph import Input, InputKind, Node
from shardfx.ir.ops.comm import all_gather


def neighbours(nodes: Iterable[Node], inputs: Iterable[Input]) -> list[tuple[Input, ...]]:
    """The parameters that stores keep one behind the other, for the gathers among planned nodes; each stands once."""
    stored = {given.value: given for given in inputs if given.kind is InputKind.PARAMETER}
    found: list[tuple[Input, ...]] = []
    placed: set[str] = set()
    for node in nodes:
        if node.op is not all_gather or len(node.operands) == 1:
            continue
        together = tuple(stored[value] for value in node.operands if value in stored)
        names = {given.name for given in together}
        if len(names) == len(node.operands) and not names & placed:
            found.append(together)
            placed |= names
    return found


def side_by_side(shapes: Sequence[Sequence[int]], dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    """Memory for tensors of these shapes, one behind the other."""
    sizes = [torch.Size(shape).numel() for shape in shapes]
    flat = torch.empty(sum(sizes), dtype=dtype, device=device)
    return [part.view(list(shape)) for shape, part in zip(shapes, flat.split(sizes), strict=True)]
