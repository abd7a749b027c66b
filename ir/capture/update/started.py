"""What the states of an optimizer begin with, found and checked by executing its traced step beside it in small.

An optimizer makes its states in its first step. A program has one step, for the first time as for all others: so the
states must begin with something from which a later step is the first one (zeros, mostly). Where nothing is (a momentum
with dampening), the first step is traced too, and chosen while a count of steps is zero.
"""

from __future__ import annotations

import copy
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Literal

import torch
from torch import nn

from shardfx.ir.errors import Error

from .made_groups import WHERE, Factory, Group, make_groups_of, with_numbers
from .step_trace import Traced
from .traces import Traces

SHARES = (1.0,) * 4 + (0.5,) * 4
"""Of the rate and what else is scheduled, in each step that is tried."""
TOLERANCE = 1e-9
Start = float | Literal["parameter"]
"""What a state begins with: a number everywhere, or what its parameter is."""
Left = tuple[torch.Tensor, Mapping[str, Any]]
"""A parameter after a step, and its states."""


@dataclass(frozen=True, eq=False)
class Recipe:
    """How the parameters of a kind are stepped: with which further options, and what their states begin with.

    ``once``: the first step is another one than the others.
    """

    options: Mapping[str, Any]
    starts: Mapping[str, Start]
    once: bool = False


class Small:
    """The same optimizers, made of small parameters with numbers in them: once to be traced, once to be stepped."""

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
        held = {name: nn.Parameter(p.detach().clone(), requires_grad=p.requires_grad) for name, p in self.named.items()}
        stepped = self._made(factory, held, groups)
        self.numbers = [
            [{name: value * share for name, value in group.numbers.items()} for share in SHARES] for group in groups
        ]
        self.grads = [
            {name: self._draw(parameter.shape) for name, parameter in named.items() if name in trained} for _ in SHARES
        ]
        self.after = [self._step(i, stepped, held) for i in range(len(SHARES))]

    def _draw(self, shape: Sequence[int]) -> torch.Tensor:
        """Numbers in the small shape of a large one, of both signs."""
        return torch.randn([self._size[s] for s in shape], dtype=torch.float64, generator=self._drawn)

    @staticmethod
    def _made(factory: Factory, named: Mapping[str, nn.Parameter], groups: Sequence[Group]) -> list[Group]:
        wanted = [(group.kind, group.names) for group in groups]
        try:
            made = make_groups_of(factory, named, groups[0].scheduled if groups else ())
            got = str([(group.kind, group.names) for group in made])
        except (ValueError, TypeError, RuntimeError) as error:
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

    def _step(self, i: int, groups: Sequence[Group], held: Mapping[str, nn.Parameter]) -> dict[str, Left]:
        """Step all parameters together, as the optimizers themselves do; gives what is left of each."""
        for name, grad in self.grads[i].items():
            held[name].grad = grad.clone()
        for group in groups:
            mine = group.optimizer.param_groups[group.index]
            mine.update(with_numbers(group.options, self.numbers[group.number][i]))
        for group in groups:
            if group.index == 0:
                try:
                    group.optimizer.step()
                except (TypeError, AttributeError, RuntimeError, ValueError, NotImplementedError, KeyError) as error:
                    raise refusal(group, error) from error
        return {
            name: (held[name].detach().clone(), copy.deepcopy(group.optimizer.state.get(held[name], {})))
            for group in groups
            for name in group.names
            if name in self.grads[i]
        }


def recipe(small: Small, number: int, names: Sequence[str]) -> Recipe:
    """How to step the parameters ``names`` of group ``number``, all of one shape.

    Raises:
        Error: the step cannot be traced; or no program is what the optimizer does.
    """
    group = small.groups[number]
    tried: list[Exception | str] = []
    capturable = ({}, {"capturable": True}) if "capturable" in group.options else ({},)
    for options in capturable:
        try:
            return _recipe(small, group, names[:2], options)
        except (Error, TypeError, AttributeError, RuntimeError, ValueError, NotImplementedError, KeyError) as error:
            tried.append(error)
    first = tried[0]
    assert isinstance(first, Exception)
    raise refusal(group, first) from first


