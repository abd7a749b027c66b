"""Trial of an optimizer on small parameters: what its steps do, and whether each parameter is stepped by itself.

A traced step is that of one parameter. What an optimizer takes of other parameters (the norm of all gradients) is not
in it, which shows where all are stepped together, and some have large gradients. What it counts elsewhere
(``self.calls``, ``group["k"]``) may show after more steps than are tried, and is tested as such.
"""

from __future__ import annotations

import copy
from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

from shardfx.ir.errors import Error
from shardfx.ir.graph import Node

from .optimizer_groups import WHERE, Factory, OptimizerGroup, make_groups_of, replace_numbers
from .step_trace import StepTraces

SHARES = (1.0,) * 4 + (0.5,) * 4
"""Factors of the rate and other scheduled options, by step of the trial."""
ON_DEVICES = "capturable"
"""An option for kernels of devices, which is switched off: small parameters are on the CPU."""
LARGE = 1e8
"""The factor of every other gradient of the last step, in which an optimizer clips what it clips by all of them."""
Numbers = Mapping[str, float | torch.Tensor]


class OptimizerTrial:
    """The user's optimizers, made of small parameters: once to be traced, and again to be stepped. ``after`` are
    parameters and their states after each step with the gradients ``grads``; ``large`` are those with large ones in the
    last step, which hides rounding.

    Raises:
        Error: they are made otherwise of small parameters; their step raises; or it does not step each by itself.
    """

    def __init__(
        self,
        factory: Factory,
        named: Mapping[str, nn.Parameter],
        groups: Sequence[OptimizerGroup],
        trained: Container[str],
        sparse: Mapping[str, Sequence[Node]],
    ) -> None:
        sizes = sorted({size for parameter in named.values() for size in parameter.shape if size > 1})
        small = {size: min(2 + i, 6) for i, size in enumerate(sizes)} | {0: 0, 1: 1}
        generator = torch.Generator().manual_seed(0)

        def draw(parameter: nn.Parameter) -> torch.Tensor:
            shape = [small[size] for size in parameter.shape]
            return torch.randn(shape, dtype=torch.float64, generator=generator)

        self.named = {name: nn.Parameter(draw(each), each.requires_grad) for name, each in named.items()}
        self.groups, self.sparse = _made(factory, self.named, groups), sparse
        self.traces = StepTraces()
        self.numbers = [[{n: v * share for n, v in group.numbers.items()} for share in SHARES] for group in groups]
        self.grads = [{name: draw(each) for name, each in named.items() if name in trained} for _ in SHARES]
        self.large = {*[*self.grads[-1]][1::2]}
        self.grads[-1] |= {name: self.grads[-1][name] * LARGE for name in self.large}
        self.after: list[dict[str, tuple[torch.Tensor, Mapping[str, Any]]]] = []
        parameters = {name: nn.Parameter(p.detach().clone(), p.requires_grad) for name, p in self.named.items()}
        made = _made(factory, parameters, groups)
        for i, grads in enumerate(self.grads):
            for name, grad in grads.items():
                parameters[name].grad = grad.to_sparse(1) if name in sparse else grad.clone()
            before = self._step(i, made)
            for group, numbers in zip(made, before, strict=True) if i else ():  # the first step may make some
                for name, value in numbers_elsewhere(group).items():
                    if name not in numbers or not _equal(value, numbers[name]):
                        raise not_alone(group, f"{name}, which it changes from step to step")
            states = {name: group.optimizer.state for group in made for name in group.names if name in grads}
            copied = ((name, parameters[name], state) for name, state in states.items())
            self.after.append({n: (p.detach().clone(), copy.deepcopy(state.get(p, {}))) for n, p, state in copied})

    def _step(self, i: int, groups: Sequence[OptimizerGroup]) -> list[Numbers]:
        """Step all parameters together, as the optimizers themselves do; gives the numbers elsewhere before.

        Raises:
            Error: it raises.
        """
        for group in groups:
            mine = group.optimizer.param_groups[group.index]
            mine.update(replace_numbers(group.options, self.numbers[group.number][i]))
            mine.update({ON_DEVICES: False} if ON_DEVICES in mine else {})
        before = [numbers_elsewhere(group) for group in groups]
        for group in groups:
            if group.index == 0:
                try:
                    group.optimizer.step()
                except Exception as error:  # whatever the user's own code raises
                    raise refusal(group, error) from error
        return before


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


def numbers_elsewhere(group: OptimizerGroup) -> Numbers:
    """The numbers of a group's optimizer beside parameters and their states: attributes and options."""
    optimizer = group.optimizer
    trees = {f"self.{k}": v for k, v in vars(optimizer).items() if k not in ("param_groups", "state", "defaults")}
    groups = [{name: value for name, value in each.items() if name != "params"} for each in optimizer.param_groups]
    of_all = {key: value for key, value in optimizer.state.items() if not isinstance(key, torch.Tensor)}
    found: dict[str, float | torch.Tensor] = {}
    for name, tree in (trees | {"self.param_groups": groups, "self.state": of_all}).items():
        for path, leaf in pytree.tree_flatten_with_path(tree)[0]:
            if isinstance(leaf, (int, float, torch.Tensor)) and not isinstance(leaf, bool):
                found[name + pytree.keystr(path)] = leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf
    return found


def _equal(one: float | torch.Tensor, other: float | torch.Tensor) -> bool:
    mine, theirs = torch.as_tensor(one), torch.as_tensor(other)
    return mine.shape == theirs.shape and torch.equal(mine, theirs)


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


def not_alone(group: OptimizerGroup, got: str) -> Error:
    """The error of a step that is not one of each parameter by itself."""
    return Error(
        f"the step of {group.kind} is none of one parameter alone, with states that are tensors",
        where=f"{WHERE}  {group.where}",
        expected="a step that for each parameter depends on its gradient, its states and lr",
        got=got,
        remedy="keep what changes from step to step in self.state[p]; have a torch.optim.lr_scheduler change rates; of "
        f"a norm of all gradients say Hints(clip_grad_norm=...); {OUTSIDE}",
    )


def _line(group: OptimizerGroup, error: Exception) -> str:
    """The last line of the optimizer's own file that raised."""
    own, trace, line = group.where, error.__traceback__, 0
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == own.file:
            line = trace.tb_lineno
        trace = trace.tb_next
    return str(replace(own, line=line or own.line))
