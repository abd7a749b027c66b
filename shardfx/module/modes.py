"""``pm.train()`` and ``pm.eval()``: dropout and batch norm are other programs in the two modes.

A plan is captured in the mode that the model was in. In the other one it is captured again when first called, from a
copy of the model without weights, with the placements that the first plan stores: both work on the same store.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn

from shardfx.compiled import Compiled
from shardfx.hints import Hints
from shardfx.ir.capture.given import copied
from shardfx.ir.errors import Error
from shardfx.ir.graph import Graph
from shardfx.ir.spec import Spec
from shardfx.runtime.step import STORED

Build = Callable[[nn.Module, Hints], Compiled]


def without_weights(model: nn.Module) -> nn.Module:
    """A copy of the module tree on ``meta``: tied weights stay tied, nothing is stored."""
    memo: dict[int, object] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        made = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        is_parameter = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(made, tensor.requires_grad) if is_parameter else made
    return copied(model, memo)


@dataclass
class OtherMode:
    """Makes the plan for the mode that a module was not captured in."""

    skeleton: nn.Module
    hints: Hints
    build: Build

    def make(self, first: Graph, training: bool) -> Compiled:
        """The plan for a mode, which stores what ``first`` stores.

        Raises:
            Error: it would store a parameter otherwise.
        """
        self.skeleton.train(training)
        ours = stored(first)
        made = self.build(self.skeleton, replace(self.hints, specs={**self.hints.specs, **ours}))
        for name, theirs in stored(made.after).items():
            if ours.get(name, theirs) != theirs:
                raise Error(
                    f"{name!r} would be stored otherwise in {mode_name(training)} mode",
                    where="pm.train() / pm.eval()",
                    expected=str(ours[name]),
                    got=str(theirs),
                    remedy="parallelize the model in both modes on its own, and move weights by full_state_dict()",
                )
        return made


def mode_name(training: bool) -> str:
    """``train`` or ``eval``."""
    return "train" if training else "eval"


def stored(graph: Graph) -> Mapping[str, Spec]:
    """The stored placements of parameters and buffers."""
    return {g.name: g.value.spec for g in graph.inputs if g.kind in STORED and g.value.spec is not None}