def refusal(group: Group, error: Exception) -> Error:
    """Why a step cannot be a part of the program, in words."""
    if isinstance(error, Error):
        return error
    text = f"{type(error).__name__}: {error}".split("\n")[0][:300]
    return Error(
        f"the step of {group.kind} cannot be traced",
        where=f"{WHERE}  {_line(group, error)}",
        expected="a step that computes with tensors, and decides nothing by a number that it reads out of one",
        got=text,
        remedy="use torch.where, torch.minimum, ... in it, and no .item(), float(...) or if on a tensor; or leave "
        "optimizer= out of the hints, and step it outside, of pm.parameters()",
    )


def _line(group: Group, error: Exception) -> str:
    """The last line of the optimizer's own file that raised."""
    own, trace, line = group.where, error.__traceback__, 0
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == own.file:
            line = trace.tb_lineno
        trace = trace.tb_next
    return str(replace(own, line=line or own.line))


def _recipe(small: Small, group: Group, names: Sequence[str], options: Mapping[str, Any]) -> Recipe:
    """A recipe that does what the optimizer does, if there is one."""
    states = group.optimizer.state
    like = small.named[names[0]]
    given = dict(states.get(like, {}))
    _, later = small.traces.step(group, like.shape, like.dtype, given, options)
    known = {name: _content(value, like, group) for name, value in given.items() if name in later.names}
    numbers = [v for v in group.options.values() if isinstance(v, float)]
    choices: list[Start] = [0.0, 1.0, "parameter", *dict.fromkeys(v for v in numbers if v not in (0.0, 1.0))]
    orders = [[known[name]] if name in known else choices for name in later.names]
    apart = ""
    for content in sorted(product(*orders), key=lambda each: sum(value != 0.0 for value in each)):
        starts = dict(zip(later.names, content, strict=True))
        apart = _apart(small, group, names, starts, later)
        if not apart:
            return Recipe(options, starts)
    first = small.traces.step(group, like.shape, like.dtype, given, options, first=True)[1] if not given else None
    starts = dict.fromkeys(later.names, 0.0)
    if first is None or (apart := _apart(small, group, names, starts, later, first)):
        raise Error(
            f"the step of {group.kind} is none of one parameter alone, with states that are tensors",
            where=f"{WHERE}  {group.where}",
            expected="a step that for each parameter depends on its gradient, its states and lr",
            got=f"after {len(SHARES)} steps of small parameters its traced form is elsewhere: {apart}",
            remedy="keep what changes from step to step in self.state[p], as tensors; or leave optimizer= out of the "
            "hints, and step it outside, of pm.parameters()",
        )
    return Recipe(options, dict(starts), once=True)


def _apart(
    small: Small,
    group: Group,
    names: Sequence[str],
    starts: Mapping[str, Start],
    later: Traced,
    first: Traced | None = None,
) -> str:
    """Where the traced step is not the optimizer's, in words; nothing, where it does the same."""
    for name in names:
        p = small.named[name].detach().clone()
        states = [begin(starts[key], later.shapes[key], later.dtypes[key], p) for key in later.names]
        for i, numbers in enumerate(small.numbers[group.number]):
            module = first.module if first is not None and i == 0 else later.module
            given = [torch.tensor(number, dtype=torch.float64) for number in numbers.values()]
            p, *states = module(p.clone(), small.grads[i][name].clone(), given, [s.clone() for s in states])
            want, kept = small.after[i][name]
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
    return torch.allclose(mine.double(), want.double(), rtol=slack, atol=slack)


def begin(start: Start, shape: Sequence[int], dtype: torch.dtype, p: torch.Tensor) -> torch.Tensor:
    """The first content of a state."""
    if start == "parameter" and tuple(shape) == tuple(p.shape):
        return p.detach().clone().to(dtype)
    return torch.full(tuple(shape), float("nan") if start == "parameter" else start, dtype=dtype)


def _content(value: Any, p: torch.Tensor, group: Group) -> Start:
    """What a state that is there before the first step holds."""
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
