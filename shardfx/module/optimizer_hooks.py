"""Hooks on ``torch.optim`` optimizers of sharded parameters: refusal, local steps, and norms of gradients.

An optimizer that needs the full tensor (Adafactor, Muon, LAMB) computes something else on shards. Whether it does is
found by running it (see :mod:`.elementwise_trial`); one that gives other weights, or cannot be tried, is an Error.

Under ``torchrun`` sharded parameters are DTensors. To an elementwise optimizer of torch they are nothing but elements,
and DTensor's dispatch of each op costs more than the op: a :class:`LocalOptimizer` steps the local shards in the same
memory, and its states are wrapped as DTensors again. Optimizers of others, gradients of other placements, hooks and
closures go through DTensor.

In a pipeline ``clip_grad_norm_`` would clip each stage by a norm of its own: it gets that over all ranks instead.
"""

from __future__ import annotations

import functools
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn import utils
from torch.nn.utils import clip_grad
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from shardfx.ir.errors import Error
from shardfx.module.elementwise_trial import Layout, lay_out, tried
from shardfx.module.program_optimizer import ProgramOptimizer
from shardfx.runtime.store import Store, with_strides_of
from shardfx.runtime.virtual.shard_gradient import ShardGradient, check_all_shards, plain

if TYPE_CHECKING:
    from shardfx.runtime.distributed.dtensor_shard import DTensorShard

Tensor = torch.Tensor


def watch_optimizers(store: Store, layouts: Mapping[str, Layout], stepped: Collection[str] = ()) -> None:
    """Hook optimizers of a store's parameters: of shards, which are sharded by ``layouts``; of DTensors, whose local
    shards are stepped; and of what the program steps (the names ``stepped``)."""
    for name, shards in store.parameters.items():
        _stepped.update(dict.fromkeys(shards if name in stepped else (), True))
        shown = store.shown(name)
        for shard in shards:
            lay_out(shard, layouts[name])
            if len(shards) > 1:
                _shards[shard] = name
            if shown is not None:
                _shown[shard] = shown
    if (_shards or _shown or stepped) and not _hooks:
        for before, after in ((_before_step, _after_step), (_begin_local_step, _end_local_step)):
            _hooks.append(register_optimizer_step_pre_hook(before))
            _hooks.append(register_optimizer_step_post_hook(after))


_hooks: list[Any] = []
_guarded: WeakKeyDictionary[torch.optim.Optimizer, list[Any]] = WeakKeyDictionary()
"""The gradients that an optimizer does not see while it steps: of each parameter its own, and what is there instead."""
_shards = WeakIdKeyDictionary()
"""The parameters that are shards, by their names in the model."""
_stepped = WeakIdKeyDictionary()
"""The parameters that a program steps."""


@torch._disable_dynamo
def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
    if isinstance(optimizer, ProgramOptimizer):  # which says itself that it is a part of the program
        return None
    reject_stepped(optimizer)
    shard = next((p for group in optimizer.param_groups for p in group["params"] if p in _shards), None)
    if shard is None:
        return None
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    found = tried(optimizer, closure is not None)
    if found.apart or found.failed:
        kind, name = type(optimizer).__name__, found.name or _shards[shard]
        raise Error(
            f"{kind} looks at full tensors, and {name!r} is sharded here"
            if found.apart
            else f"{kind} cannot be tried on shards, and {name!r} is sharded here",
            where=f"{kind}.step()",
            expected="an optimizer that works on each element alone, such as AdamW",
            got=found,
            remedy="Hints(optimizer=...), whose step is a part of the program and sees full tensors; or leave these "
            "parameters unsharded; or run under torchrun, where parameters are DTensors",
        )
    _guarded[optimizer] = []
    _take_plain(optimizer)
    if closure is None:
        return None

    def computed(*args: Any, **more: Any) -> Any:
        loss = closure(*args, **more)
        _take_plain(optimizer)
        return loss

    if "closure" in kwargs:
        return args, {**kwargs, "closure": computed}
    return (args[0], computed, *args[2:]), kwargs


