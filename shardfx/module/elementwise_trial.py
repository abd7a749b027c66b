"""Trial of an optimizer on shards: its steps on small copies of parameters, sharded and full, must be equal.

    parameter 4096 x 1024, sharded 8 x 1      ->      256 x 64 in full, and as 8 shards of 32 x 64
    parameter 16, sharded 2                    ->      16 in full, and 2 shards of 8

Each copy has the parameter's own number of dims, shards and (as far as it can) ratio of its sides; a parameter of up to
``MOST`` elements has its own shape. Copies of one kind are tried once, all kinds and groups together: what an optimizer
adds up over all its parameters is right on shards, and is found to be.
"""

from __future__ import annotations

import copy
import inspect
import math
import warnings
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.optim.optimizer import Optimizer
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from shardfx.ir.capture.frontend.model_preparation import marks_of

Tensor = torch.Tensor
STEPS, GRADIENTS = 16, 64
"""Some optimizers begin with plain steps: RAdam with five of them. Where a step computes many gradients, fewer do."""
MOST = 2**14
"""The most elements of a copy; 64 of a parameter that is not sharded."""
SHARDS = 64
"""The most shards of a copy."""
SCALES = (1.0, 50.0, 0.02)
LATE = (1e3, 7.0, 1e6, 1e-3)
"""The scales of the last steps' gradients, large ones among them, so that clipping above a norm takes effect."""
CLOSE, ROUNDING = 1e-5, 1e-14
"""The tolerances of weights: relative to their change, and to the weights themselves."""
PLAIN = (bool, int, float, complex, str, type(None), torch.dtype, torch.device, FunctionType)
OF_TORCH = ("defaults", "state", "param_groups", "step")
"""Attributes that torch sets on instances: ``step`` is perhaps wrapped by a scheduler."""


@dataclass(frozen=True)
class Layout:
    """A parameter's global shape, and the number of its shards along each dim."""

    name: str
    shape: tuple[int, ...]
    counts: tuple[int, ...]

    @property
    def is_sharded(self) -> bool:
        """Whether there are several shards."""
        return math.prod(self.counts) > 1


