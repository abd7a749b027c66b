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


@dataclass(frozen=True)
class ParameterKind:
    """Properties of a parameter that an optimizer may depend on, in a small copy; ``name`` is that of one such."""

    shape: tuple[int, ...]
    counts: tuple[int, ...]
    dtype: torch.dtype
    marked: str
    name: str = field(compare=False)
    marks: Mapping[str, Any] = field(compare=False)

    @staticmethod
    def of(parameter: Tensor) -> ParameterKind:
        """The kind of a parameter, which may be a shard, or not sharded at all."""
        layout = _layouts.get(parameter) or Layout("", tuple(parameter.shape), (1,) * parameter.dim())
        counts, shape = list(layout.counts), list(layout.shape)
        most = MOST if math.prod(counts) > 1 else 64
        while math.prod(counts) > SHARDS:
            widest = counts.index(max(counts))
            counts[widest] = (counts[widest] + 1) // 2
        while math.prod(shape) > most:
            sizes = zip(shape, counts, strict=True)
            halves = [size // 2 if size > 16 and size // 2 >= count else size for size, count in sizes]
            if halves == shape:
                break
            shape = halves
        dtype, marks = torch.complex128 if parameter.is_complex() else torch.float64, marks_of(parameter)
        return ParameterKind(tuple(shape), tuple(counts), dtype, repr(sorted(marks.items())), layout.name, marks)

    def shards(self, full: Tensor) -> list[Tensor]:
        """The shards of a copy."""
        found = [full]
        for dim, count in enumerate(self.counts):
            found = [shard for each in found for shard in each.tensor_split(count, dim)]
        return found

    def copies(self, start: Tensor, sharded: bool) -> list[nn.Parameter]:
        """A copy as parameters, one or several shards."""
        made = [nn.Parameter(each.clone()) for each in (self.shards(start) if sharded else [start])]
        for each in made:
            vars(each).update(self.marks)
        return made


@dataclass(frozen=True)
class TrialFailure:
    """Why an optimizer must not step shards: the parameter of which they get other weights; or it cannot be tried."""

    name: str
    why: str
    failed: bool = False


Kinds = Sequence[Sequence[ParameterKind]]
"""The distinct kinds of parameters of each group."""
_layouts = WeakIdKeyDictionary()
_tried: WeakKeyDictionary[Optimizer, dict[Hashable, TrialFailure | None]] = WeakKeyDictionary()
"""The trials so far of each optimizer, by the kinds of its options."""


def lay_out(parameter: Tensor, layout: Layout) -> None:
    """Record the sharding of a parameter, or of a shard of it."""
    _layouts[parameter] = layout


def tried(optimizer: Optimizer, with_closure: bool = False) -> TrialFailure | None:
    """The trial of an optimizer's steps on shards; None: it is right. It is repeated where an option changes; for a
    number, only where it becomes 0 or ceases to be (a rate that is warmed up)."""
    options = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    key, known = (_kind(options), with_closure), _tried.setdefault(optimizer, {})
    if key not in known:
        kinds = [list({ParameterKind.of(p): None for p in group["params"]}) for group in optimizer.param_groups]
        device = next(p.device for group in optimizer.param_groups for p in group["params"])
        with torch.random.fork_rng([device] if device.type == "cuda" else []), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the optimizer itself gives them where it steps
            try:
                known[key] = _try(optimizer, kinds, device, with_closure)
            except Exception as error:  # of somebody's optimizer, which may want what is not known here
                text = f"{type(error).__name__}: {error}".splitlines()[0][:200]
                known[key] = TrialFailure("", f"steps of small copies: {text}", failed=True)
    return known[key]


def _kind(value: object) -> Hashable:
    """A key of an option value: numbers of one kind share it."""
    if type(value) in (int, float):
        return type(value), value == 0
    if isinstance(value, dict):
        return tuple([(name, _kind(each)) for name, each in value.items()])
    if isinstance(value, (tuple, list)):
        return tuple(map(_kind, value))
    return repr(value) if isinstance(value, PLAIN) else type(value).__name__


def _try(optimizer: Optimizer, groups: Kinds, device: torch.device, with_closure: bool) -> TrialFailure | None:
    generator = torch.Generator().manual_seed(0)
    kinds = [kind for group in groups for kind in group]
    drawn = [torch.randn((3, *kind.shape), dtype=kind.dtype, generator=generator).to(device) for kind in kinds]
    starts = [start for start, *_ in drawn]
    slopes = [(one + 0.5) * other.abs() for _, one, other in drawn]
    full, split = (_Run(optimizer, groups, starts, sharded, with_closure) for sharded in (False, True))
    for number in range(STEPS + 1):
        # in the last step one element of each gradient is infinite: who skips it, skips full tensors
        overflow = number == STEPS or full.gradients > GRADIENTS
        late = number - STEPS + len(LATE)
        scale = 1.0 if overflow else SCALES[number % len(SCALES)] if late < 0 else LATE[late]
        grads = [slope.roll(number) * scale for slope in slopes]
        for grad in grads if overflow else ():
            grad.view(-1)[:1] = math.inf
        for run in (full, split):
            _seed(device, number)
            try:
                run.step(grads)
            except Exception:
                if overflow and run is full:  # as on one device
                    return None
                raise
        for kind, start, (one,), shards in zip(kinds, starts, full.params, split.params, strict=True):
            size, change = (float(t.detach().abs().max()) if t.numel() else 0.0 for t in (one, one - start))
            if not overflow and not math.isfinite(size):
                return (
                    None
                    if number
                    else TrialFailure("", "the first step gives weights that are not finite", failed=True)
                )
            near = {"rtol": CLOSE, "atol": CLOSE} if overflow else {"rtol": 0, "atol": CLOSE * change + ROUNDING * size}
            for ours, theirs in zip(shards, kind.shards(one), strict=True):
                if not torch.allclose(ours, theirs, **near, equal_nan=True):
                    apart = float((ours - theirs).detach().abs().max())
                    said = f"up to {apart:.2g} apart, and changed by {change:.2g}"
                    why = f"after {number + 1} steps of small copies, weights of shards and of full tensors are {said}"
                    return TrialFailure(kind.name, why)
        if overflow:
            break
    return None


def _seed(device: torch.device, seed: int) -> None:
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)