def _take_plain(optimizer: torch.optim.Optimizer) -> None:
    """Give an optimizer plain gradients.

    Raises:
        Error: only some shards of a parameter have one.
    """
    where = f"{type(optimizer).__name__}.step()"
    params = [p for group in optimizer.param_groups for p in group["params"] if isinstance(p.grad, ShardGradient)]
    check_all_shards([p.grad for p in params], where)
    for p in params:
        _guarded[optimizer].append((p, p.grad, plain(p.grad)))
        p.grad = _guarded[optimizer][-1][2]


@torch._disable_dynamo
def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for p, guarded, taken in _guarded.pop(optimizer, ()):
        if p.grad is taken:
            p.grad = guarded


def reject_stepped(optimizer: torch.optim.Optimizer) -> None:
    """Raise if an optimizer steps parameters that the program steps.

    Raises:
        Error: it does.
    """
    for group in optimizer.param_groups:
        if not isinstance(optimizer, ProgramOptimizer) and any(p in _stepped for p in group["params"]):
            raise Error(
                f"{type(optimizer).__name__} steps parameters that have an optimizer in the program",
                where=f"{type(optimizer).__name__}.step()",
                expected="pm.step(x, y)",
                got="a second optimizer of the same parameters",
                remedy="leave it out; or leave Hints(optimizer=...) out, and go on as with any module",
            )


_shown = WeakIdKeyDictionary()
"""The user-facing view of each parameter's shard."""
_twins: WeakKeyDictionary[torch.optim.Optimizer, LocalOptimizer] = WeakKeyDictionary()


class _OtherPlacement(Exception):
    """A tensor that is placed otherwise than its parameter."""


class LocalOptimizer:
    """Steps an optimizer on local shards. Parameters that are not sharded are the optimizer's own."""

    def __init__(self, kind: type[torch.optim.Optimizer]) -> None:
        self.optimizer = object.__new__(kind)
        self._known: dict[Tensor, tuple[DTensorShard, Tensor, nn.Parameter]] = {}
        """For each parameter that is a view of a shard: the view, that shard, and the shard as a parameter."""
        self._state: defaultdict[Tensor, dict[str, Any]] = defaultdict(dict)

    def begin(self, optimizer: torch.optim.Optimizer) -> None:
        """Copy the optimizer's options and states to the twin.

        Raises:
            _OtherPlacement: it cannot be.
        """
        self._state.clear()
        groups = [{**group, "params": [self._own(p) for p in group["params"]]} for group in optimizer.param_groups]
        for p, (shown, shard, own) in self._known.items():
            own.grad = None if p.grad is None else with_strides_of(_shard(shown, p.grad), shard)
            if current := optimizer.state.get(p):
                self._state[own] = {key: _plain(shown, value) for key, value in current.items()}
        others = {p: current for p, current in optimizer.state.items() if p not in self._known}
        self._state.update(others)
        self.optimizer.__dict__.update({**optimizer.__dict__, "param_groups": groups, "state": self._state})

    def end(self, optimizer: torch.optim.Optimizer) -> None:
        """Copy the twin's states and options back after a step, states placed as their parameters are."""
        for p, (shown, shard, own) in self._known.items():
            own.grad = None
            for key, new in self._state.pop(own, {}).items():
                current = optimizer.state[p]
                if key not in current or _plain(shown, current[key]) is not new:
                    current[key] = _as_shown(shown, shard, new)
        optimizer.state.update(self._state)
        for group, made in zip(optimizer.param_groups, self.optimizer.param_groups, strict=True):
            group.update({key: value for key, value in made.items() if key != "params"})
        self.optimizer.__dict__.clear()

    def _own(self, p: Tensor) -> Tensor:
        known = self._known.get(p)
        shown = known[0] if known is not None else _shown.get(p)
        if shown is None:
            return p
        shard = _shard(shown, p)
        if known is None or known[1] is not shard:
            known = self._known[p] = shown, shard, nn.Parameter(shard, requires_grad=p.requires_grad)
        return known[2]


def _shard(shown: DTensorShard, tensor: Tensor) -> Tensor:
    """The local shard of a shown parameter.

    Raises:
        _OtherPlacement: it is placed otherwise.
    """
    shard = shown.plain(tensor)
    if shard is None:
        raise _OtherPlacement
    return shard


