"""Hooks on ``torch.optim`` optimizers: steps of local shards, and norms of gradients over all ranks.

Under ``torchrun`` sharded parameters are DTensors. To an elementwise optimizer of torch they are nothing but elements,
and DTensor's dispatch of each op costs more than the op: a copy of the optimizer steps the local shards in the same
memory, and its states are wrapped as DTensors again. Optimizers that look at full tensors, those of others, gradients
of other placements, hooks and closures go through DTensor. ``SparseAdam`` gets sparse gradients so, on virtual ranks
too (:mod:`.sparse_steps`).

``torch.nn.utils.clip_grad_norm_`` gets the norm over all ranks and stages.
"""

from __future__ import annotations

import functools
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn import utils
from torch.nn.utils import clip_grad
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from shardfx.ir.errors import Error
from shardfx.module.program_optimizer import ProgramOptimizer
from shardfx.module.sparse_steps import reject_closure, sparse_gradient_of, takes_rows
from shardfx.runtime.store import Store, with_strides_of

if TYPE_CHECKING:
    from shardfx.runtime.distributed.dtensor_shard import DTensorShard

Tensor = torch.Tensor

Norm = Callable[[Mapping[str, Tensor], float], Tensor]
"""The norm of gradients by name, of which each rank gives its own."""


class StoredParameter(NamedTuple):
    """What is known of a stored parameter: its name, whether a program steps it; on real ranks the DTensor view of its
    shard, if it is sharded, and the norm of its gradient with others."""

    name: str
    is_stepped: bool
    shown: DTensorShard | None
    norm: Callable[[], Norm | None] | None


_stored: WeakIdKeyDictionary = WeakIdKeyDictionary()
_hooks: list[Any] = []
_torch_norm: list[Any] = []
_local_steps: WeakKeyDictionary[Optimizer, tuple[Optimizer, dict[Tensor, Tensor]]] = WeakKeyDictionary()
"""While an optimizer steps: its copy on local shards, and the local shard of each parameter."""
ELEMENTWISE = frozenset("SGD Adam AdamW NAdam RAdam Adamax Adagrad Adadelta RMSprop Rprop ASGD".split())
"""The optimizers of torch whose step of an element depends on that element alone."""


def watch_parameters(store: Store, stepped: Collection[str], norm: Norm) -> None:
    """Hook optimizers of a store's parameters: of DTensors, whose local shards are stepped; and of what the program
    steps (the names ``stepped``). On real ranks torch computes norms of their gradients by ``norm``, a method of their
    owner."""
    owner = weakref.WeakMethod(norm) if store.rank is not None else None
    for name, parameter in store.parameters.items():
        _stored[parameter] = StoredParameter(name, name in stepped, store.shown(name), owner)
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_before_step))
        _hooks.append(register_optimizer_step_post_hook(_after_step))
    if owner is not None and not _torch_norm:
        inside: Any = clip_grad
        _torch_norm.append(inside._get_total_norm)
        inside._get_total_norm = utils.get_total_norm = functools.wraps(_torch_norm[0])(_total_norm)


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """The parameters of all groups."""
    return [p for group in optimizer.param_groups for p in group["params"]]


@torch._disable_dynamo
def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
    if isinstance(optimizer, ProgramOptimizer):  # which says itself that it is a part of the program
        return None
    parameters = parameters_of(optimizer)
    stored = [_stored[p] for p in parameters if p in _stored]
    if any(each.is_stepped for each in stored):
        raise Error(
            f"{type(optimizer).__name__} steps parameters that have an optimizer in the program",
            where=f"{type(optimizer).__name__}.step()",
            expected="pm.step(x, y)",
            got="a second optimizer of the same parameters",
            remedy="leave it out; or leave Hints(optimizer=...) out, and go on as with any module",
        )
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if stored and takes_rows(optimizer):
        reject_closure(closure)
        return _begin_local_step(optimizer, args, kwargs)
    if closure is None and any(each.shown is not None for each in stored) and _may_step_locally(optimizer):
        return _begin_local_step(optimizer, args, kwargs)
    return None


