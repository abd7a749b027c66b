"""Trial of an optimizer on small parameters: what its steps do, and whether each parameter is stepped by itself.

A traced step is that of one parameter. What an optimizer counts elsewhere (``self.calls``, ``group["k"]``), and what it
takes of other parameters (the norm of all gradients), is not in it, and may show after more steps than are tried, or
for larger gradients. So both are tested as such.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from shardfx.ir.errors import Error

from .optimizer_groups import RATE, WHERE, Factory, OptimizerGroup, make_groups_of, numbers_of, replace_numbers
from .step_trace import StepTraces

SHARES = (1.0,) * 4 + (0.5,) * 4
"""Factors of the rate and other scheduled options, by step of the trial."""
ON_DEVICES = "capturable"
"""An option for kernels of devices, which is switched off: small parameters are on the CPU."""
Left = tuple[torch.Tensor, Mapping[str, Any]]
"""A parameter after a step, and its states."""


class OptimizerTrial:
    """The user's optimizers, made of small parameters: once to be traced, and again to be stepped.

    Raises:
        Error: they are made otherwise of small parameters; their step raises; or it does not step each by itself.
    """

    def __init__(
        self,
        factory: Factory,
        named: Mapping[str, nn.Parameter],
        groups: Sequence[OptimizerGroup],
        trained: Container[str],
    ) -> None:
        sizes = sorted({size for parameter in named.values() for size in parameter.shape if size > 1})
        self._size = {size: min(2 + i, 6) for i, size in enumerate(sizes)} | {0: 0, 1: 1}
        self._drawn = torch.Generator().manual_seed(0)
        self.named = {
            name: nn.Parameter(self._draw(parameter.shape), requires_grad=parameter.requires_grad)
            for name, parameter in named.items()
        }
        self.groups = self._made(factory, self.named, groups)
        self.traces = StepTraces()
        self.numbers = [
            [{name: value * share for name, value in group.numbers.items()} for share in SHARES] for group in groups
        ]
        self.grads = [
            {name: self._draw(parameter.shape) for name, parameter in named.items() if name in trained} for _ in SHARES
        ]
        self.after = self._stepped(self._again(factory, groups))
        after = [{name: p for name, (p, _) in left.items()} for left in self.after]
        check_by_itself(lambda: self._again(factory, groups), self._step, self.grads, after)

    def _draw(self, shape: Sequence[int]) -> torch.Tensor:
        """Random numbers in the small shape of a large one."""
        return torch.randn([self._size[s] for s in shape], dtype=torch.float64, generator=self._drawn)

    def _again(self, factory: Factory, groups: Sequence[OptimizerGroup]) -> TrialSetup:
        """A copy of the parameters, with optimizers of their own."""
        parameters = {
            name: nn.Parameter(p.detach().clone(), requires_grad=p.requires_grad) for name, p in self.named.items()
        }
        return parameters, self._made(factory, parameters, groups)

    @staticmethod
    def _made(
        factory: Factory, named: Mapping[str, nn.Parameter], groups: Sequence[OptimizerGroup]
    ) -> list[OptimizerGroup]:
        wanted = [(group.kind, group.names) for group in groups]
        try:
            made = make_groups_of(factory, named, groups[0].scheduled if groups else ())
            got = str([(group.kind, group.names) for group in made])
        except Exception as error:  # of the user's own code, which found the large ones right
            made, got = [], f"{type(error).__name__}: {error}"
        if [(group.kind, group.names) for group in made] != wanted:
            raise Error(
                "the optimizer is made otherwise of small parameters, on which it is tried",
                where=WHERE,
                expected=f"groups that names and numbers of dims decide, as {wanted}"[:300],
                got=got[:300],
                remedy="choose groups by params.named and p.ndim, not by sizes; or leave optimizer= out of the hints",
            )
        return made

    def _stepped(self, made: TrialSetup) -> list[dict[str, Left]]:
        """Each parameter and its states after each step."""
        after: list[dict[str, Left]] = []
        kept: list[Numbers] = []
        for i, grads in enumerate(self.grads):
            self._step(i, made, grads)
            after.append(_left(made, grads))
            kept = kept or [kept_elsewhere(group) for group in made[1]]
        for group, before in zip(made[1], kept, strict=True):
            check_kept_elsewhere(group, before)
        return after

    def _step(self, i: int, made: TrialSetup, grads: Grads) -> None:
        """Step all parameters together, as the optimizers themselves do."""
        parameters, groups = made
        for name, grad in grads.items():
            parameters[name].grad = grad.clone()
        for group in groups:
            mine = group.optimizer.param_groups[group.index]
            mine.update(replace_numbers(group.options, self.numbers[group.number][i]))
            mine.update({ON_DEVICES: False} if ON_DEVICES in mine else {})
        for group in groups:
            if group.index == 0:
                try:
                    group.optimizer.step()
                except Exception as error:  # whatever the user's own code raises
                    raise refusal(group, error) from error
        for group in groups:
            check_inputs_left(group, self.numbers[group.number][i])


def _left(made: TrialSetup, grads: Grads) -> dict[str, Left]:
    """Each parameter that has a gradient, and its states."""
    parameters, groups = made
    return {
        name: (parameters[name].detach().clone(), copy.deepcopy(group.optimizer.state.get(parameters[name], {})))
        for group in groups
        for name in group.names
        if name in grads
    }


TrialSetup = tuple[Mapping[str, nn.Parameter], Sequence[OptimizerGroup]]
Grads = Mapping[str, torch.Tensor]
Numbers = Mapping[str, float | torch.Tensor]
OTHERWISE: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    torch.zeros_like,
    lambda grad: grad * 1e8,
    lambda grad: torch.full_like(grad, float("nan")),
)
"""Changes of other parameters' gradients, by step; the last one may make an optimizer raise."""