@dataclass(frozen=True)
class ParameterKind:
    """Properties of a parameter that an optimizer may depend on, in a small copy; ``name`` is that of one such."""

    shape: tuple[int, ...]
    counts: tuple[int, ...]
    dtype: torch.dtype
    marks: str = ""
    name: str = field(default="", compare=False)

    @staticmethod
    def of(parameter: Tensor) -> ParameterKind:
        """The kind of a parameter, which may be a shard, or not sharded at all."""
        layout = _layouts.get(parameter) or Layout("", tuple(parameter.shape), (1,) * parameter.dim())
        counts, shape = list(layout.counts), list(layout.shape)
        while math.prod(counts) > SHARDS:
            widest = counts.index(max(counts))
            counts[widest] = (counts[widest] + 1) // 2
        most = MOST if layout.is_sharded else 64
        while math.prod(shape) > most:
            sizes = zip(shape, counts, strict=True)
            halves = [size // 2 if size > 16 and size // 2 >= count else size for size, count in sizes]
            if halves == shape:
                break
            shape = halves
        dtype = torch.complex128 if parameter.is_complex() else torch.float64
        return ParameterKind(tuple(shape), tuple(counts), dtype, repr(sorted(marks_of(parameter).items())), layout.name)

    def shards(self, full: Tensor) -> list[Tensor]:
        """The shards of a copy."""
        found = [full]
        for dim, count in enumerate(self.counts):
            found = [shard for each in found for shard in each.tensor_split(count, dim)]
        return found


@dataclass(frozen=True)
class Trial:
    """The result of a trial: the difference of shards and full tensors, relative to what the steps changed (0: by
    rounding alone), its parameter and number of steps; or why nobody knows."""

    apart: float = 0.0
    name: str = ""
    steps: int = 0
    failed: str = ""

    def __str__(self) -> str:
        if self.failed:
            return f"steps of small copies: {self.failed}"
        return (
            f"after {self.steps} {'step' if self.steps == 1 else 'steps'} of small copies, weights of shards and of "
            f"full tensors are {self.apart:.2g} apart, relative to their change"
        )


Options = list[dict[str, Any]]
ParameterKinds = dict[Tensor, ParameterKind]


_layouts = WeakIdKeyDictionary()
_known: dict[Hashable, Trial] = {}
_seen: WeakKeyDictionary[Optimizer, dict[Hashable, Trial]] = WeakKeyDictionary()
"""The trials so far of each optimizer, by the kinds of its options."""


def lay_out(parameter: Tensor, layout: Layout) -> None:
    """Record the sharding of a parameter, or of a shard of it."""
    _layouts[parameter] = layout


def tried(optimizer: Optimizer, with_closure: bool = False) -> Trial:
    """The trial of an optimizer's steps on shards. It is repeated where an option changes; for a number, only where it
    becomes 0 or ceases to be (a rate that is warmed up)."""
    options = _options(optimizer)
    key, known = (_kind(options), with_closure), _seen.setdefault(optimizer, {})
    if key not in known:
        known[key] = _known_trial(optimizer, options, with_closure)
    return known[key]


def _options(optimizer: Optimizer) -> Options:
    return [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]


def _kind(value: object) -> Hashable:
    """A key of an option value: numbers of one kind share it."""
    if type(value) in (int, float):
        return type(value), value == 0
    if isinstance(value, dict):
        return tuple([(name, _kind(each)) for name, each in value.items()])
    if isinstance(value, (tuple, list)):
        return tuple(map(_kind, value))
    return repr(value) if isinstance(value, PLAIN) else type(value).__name__


def _known_trial(optimizer: Optimizer, options: Options, with_closure: bool) -> Trial:
    groups = [{p: ParameterKind.of(p) for p in group["params"]} for group in optimizer.param_groups]
    device = next(p.device for group in groups for p in group)
    kinds = repr([list(dict.fromkeys(group.values())) for group in groups])
    key = type(optimizer), repr(_own(optimizer)), repr(options), kinds, device.type, with_closure
    if key not in _known:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # the optimizer itself gives them where it steps
                    _known[key] = _try(optimizer, options, groups, device, with_closure)
            except Exception as error:  # of somebody's optimizer, which may want what is not known here
                _known[key] = Trial(failed=f"{type(error).__name__}: {error}".splitlines()[0][:200])
    return _known[key]


def _try(
    optimizer: Optimizer, options: Options, groups: Sequence[ParameterKinds], device: torch.device, with_closure: bool
) -> Trial:
    generator = torch.Generator().manual_seed(0)
    kinds = [kind for group in groups for kind in dict.fromkeys(group.values())]
    drawn = [torch.randn((3, *kind.shape), dtype=kind.dtype, generator=generator).to(device) for kind in kinds]
    starts = [start for start, *_ in drawn]
    slopes = [(one + 0.5) * other.abs() for _, one, other in drawn]
    runs = [_Run(optimizer, options, groups, starts, sharded, with_closure) for sharded in (False, True)]
    for number in range(STEPS + 1):
        # in the last step one element of each gradient is infinite: who skips it, skips full tensors
        overflow = number == STEPS or runs[0].gradients > GRADIENTS
        late = number - STEPS + len(LATE)
        scale = 1.0 if overflow else SCALES[number % len(SCALES)] if late < 0 else LATE[late]
        grads = [slope.roll(number) * scale for slope in slopes]
        for grad in grads if overflow else ():
            grad.view(-1)[:1] = math.inf
        for run in runs:
            _seed(device, number)
            try:
                run.step(grads)
            except Exception:
                if overflow and run is runs[0]:  # as on one device
                    return Trial()
                raise
        for kind, start, (one,), shards in zip(kinds, starts, *(run.params for run in runs), strict=True):
            size, change = (float(t.detach().abs().max()) if t.numel() else 0.0 for t in (one, one - start))
            if not overflow and not math.isfinite(size):
                return Trial() if number else Trial(failed="the first of them gives weights that are not finite")
            near = {"rtol": CLOSE, "atol": CLOSE} if overflow else {"rtol": 0, "atol": CLOSE * change + ROUNDING * size}
            for ours, theirs in zip(shards, kind.shards(one), strict=True):
                if not torch.allclose(ours, theirs, **near, equal_nan=True):
                    error = math.inf if overflow or not change else float((ours - theirs).detach().abs().max()) / change
                    return Trial(error, kind.name, number + 1)
        if overflow:
            break
    return Trial()


def _seed(device: torch.device, seed: int) -> None:
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)


