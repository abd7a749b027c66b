"""What a program steps: the groups of its optimizers, and the states of each parameter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from .started import Start


@dataclass(frozen=True)
class HeldState:
    """A state of a parameter: as the optimizer names it, as the graph does, and what it begins with.

    ``kept`` is what the optimizer itself keeps there: a dtype, or the type of a Python number.
    """

    key: str
    name: str
    start: Start
    kept: torch.dtype | type


@dataclass(frozen=True)
class UpdateGroup:
    """A group of parameters that are stepped alike: the optimizer's name, its options, and the parameters' names."""

    kind: str
    options: Mapping[str, Any]
    names: tuple[str, ...]
    rate: str
    """The input of the graph that is the learning rate; "" where the optimizer has none."""


@dataclass(frozen=True)
class Update:
    """What the program steps: groups as they were made, and the states of each parameter."""

    groups: tuple[UpdateGroup, ...]
    states: Mapping[str, tuple[HeldState, ...]]
    counts: Mapping[str, float]
    """States of no parameter: how often a group was stepped."""
