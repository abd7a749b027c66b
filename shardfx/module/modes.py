"""``pm.train()`` and ``pm.eval()``: dropout and batch norm are other programs in the two modes.

A plan is captured in the mode that the model was in. In the other one it is captured again when first called, from a
copy of the model without weights, with the placements that the first plan stores: both work on the same shards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from shardfx.hints import Hints
from shardfx.ir.capture.given import copied
from shardfx.ir.errors import Error
from shardfx.ir.graph import Graph, InputKind
from shardfx.ir.spec import Spec

if TYPE_CHECKING:
    from .parallel_module import ParallelModule

Build = Callable[[nn.Module, Hints], "ParallelModule"]


def without_weights(model: nn.Module) -> nn.Module:
    """A copy of the module tree on ``meta``: tied weights stay tied, nothing is stored."""
    memo: dict[int, object] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        with torch.device("meta"):
            made = torch.empty(tensor.shape, dtype=tensor.dtype)
        is_parameter = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(made, tensor.requires_grad) if is_parameter else made
    return copied(model, memo)


@dataclass
class OtherMode:
    """Makes the plan for the mode that a module was not captured in."""

    skeleton: nn.Module
    hints: Hints
    build: Build

    def make(self, first: ParallelModule) -> ParallelModule:
        """A module for the other mode, on the shards of ``first``."""
        self.skeleton.train(not first.captured_training)
        specs = {**self.hints.specs, **stored(first.after)}
        made = self.build(self.skeleton, replace(self.hints, specs=specs))
        ours, theirs = stored(first.after), stored(made.after)
        for name in theirs:
            if ours.get(name, theirs[name]) != theirs[name]:
                raise Error(
                    f"{name!r} would be stored otherwise in the other mode",
                    where="pm.train() / pm.eval()",
                    expected=str(ours[name]),
                    got=str(theirs[name]),
                    remedy="parallelize the model in both modes on its own, and move weights by full_state_dict()",
                )
        made.share(first)
        return made


def stored(graph: Graph) -> Mapping[str, Spec]:
    """The stored placements of parameters and buffers."""
    kinds = (InputKind.PARAMETER, InputKind.BUFFER)
    return {g.name: g.value.spec for g in graph.inputs if g.kind in kinds and g.value.spec is not None}