def _plain(shown: DTensorShard, value: Any) -> Any:
    """An optimizer state of a parameter, as one of its shard."""
    return _shard(shown, value) if isinstance(value, Tensor) else value


def _as_shown(shown: DTensorShard, shard: Tensor, value: Any) -> Any:
    """An optimizer state of a shard, as one of its parameter."""
    alike = isinstance(value, Tensor) and value.dim() and value.shape == shard.shape
    return shown.wrap(value) if alike else value


def _begin_local_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
    computes = kwargs.get("closure") is not None or any(each is not None for each in args[1:])
    shown = any(p in _shown for group in optimizer.param_groups for p in group["params"])
    if computes or not shown or not _may(optimizer):
        return None
    twin = _twins.setdefault(optimizer, LocalOptimizer(type(optimizer)))
    try:
        twin.begin(optimizer)
    except _OtherPlacement:
        return None
    return (twin.optimizer, *args[1:]), kwargs


def _may(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer's step is known to be elementwise, so that it may run on shards."""
    if torch.compiler.is_compiling() or optimizer._optimizer_step_pre_hooks:
        return False
    own = type(optimizer).step.__module__.startswith("torch.optim.")
    if not own or any(group.get("differentiable") for group in optimizer.param_groups):
        return False
    trial = tried(optimizer)
    return not (trial.apart or trial.failed)


def _end_local_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    twin = _twins.get(optimizer)
    if twin is not None and args[0] is twin.optimizer:
        twin.end(optimizer)


Norm = Callable[[Mapping[str, Sequence[Tensor]], float], Tensor]
"""The norm of gradients by name, of which each rank gives its own."""
_staged = WeakIdKeyDictionary()
"""The norm function and the name of each parameter of a stage."""
_taken: list[Any] = []


def gradients_here(store: Store) -> dict[str, list[Tensor]]:
    """The sharded gradients in this process."""
    every = {name: [plain(p.grad) for p in shards if p.grad is not None] for name, shards in store.parameters.items()}
    return {name: grads for name, grads in every.items() if grads}


def clip(total: Tensor, grads: Mapping[str, Sequence[Tensor]], max_norm: float) -> None:
    """Clip gradients by norm, as torch does."""
    scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    with torch.no_grad():
        for grad in (grad for shards in grads.values() for grad in shards):
            grad.mul_(scale.to(grad.device))


def watch_norms(store: Store, norm: Norm) -> None:
    """Have torch compute norms of these parameters' gradients by ``norm``, a method of their owner."""
    owner = weakref.WeakMethod(norm)
    _staged.update({shard: (owner, name) for name, shards in store.parameters.items() for shard in shards})
    if not _taken:
        inside: Any = clip_grad
        _taken.append(inside._get_total_norm)
        inside._get_total_norm = utils.get_total_norm = functools.wraps(_taken[0])(_total_norm)


def _total_norm(
    tensors: Tensor | Iterable[Tensor],
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    grads = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    known = {id(p.grad): staged for p, staged in _staged.items() if p.grad is not None}
    owner = next((known[id(grad)][0]() for grad in grads if id(grad) in known), None)
    if owner is None:
        made: Tensor = _taken[0](grads, norm_type, error_if_nonfinite, foreach)
        return made
    mine: dict[str, list[Tensor]] = {}
    for grad in grads:
        if id(grad) in known:
            mine.setdefault(known[id(grad)][1], []).append(grad)
    rest = [grad for grad in grads if id(grad) not in known]
    total: Tensor = owner(mine, float(norm_type))
    if rest:
        total = torch.linalg.vector_norm(torch.stack([total, _taken[0](rest, norm_type).to(total)]), norm_type)
    return checked(total, error_if_nonfinite)


def checked(total: Tensor, error_if_nonfinite: bool) -> Tensor:
    """The norm.

    Raises:
        RuntimeError: it is not finite, as torch has it.
    """
    if error_if_nonfinite and not bool(total.isfinite()):
        raise RuntimeError("the total norm of the gradients is not finite, so it cannot be clipped")
    return total
