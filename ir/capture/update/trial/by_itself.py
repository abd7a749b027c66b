"""Whether an optimizer steps each parameter by itself: of what lies in ``self.state[p]``, and of nothing else.

A traced step is that of one parameter. What an optimizer counts elsewhere (``self.calls``, ``group["k"]``), and what it
takes of other parameters (the norm of all gradients), is not in it, and may show after more steps than are tried, or
for larger gradients. So both are looked for as such.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from shardfx.ir.capture.update.made_groups import RATE, Group, numbers_of

from .refusal import not_alone

Made = tuple[Mapping[str, nn.Parameter], Sequence[Group]]
Grads = Mapping[str, torch.Tensor]
Numbers = Mapping[str, float | torch.Tensor]
OTHERWISE: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    torch.zeros_like,
    lambda grad: grad * 1e8,
    lambda grad: torch.full_like(grad, float("nan")),
)
"""Gradients of others: step by step, the last ones with what may be an error to it."""


def kept_elsewhere(group: Group) -> Numbers:
    """The numbers that a group's optimizer holds, but for parameters, their states, and options that are inputs."""
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


def check_kept_elsewhere(group: Group, before: Numbers) -> None:
    """Whether all that changed since is where it belongs.

    Raises:
        Error: the optimizer counts, or collects, something beside ``self.state[p]``.
    """
    for name, value in kept_elsewhere(group).items():
        if not _equal(value, before.get(name)):
            raise not_alone(group, f"{name}, which it changes from step to step")


def check_inputs_left(group: Group, given: Mapping[str, float]) -> None:
    """Whether a step left the numbers that are its inputs as they were.

    Raises:
        Error: the optimizer changes its own rate.
    """
    now = numbers_of(group.options, (RATE, *group.scheduled))
    changed = next((name for name, value in given.items() if now.get(name) != value), None)
    if changed is not None:
        got = f"{changed!r} of a group, which a step changes from {given[changed]!r} to {now.get(changed)!r}"
        raise not_alone(group, got, "have a schedule of torch.optim.lr_scheduler change it, of pm.optimizer")


def _equal(one: float | torch.Tensor, other: float | torch.Tensor | None) -> bool:
    if other is None:
        return False
    mine, theirs = torch.as_tensor(one), torch.as_tensor(other)
    return mine.shape == theirs.shape and torch.equal(mine, theirs)


def check_by_itself(
    make: Callable[[], Made],
    step: Callable[[int, Made, Grads], object],
    grads: Sequence[Grads],
    after: Sequence[Mapping[str, torch.Tensor]],
) -> None:
    """Whether what is left of a parameter is the same whatever gradients others have.

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


def _check_same(made: Made, after: Mapping[str, torch.Tensor], names: Container[str]) -> None:
    parameters, groups = made
    for group in groups:
        for name in (name for name in group.names if name in names):
            if not torch.equal(parameters[name], after[name]):
                raise not_alone(
                    group,
                    f"another {name!r} after a step in which others have other gradients",
                    "of a norm of all gradients say Hints(clip=...)",
                )
