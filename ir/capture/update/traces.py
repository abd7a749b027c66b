"""The traced steps of a plan's optimizers, as few as there are.

A step that asks for no shape and computes on each number alone is the same for parameters of all shapes: it is traced
for one of them. All others are traced for each shape.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree

from shardfx.ir.errors import Error

from .made_groups import WHERE, Group
from .step_trace import States, Traced, Watched, first_states, trace_step


class Traces:
    """What was traced: by group, options, dtype, and whether it is the first step."""

    def __init__(self) -> None:
        self._known: dict[Any, tuple[States, Traced]] = {}

    def step(
        self,
        group: Group,
        shape: Sequence[int],
        dtype: torch.dtype,
        given: States,
        options: Mapping[str, Any],
        first: bool = False,
    ) -> tuple[States, Traced]:
        """The states that a step keeps, and the step of a parameter of this shape that has them.

        Args:
            given: the states that are there before the first step.
            first: the step of a parameter that has none yet.
        """
        key = (id(group), *sorted(options), dtype, first) if len(shape) and _all_tensors(given) else None
        if key not in self._known:
            watched = Watched(group.where.file)
            states = first_states(group, shape, dtype, given, watched, **options)
            _check_states(group, states)
            traced = trace_step(group, shape, dtype, states, first, watched, **options)
            if key is None or watched.asked or not traced.is_pointwise:
                return states, traced
            self._known[key] = states, traced
        states, traced = self._known[key]
        return states, traced.at(shape)


def _check_states(group: Group, states: States) -> None:
    """Whether what changes from step to step is a tensor or a number by itself.

    Raises:
        Error: a state is a list, or the like, of such.
    """
    for key, value in states.items():
        leaves = [] if isinstance(value, (torch.Tensor, int, float)) else pytree.tree_leaves(value)
        if any(isinstance(leaf, (torch.Tensor, int, float)) and not isinstance(leaf, bool) for leaf in leaves):
            raise Error(
                f"a state of {group.kind} is several things in one",
                where=f"{WHERE}  {group.where}",
                expected="tensors and numbers in self.state[p], each by a name of its own",
                got=f"{key!r}, a {type(value).__name__} of {len(leaves)}",
                remedy=f"self.state[p]['{key}_0'], ...; or leave optimizer= out of the hints, and step it outside, of "
                "pm.parameters()",
            )


def _all_tensors(states: States) -> bool:
    """Whether nothing among the states could make the step of one parameter another than that of the next."""
    return all(isinstance(value, torch.Tensor) for value in states.values())