@torch._disable_dynamo
def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    twin, local = _local_steps.pop(optimizer, (None, {}))
    if twin is not None and args[0] is twin:
        _end_local_step(optimizer, twin, local)


# ---- the local shard of a DTensor


def _may_step_locally(optimizer: Optimizer) -> bool:
    """Whether an optimizer's step is known to be elementwise."""
    if torch.compiler.is_compiling() or optimizer._optimizer_step_pre_hooks:
        return False
    step = type(optimizer).step
    own = step.__module__.startswith("torch.optim.") and step.__qualname__.partition(".")[0] in ELEMENTWISE
    return own and not any(group.get("differentiable") for group in optimizer.param_groups)


def _begin_local_step(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
    """Step a copy of the optimizer on local shards instead; itself where a tensor is placed otherwise than its
    parameter."""
    local: dict[Tensor, Tensor] = {}
    state: defaultdict[Tensor, dict[str, Any]] = defaultdict(dict, optimizer.state)
    by_rows = takes_rows(optimizer)
    stored = ((p, _stored[p]) for p in parameters_of(optimizer) if p in _stored)
    for p, (name, _, shown, _) in ((p, known) for p, known in stored if known.shown is not None or by_rows):
        known = state.pop(p, {})
        if any(isinstance(each, Tensor) and _local(shown, each) is None for each in (p, p.grad, *known.values())):
            return None
        shard = _local(shown, p)
        local[p] = own = nn.Parameter(shard, requires_grad=p.requires_grad)
        if p.grad is not None:
            grad = with_strides_of(_local(shown, p.grad), shard)
            own.grad = sparse_gradient_of(p, grad, name) if by_rows else grad
        state[own] = {key: _local(shown, value) for key, value in known.items()}
    twin = object.__new__(type(optimizer))
    groups = [{**group, "params": [local.get(p, p) for p in group["params"]]} for group in optimizer.param_groups]
    twin.__dict__.update({**optimizer.__dict__, "param_groups": groups, "state": state})
    _local_steps[optimizer] = twin, local
    return (twin, *args[1:]), kwargs


def _end_local_step(optimizer: Optimizer, twin: Optimizer, local: Mapping[Tensor, Tensor]) -> None:
    """Copy states and options back, states placed as their parameters are."""
    for p, own in local.items():
        current, shown = optimizer.state[p], _stored[p].shown
        for key, new in twin.state.pop(own, {}).items():
            if key not in current or _local(shown, current[key]) is not new:
                alike = isinstance(new, Tensor) and new.dim() and new.shape == own.shape
                current[key] = shown.wrap(new) if alike and shown is not None else new
    optimizer.state.update(twin.state)
    for group, made in zip(optimizer.param_groups, twin.param_groups, strict=True):
        group.update({key: value for key, value in made.items() if key != "params"})


def _local(shown: DTensorShard | None, value: Any) -> Any:
    """A tensor of a parameter as one of its local shard; anything else as it is."""
    return shown.plain(value) if isinstance(value, Tensor) and shown is not None else value


# ---- norms


def _total_norm(
    tensors: Tensor | Iterable[Tensor],
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    grads = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    known = {id(p.grad): stored for p, stored in _stored.items() if stored.norm and p.grad is not None}
    mine: dict[str, Tensor] = {}
    for grad in grads:
        if id(grad) in known:
            name, _, _, norm = known[id(grad)]
            mine[name] = grad
    rest = [grad for grad in grads if id(grad) not in known]
    if not mine:
        total: Tensor = _torch_norm[0](grads, norm_type, error_if_nonfinite, foreach)
        return total
    total = norm()(mine, float(norm_type))
    if rest:
        total = torch.linalg.vector_norm(torch.stack([total, _torch_norm[0](rest, norm_type).to(total)]), norm_type)
    if error_if_nonfinite and not bool(total.isfinite()):
        raise RuntimeError("the total norm of the gradients is not finite, so it cannot be clipped")
    return total