class _Run:
    """An optimizer of copies, in full or in shards."""

    def __init__(
        self, optimizer: Optimizer, kinds: Kinds, starts: Sequence[Tensor], sharded: bool, with_closure: bool
    ) -> None:
        remaining, self.params, groups = iter(starts), list[list[nn.Parameter]](), []
        for group, its in zip(optimizer.param_groups, kinds, strict=True):
            copies = [kind.copies(next(remaining), sharded) for kind in its]
            options = copy.deepcopy({name: value for name, value in group.items() if name != "params"})
            if "param_names" in options:
                options["param_names"] = [kind.name for kind, several in zip(its, copies, strict=True) for _ in several]
            groups.append({**options, "params": [p for several in copies for p in several]})
            self.params += copies
        self._sharding = [kind.shards if sharded else lambda full: [full] for group in kinds for kind in group]
        self.optimizer = _made(optimizer, groups)
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


def _made(optimizer: Optimizer, groups: Sequence[dict[str, Any]]) -> Optimizer:
    """Another optimizer of the same class and options, with the plain data of the instance: made by its constructor, or
    without where that wants what only its caller knows."""
    kind, given = type(optimizer), [{**group} for group in groups]
    takes = inspect.signature(kind.__init__).parameters
    own = {name: value for name, value in vars(optimizer).items() if name not in OF_TORCH and "hooks" not in name}
    own = {name: value for name, value in own.items() if all(map(_is_data, tree_leaves(value)))}
    try:
        made = kind(given, **copy.deepcopy({n: value for n, value in optimizer.defaults.items() if n in takes}))
    except Exception:
        made = object.__new__(kind)
        start = {"defaults": copy.deepcopy(optimizer.defaults), "state": defaultdict(dict), "param_groups": groups}
        Optimizer.__setstate__(made, start)
    vars(made).update(copy.deepcopy(own))
    for group, each in zip(made.param_groups, groups, strict=True):
        group.update({name: value for name, value in each.items() if name != "params"})
    return made


def _is_data(value: object) -> bool:
    return isinstance(value, PLAIN) or type(value) is Tensor
