"""Specification of an update: the groups of an optimizer, the states of parameters, and counters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from shardfx.ir.errors import Error

from .initial_state import Start
from .optimizer_groups import RATE, numbers_of
from .step_trace import Comparison


@dataclass(frozen=True)
class OptimizerState:
    """A state of a parameter: as the optimizer names it, as the graph does, and what it begins with.

    ``kept`` is what the optimizer itself keeps there: a dtype, or the type of a Python number.
    """

    key: str
    name: str
    start: Start
    kept: torch.dtype | type


class CounterState(NamedTuple):
    """A counter of the program: its initial value, and its value where loaded states lack it."""

    start: float
    unsaid: float


@dataclass(frozen=True)
class UpdateGroup:
    """A group of an optimizer: its class, its options, and the names of its parameters."""

    kind: str
    options: Mapping[str, Any]
    names: tuple[str, ...]
    inputs: Mapping[str, str]
    """The inputs of the graph that are the group's numbers, by these: the rate, and what else is scheduled."""
    decided: frozenset[Comparison] = frozenset()
    """The comparisons that its step makes with them: other results would be another program."""

    @property
    def options_in(self) -> tuple[str, ...]:
        """The options that are such inputs, or have some: ``lr``, ``betas``."""
        return tuple(dict.fromkeys(name.partition(".")[0] for name in self.inputs))


@dataclass(frozen=True)
class UpdateSpec:
    """The update of a program: groups as they were made, and the states of each parameter."""

    groups: tuple[UpdateGroup, ...]
    states: Mapping[str, tuple[OptimizerState, ...]]
    counts: Mapping[str, CounterState]
    """States of no parameter: how often a group was stepped, the scale of the loss."""


NAMES = "param_names"
BY_SCHEDULES = ("initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr")
"""Options that schedules store in a group for themselves."""


def fixed(group: Mapping[str, Any], made: UpdateGroup) -> dict[str, Any]:
    """The options that are constants of the program; of tensors their content."""
    left = ("params", NAMES, RATE, *BY_SCHEDULES, *made.options_in)
    return {name: _plain(value) for name, value in group.items() if name not in left}


def _plain(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return type(value)(map(_plain, value)) if type(value) in (tuple, list) else value
    return float(value) if isinstance(value, torch.Tensor) and value.numel() == 1 else value


def inputs_of(
    group: Mapping[str, Any], planned: Mapping[str, Any], made: UpdateGroup, where: str
) -> dict[str, torch.Tensor]:
    """The numbers of a group at the moment, by the names of the program's inputs.

    Raises:
        Error: another option is not as ``planned``; or the optimizer would do something else with these numbers.
    """
    now = fixed(group, made)
    lacking = [name for name in (*planned, *made.options_in) if name not in group]
    changed = [*lacking, *(name for name in now if now[name] != planned.get(name, now[name]))]
    if changed:
        name = changed[0]
        as_input = f"Hints(scheduled_options=({name!r},)) makes it an input"
        raise Error(
            f"{name!r} of a group was changed, which is a part of the program",
            where=where,
            expected=f"{planned.get(name, 'a number')!r}, as it was planned; a schedule may change {RATE!r}",
            got=f"{now[name]!r}" if name in now else "a group without it",
            remedy=f"{as_input}; OneCycleLR and CyclicLR also take cycle_momentum=False"
            if numbers_of(planned, [name])
            else "parallelize again with an optimizer that has it so",
        )
    numbers = numbers_of(group, made.options_in)
    none = next((name for name in made.inputs if name not in numbers), None)
    if none is not None:
        option = none.partition(".")[0]
        raise Error(
            f"{option!r} of a group is no number any more",
            where=where,
            expected=f"a number, or as many as in {planned[option]!r}" if option in planned else "a number",
            got=f"{group[option]!r:.100}",
            remedy="set numbers, or tensors of one number",
        )
    for each in made.decided:
        if not each.holds(numbers[each.name]):
            raise Error(
                f"with this {each.name!r} the step of {made.kind} is another program",
                where=where,
                expected=f"that {each}, as it was planned",
                got=f"{numbers[each.name]!r}",
                remedy="a number next to it, such as 1e-12; or parallelize again with other options",
            )
    return {input_name: torch.tensor(numbers[name], dtype=torch.float64) for name, input_name in made.inputs.items()}
