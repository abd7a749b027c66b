"""Initial states of an optimizer, found and checked by executing its traced step beside it on small parameters.

An optimizer makes its states in its first step. A program has one step, for the first time as for all others: so the
states must begin with something from which a later step is the first one (zeros, mostly). Where nothing is (a momentum
with dampening), the first step is traced too, and chosen while a count of steps is zero.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

import torch

from shardfx.ir.errors import Error
from shardfx.ir.shards import wide

from .optimizer_groups import WHERE, OptimizerGroup
from .optimizer_trial import SHARES, OptimizerTrial, not_alone, refusal
from .sparse_rows import options_to_try
from .step_trace import TracedStep

TOLERANCE = 1e-9
Start = float | Literal["parameter"]
"""The initial content of a state: one number, or its parameter."""


@dataclass(frozen=True, eq=False)
class Recipe:
    """The recipe of steps for parameters of one kind: further options, and the initial content of their states.

    ``once``: the first step differs from the others.
    """

    options: Mapping[str, Any]
    starts: Mapping[str, Start]
    once: bool = False


def recipe(trial: OptimizerTrial, number: int, names: Sequence[str]) -> Recipe:
    """The recipe for the parameters ``names`` of group ``number``, all of one shape.

    Raises:
        Error: the step cannot be traced; or no program is what the optimizer does.
    """
    group = trial.groups[number]
    tried: list[Exception] = []
    for options in options_to_try(group.options, names[0] in trial.sparse):
        try:
            return _recipe(trial, group, [*dict.fromkeys((*names[:2], names[-1]))], options)
        except Exception as error:  # whatever the user's own code raises
            tried.append(error)
    raise refusal(group, tried[0]) from tried[0]


def _recipe(trial: OptimizerTrial, group: OptimizerGroup, names: Sequence[str], options: Mapping[str, Any]) -> Recipe:
    """A recipe that does what the optimizer does, if there is one."""
    like = trial.named[names[0]]
    state = dict(group.optimizer.state.get(like, {}))
    later = trial.traces.step(group, like.shape, like.dtype, state, options)
    known = {name: _content(value, like, group) for name, value in state.items() if name in later.names}
    choices: list[Start] = [0.0, 1.0, "parameter", *(v for v in group.options.values() if isinstance(v, float))]
    orders = [[known[name]] if name in known else list(dict.fromkeys(choices)) for name in later.names]
    for content in sorted(product(*orders), key=lambda each: sum(value != 0.0 for value in each)):
        starts = dict(zip(later.names, content, strict=True))
        apart = _apart(trial, group, names, starts, later)
        if not apart:
            return Recipe(options, starts)
    if not state:
        first = trial.traces.step(group, like.shape, like.dtype, state, options, first=True)
        starts = dict.fromkeys(later.names, 0.0)
        apart = _apart(trial, group, names, starts, later, first)
        if not apart:
            return Recipe(options, starts, once=True)
    raise not_alone(group, f"after {len(SHARES)} steps of small parameters its traced form is elsewhere: {apart}")


def _apart(
    trial: OptimizerTrial,
    group: OptimizerGroup,
    names: Sequence[str],
    starts: Mapping[str, Start],
    later: TracedStep,
    first: TracedStep | None = None,
) -> str:
    """The difference of the traced step from the optimizer's, in words; "" where there is none."""
    for name in names:
        p = trial.named[name].detach().clone()
        states = [initial_content(starts[key], later.shapes[key], later.dtypes[key], p) for key in later.names]
        for i, numbers in enumerate(trial.numbers[group.number][: len(SHARES) - (name in trial.large)]):
            module = first.module if first is not None and i == 0 else later.module
            values = [torch.tensor(number, dtype=torch.float64) for number in numbers.values()]
            try:
                p, *states = module(p.clone(), trial.grads[i][name].clone(), values, [s.clone() for s in states])
            except RuntimeError as error:  # of a state that begins otherwise: a factorization of what is no number
                return f"{error} in step {i + 1}"
            want, kept = trial.after[i][name]
            pairs = [("the parameter", p, want)]
            pairs += [(key, s, kept[key]) for key, s in zip(later.names, states, strict=True) if key in kept]
            for what, mine, theirs in pairs:
                if not _close(mine, theirs):
                    return f"{what} after step {i + 1}"
    return ""


def _close(mine: torch.Tensor, theirs: Any) -> bool:
    want = theirs if isinstance(theirs, torch.Tensor) else torch.tensor(float(theirs), dtype=torch.float64)
    if mine.shape != want.shape:
        return False
    slack = TOLERANCE if want.dtype in (torch.float64, torch.int64) else 1e-5  # torch keeps its own numbers in float32
    return torch.allclose(wide(mine), wide(want), rtol=slack, atol=slack)


def initial_content(start: Start, shape: Sequence[int], dtype: torch.dtype, p: torch.Tensor) -> torch.Tensor:
    """The initial content of a state, as a tensor."""
    if start == "parameter" and tuple(shape) == tuple(p.shape):
        return p.detach().clone().to(dtype)
    return torch.full(tuple(shape), float("nan") if start == "parameter" else start, dtype=dtype)


def _content(value: Any, p: torch.Tensor, group: OptimizerGroup) -> Start:
    """The initial content of a state that is there before the first step."""
    tensor = value.detach() if isinstance(value, torch.Tensor) else torch.tensor(float(value))
    if tensor.numel() and bool((tensor == tensor.reshape(-1)[0]).all()):
        return float(tensor.reshape(-1)[0])
    if tuple(tensor.shape) == tuple(p.shape) and torch.equal(tensor, p.detach()):
        return "parameter"
    raise Error(
        f"a state of {group.kind} begins with something of its own",
        where=f"{WHERE}  {group.where}",
        expected="one number everywhere, or what its parameter is",
        got=f"a tensor of shape {tuple(tensor.shape)} with several numbers",
    )
