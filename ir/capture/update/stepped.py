"""What a program steps: the groups of an optimizer, the states of parameters, and numbers beside them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

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


class Count(NamedTuple):
    """A number that is kept from step to step: what it begins with, and what it is with states that do not say it."""

    start: float
    unsaid: float


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
    counts: Mapping[str, Count]
    """States of no parameter: how often a group was stepped, the scale of the loss."""