class _Run:
    """An optimizer of copies, in full or in shards."""

    def __init__(
        self,
        optimizer: Optimizer,
        options: Options,
        groups: Sequence[ParameterKinds],
        starts: Sequence[Tensor],
        sharded: bool,
        with_closure: bool,
    ) -> None:
        kinds = [kind for group in groups for kind in dict.fromkeys(group.values())]
        self._sharding = [kind.shards if sharded else lambda full: [full] for kind in kinds]
        self.params = [
            [nn.Parameter(p.clone()) for p in sharding(t)] for sharding, t in zip(self._sharding, starts, strict=True)
        ]
        memo: dict[int, Any] = {}
        remaining, given, names = iter(self.params), [], []
        for group in groups:
            copies = {kind: next(remaining) for kind in dict.fromkeys(group.values())}
            for p, kind in group.items():
                memo[id(p)] = copies[kind][0]
                for each in copies[kind]:
                    vars(each).update(marks_of(p))
            given.append([p for several in copies.values() for p in several])
            names.append([kind.name for kind, several in copies.items() for _ in several])
        self.optimizer = _made(optimizer, options, given, memo)
        for one, several in zip(self.optimizer.param_groups, names, strict=True):
            one |= {"param_names": several} if "param_names" in one else {}
        closure = inspect.signature(type(optimizer).step).parameters.get("closure")
        self.gradients = 0
        self._closure = with_closure or (closure is not None and closure.default is closure.empty)

    def step(self, grads: Sequence[Tensor]) -> None:
        """A step on a quadratic function of these gradients."""

        def gradient() -> Tensor:
            self.gradients += 1
            total: Tensor = torch.zeros((), dtype=torch.float64)
            for sharding, params, grad in zip(self._sharding, self.params, grads, strict=True):
                for p, shard in zip(params, sharding(grad), strict=True):
                    p.grad = torch.add(shard, p.detach(), alpha=1 / 16)
                    total = total + (p.detach().conj() * (p.grad + shard)).real.sum().cpu() / 2
            return total

        gradient()
        self.optimizer.step(*([gradient] if self._closure else []))  # type: ignore[arg-type]


def _own(optimizer: Optimizer) -> dict[str, Any]:
    """The attributes of an instance in plain data: options that are no defaults of a group."""
    own = {name: value for name, value in vars(optimizer).items() if name not in OF_TORCH and "hooks" not in name}
    return {name: value for name, value in own.items() if all(isinstance(v, PLAIN) for v in tree_leaves(value))}


def _made(
    optimizer: Optimizer, options: Options, given: Sequence[Sequence[nn.Parameter]], memo: Mapping[int, Any]
) -> Optimizer:
    """Another optimizer of the same class and options: made by its constructor, or where that wants what only its
    caller knows, a copy without states."""
    kind = type(optimizer)
    takes = inspect.signature(kind.__init__).parameters
    options = copy.deepcopy(options, dict(memo))
    groups = [{**each, "params": list(params)} for each, params in zip(options, given, strict=True)]
    known = {name: value for name, value in optimizer.defaults.items() if name in takes}
    unnamed = [{name: value for name, value in group.items() if name != "param_names"} for group in groups]
    try:
        made = kind(unnamed, **copy.deepcopy(known))
    except Exception:
        made = object.__new__(kind)
        own = {n: v for n, v in vars(optimizer).items() if n not in OF_TORCH and "hooks" not in n}
        vars(made).update(copy.deepcopy(own, {**memo, id(optimizer): made}))
        start = {"defaults": copy.deepcopy(optimizer.defaults), "state": defaultdict(dict), "param_groups": groups}
        Optimizer.__setstate__(made, start)
    else:
        vars(made).update(copy.deepcopy(_own(optimizer)))
        for group, each in zip(made.param_groups, groups, strict=True):
            group.update({name: value for name, value in each.items() if name != "params"})
    return made
