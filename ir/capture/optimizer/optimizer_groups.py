"""Optimizers as the user makes them: groups of parameters by the model's names, and their options."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardfx.ir.errors import Error
from shardfx.ir.graph import Where

WHERE = "Hints(optimizer=...)"


class Parameters(list[nn.Parameter]):
    """The argument of the user's function: the model's parameters, and by name in ``named``::

    def optimizer(params):
        decay = [p for name, p in params.named.items() if p.ndim > 1]
        rest = [p for name, p in params.named.items() if p.ndim <= 1]
        return torch.optim.AdamW([{"params": decay}, {"params": rest, "weight_decay": 0.0}], lr=3e-4)
    """

    def __init__(self, named: Mapping[str, nn.Parameter]) -> None:
        super().__init__(named.values())
        self.named = dict(named)


Factory = Callable[[Parameters], Any]
RATE = "lr"
"""The option that a schedule changes: an input of the program."""


def numbers_of(options: Mapping[str, Any], names: Sequence[str]) -> dict[str, float]:
    """The numbers among some options of a group, by name; those of a pair as ``betas.0``, ``betas.1``."""
    found: dict[str, float] = {}
    for name in (each for each in names if each in options):
        value = options[name]
        several = isinstance(value, (tuple, list))
        parts = {f"{name}.{i}": each for i, each in enumerate(value)} if several else {name: value}
        if all(isinstance(each, (int, float, torch.Tensor)) and not isinstance(each, bool) for each in parts.values()):
            found |= {part: float(each) for part, each in parts.items()}
    return found


def replace_numbers(options: Mapping[str, Any], numbers: Mapping[str, Any]) -> dict[str, Any]:
    """The options that have these numbers, with the numbers replaced."""
    found: dict[str, Any] = {}
    for name, value in options.items():
        if name in numbers:
            found[name] = numbers[name]
        elif isinstance(value, (tuple, list)) and f"{name}.0" in numbers:
            found[name] = tuple(numbers[f"{name}.{i}"] for i in range(len(value)))
    return found


@dataclass(frozen=True, eq=False)
class OptimizerGroup:
    """One group of one optimizer: ``index`` among the optimizer's own, ``number`` among those of all."""

    optimizer: torch.optim.Optimizer
    index: int
    number: int
    names: tuple[str, ...]
    scheduled: tuple[str, ...]
    """Options that may change from step to step, beside the rate."""
    numbers: Mapping[str, float]
    """The numbers that are inputs of the step, as they were made: ``lr``, ``weight_decay``, ``betas.0``, ``betas.1``.
    Read when the group is made: while a step is traced a tensor says nothing."""

    @property
    def options(self) -> dict[str, Any]:
        """The group's options, without its parameters."""
        group = self.optimizer.param_groups[self.index]
        return {name: value for name, value in group.items() if name not in ("params", "param_names")}

    @property
    def kind(self) -> str:
        """The name of the optimizer's class."""
        return type(self.optimizer).__name__

    @property
    def where(self) -> Where:
        """The line at which the optimizer's step begins."""
        return step_of(self.optimizer)


def step_of(optimizer: torch.optim.Optimizer) -> Where:
    """The file and line of an optimizer's ``step``."""
    step = inspect.unwrap(type(optimizer).step)
    code = step.__code__
    return Where("", code.co_filename, code.co_firstlineno, f"{type(optimizer).__name__}.step")


def make_groups_of(
    factory: Factory, named: Mapping[str, nn.Parameter], scheduled: Sequence[str] = ()
) -> list[OptimizerGroup]:
    """The groups of the optimizers that ``factory`` makes of the parameters; options ``scheduled`` may change.

    Raises:
        Error: it makes something else, of other parameters, or of one parameter in two optimizers; an optimizer that
            calls the model again.
    """
    made = factory(Parameters(named))
    optimizers = list(made) if isinstance(made, (list, tuple)) else [made]
    if not optimizers or not all(isinstance(each, torch.optim.Optimizer) for each in optimizers):
        raise Error(
            "this is no optimizer",
            where=WHERE,
            expected="a function of the parameters that gives a torch.optim.Optimizer, or a list of some",
            got=f"{made!r:.100} of type {type(made).__name__}",
            remedy="Hints(optimizer=lambda params: torch.optim.AdamW(params, lr=3e-4))",
        )
    names = {id(parameter): name for name, parameter in named.items()}
    groups: list[OptimizerGroup] = []
    seen: dict[str, str] = {}
    for optimizer in optimizers:
        _check_closure(optimizer)
        for index, group in enumerate(optimizer.param_groups):
            mine = tuple(names.get(id(parameter), "") for parameter in group["params"])
            _check_names(mine, group["params"], seen, optimizer)
            seen.update(dict.fromkeys(mine, type(optimizer).__name__))
            numbers = numbers_of(group, (RATE, *scheduled))
            groups.append(OptimizerGroup(optimizer, index, len(groups), mine, tuple(scheduled), numbers))
    return groups


def _check_closure(optimizer: torch.optim.Optimizer) -> None:
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if isinstance(optimizer, torch.optim.LBFGS) or (closure is not None and closure.default is closure.empty):
        raise Error(
            f"{type(optimizer).__name__} calls the model again within its step, which is no one program",
            where=f"{WHERE}  {step_of(optimizer)}",
            expected="an optimizer whose step() takes the gradients that are there",
            got="a step that needs a closure",
            remedy="leave it out of the hints, make it of pm.parameters(), and call optimizer.step(closure)",
        )


def _check_names(
    names: Sequence[str], tensors: Sequence[torch.Tensor], seen: Mapping[str, str], optimizer: torch.optim.Optimizer
) -> None:
    kind = type(optimizer).__name__
    for name, parameter in zip(names, tensors, strict=True):
        if not name:
            raise Error(
                f"{kind} is made of a tensor that it was not given",
                where=WHERE,
                expected="an optimizer of the parameters that the function is called with (or of some of them)",
                got=f"a tensor of shape {tuple(parameter.shape)}, perhaps the model's own parameter",
                remedy="use what is given: optimizer=lambda params: torch.optim.AdamW(params); params.named has names",
            )
        if name in seen:
            raise Error(
                f"parameter {name!r} has two optimizers",
                where=WHERE,
                expected="each parameter in one of them, or in none",
                got=f"{seen[name]} and {kind}",
                remedy="give each its own: [Muon([p for p in params if p.ndim == 2]), AdamW([... the others])]",
            )
