"""Small parameters with numbers in them, on which a user's optimizers are stepped, to see what they do."""

from __future__ import annotations

import copy
from collections.abc import Container, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from shardfx.ir.capture.update.made_groups import WHERE, Factory, Group, make_groups_of, with_numbers
from shardfx.ir.capture.update.traces import Traces
from shardfx.ir.errors import Error

from .by_itself import Grads, Made, Numbers, check_by_itself, check_inputs_left, check_kept_elsewhere, kept_elsewhere
from .refusal import refusal

SHARES = (1.0,) * 4 + (0.5,) * 4
"""Of the rate and what else is scheduled, in each step that is tried."""
ON_DEVICES = "capturable"
"""An option for kernels of devices, which do what others do: small parameters are in the host's memory."""
Left = tuple[torch.Tensor, Mapping[str, Any]]
"""A parameter after a step, and its states."""


class Small:
    """The same optimizers, made of small parameters: once to be traced, and again to be stepped.

    Raises:
        Error: they are made otherwise of small parameters; their step raises; or it does not step each by itself.
    """

    def __init__(
        self, factory: Factory, named: Mapping[str, nn.Parameter], groups: Sequence[Group], trained: Container[str]
    ) -> None:
        sizes = sorted({size for parameter in named.values() for size in parameter.shape if size > 1})
        self._size = {size: min(2 + i, 6) for i, size in enumerate(sizes)} | {0: 0, 1: 1}
        self._drawn = torch.Generator().manual_seed(0)
        self.named = {
            name: nn.Parameter(self._draw(parameter.shape), requires_grad=parameter.requires_grad)
            for name, parameter in named.items()
        }
        self.groups = self._made(factory, self.named, groups)
        self.traces = Traces()
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
        """Numbers in the small shape of a large one, of both signs."""
        return torch.randn([self._size[s] for s in shape], dtype=torch.float64, generator=self._drawn)

    def _again(self, factory: Factory, groups: Sequence[Group]) -> Made:
        """The same parameters once more, with optimizers of their own."""
        held = {name: nn.Parameter(p.detach().clone(), requires_grad=p.requires_grad) for name, p in self.named.items()}
        return held, self._made(factory, held, groups)

    @staticmethod
    def _made(factory: Factory, named: Mapping[str, nn.Parameter], groups: Sequence[Group]) -> list[Group]:
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

    def _stepped(self, made: Made) -> list[dict[str, Left]]:
        """What is left of each parameter after each step."""
        after: list[dict[str, Left]] = []
        kept: list[Numbers] = []
        for i, grads in enumerate(self.grads):
            self._step(i, made, grads)
            after.append(_left(made, grads))
            kept = kept or [kept_elsewhere(group) for group in made[1]]
        for group, before in zip(made[1], kept, strict=True):
            check_kept_elsewhere(group, before)
        return after

    def _step(self, i: int, made: Made, grads: Grads) -> None:
        """Step all parameters together, as the optimizers themselves do."""
        held, groups = made
        for name, grad in grads.items():
            held[name].grad = grad.clone()
        for group in groups:
            mine = group.optimizer.param_groups[group.index]
            mine.update(with_numbers(group.options, self.numbers[group.number][i]))
            mine.update({ON_DEVICES: False} if ON_DEVICES in mine else {})
        for group in groups:
            if group.index == 0:
                try:
                    group.optimizer.step()
                except Exception as error:  # whatever the user's own code raises
                    raise refusal(group, error) from error
        for group in groups:
            check_inputs_left(group, self.numbers[group.number][i])


def _left(made: Made, grads: Grads) -> dict[str, Left]:
    """What is left of each parameter that has a gradient."""
    held, groups = made
    return {
        name: (held[name].detach().clone(), copy.deepcopy(group.optimizer.state.get(held[name], {})))
        for group in groups
        for name in group.names
        if name in grads
    }