def kept_elsewhere(group: OptimizerGroup) -> Numbers:
    """The numbers of a group's optimizer beside parameters, their states, and options that are inputs."""
    optimizer, inputs = group.optimizer, ("params", RATE, *group.scheduled)
    found: dict[str, float | torch.Tensor] = {}
    for name, value in vars(optimizer).items():
        if name not in ("param_groups", "state", "defaults"):
            found.update(_numbers(f"self.{name}", value))
    for i, options in enumerate(optimizer.param_groups):
        for name, value in options.items():
            if name not in inputs:
                found.update(_numbers(f"self.param_groups[{i}][{name!r}]", value))
    states: Mapping[Any, Any] = optimizer.state
    for key, value in states.items():
        if not isinstance(key, torch.Tensor):
            found.update(_numbers(f"self.state[{key!r}]", value))
    return found


def _numbers(name: str, value: Any) -> Iterator[tuple[str, float | torch.Tensor]]:
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from _numbers(f"{name}[{key!r}]", each)
    elif isinstance(value, (list, tuple)):
        for i, each in enumerate(value):
            yield from _numbers(f"{name}[{i}]", each)
    elif isinstance(value, torch.Tensor):
        yield name, value.detach().clone()
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield name, value


def check_kept_elsewhere(group: OptimizerGroup, before: Numbers) -> None:
    """Check that no such number changed.

    Raises:
        Error: the optimizer counts, or collects, something beside ``self.state[p]``.
    """
    for name, value in kept_elsewhere(group).items():
        if not _equal(value, before.get(name)):
            raise not_alone(group, f"{name}, which it changes from step to step")


def check_inputs_left(group: OptimizerGroup, values: Mapping[str, float]) -> None:
    """Check that a step left the options that are inputs unchanged.

    Raises:
        Error: the optimizer changes its own rate.
    """
    now = numbers_of(group.options, (RATE, *group.scheduled))
    changed = next((name for name, value in values.items() if now.get(name) != value), None)
    if changed is not None:
        got = f"{changed!r} of a group, which a step changes from {values[changed]!r} to {now.get(changed)!r}"
        raise not_alone(group, got, "have a schedule of torch.optim.lr_scheduler change it, of pm.optimizer")


def _equal(one: float | torch.Tensor, other: float | torch.Tensor | None) -> bool:
    if other is None:
        return False
    mine, theirs = torch.as_tensor(one), torch.as_tensor(other)
    return mine.shape == theirs.shape and torch.equal(mine, theirs)


def check_by_itself(
    make: Callable[[], TrialSetup],
    step: Callable[[int, TrialSetup, Grads], object],
    grads: Sequence[Grads],
    after: Sequence[Mapping[str, torch.Tensor]],
) -> None:
    """Check that a parameter's step does not depend on the gradients of others.

    Args:
        make: small parameters and optimizers of them, the same each time.
        step: a step of all of them, by its number and gradients.
        grads: some, for each step.
        after: the parameters after each step with these.

    Raises:
        Error: the optimizer takes something of one parameter for the step of another.
    """
    names = [*grads[0]]
    for others in (names[::2], names[1::2]) if len(names) > 1 else ():
        made, rest = make(), {*names} - {*others}
        for i, other in enumerate(OTHERWISE):
            try:
                step(i, made, {name: other(grad) if name in others else grad for name, grad in grads[i].items()})
            except Exception:  # of what is no number: a factorization, perhaps
                break
            _check_same(made, after[i], rest)


def _check_same(made: TrialSetup, after: Mapping[str, torch.Tensor], names: Container[str]) -> None:
    parameters, groups = made
    for group in groups:
        for name in (name for name in group.names if name in names):
            if not torch.equal(parameters[name], after[name]):
                raise not_alone(
                    group,
                    f"another {name!r} after a step in which others have other gradients",
                    "of a norm of all gradients say Hints(clip_grad_norm=...)",
                )


OUTSIDE = (
    "or leave optimizer= out of the hints, and step it outside, of pm.parameters() (with its closure, if it has one)"
)


def refusal(group: OptimizerGroup, error: Exception) -> Error:
    """The error of a step that cannot be traced; errors of ours as they are."""
    if isinstance(error, Error):
        return error
    text = f"{type(error).__name__}: {error}".split("\n")[0][:300]
    return Error(
        f"the step of {group.kind} cannot be traced",
        where=f"{WHERE}  {_line(group, error)}",
        expected="a step that computes with tensors, and decides nothing by a number that it reads out of one",
        got=text,
        remedy=f"use torch.where, torch.minimum, ... in it, and no .item(), float(...) or if on a tensor; {OUTSIDE}",
    )


def not_alone(
    group: OptimizerGroup, got: str, remedy: str = "keep what changes from step to step in self.state[p]"
) -> Error:
    """The error of a step that is not one of each parameter by itself."""
    return Error(
        f"the step of {group.kind} is none of one parameter alone, with states that are tensors",
        where=f"{WHERE}  {group.where}",
        expected="a step that for each parameter depends on its gradient, its states and lr",
        got=got,
        remedy=f"{remedy}; {OUTSIDE}",
    )


def _line(group: OptimizerGroup, error: Exception) -> str:
    """The last line of the optimizer's own file that raised."""
    own, trace, line = group.where, error.__traceback__, 0
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == own.file:
            line = trace.tb_lineno
        trace = trace.tb_next
    return str(replace(own, line=line or own.line))
