"""Checks that the weights of a source model are unchanged, and not mistaken for those of its parallel module.

    model.load_state_dict(...)        model.head.weight = tied        torch.optim.SGD(model.parameters(), lr).step()

Programs have weights of their own, and see none of these. A script that goes on with the source model's parameters
would train nothing and save untrained weights: an optimizer that steps them, and evaluating or saving the model after
the parallel module was trained, are errors too. Training or loading it for its own sake is fine.
"""

from __future__ import annotations

import copy
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from shardfx.ir.capture.data_dependent import stored
from shardfx.ir.errors import Error, ShardfxWarning
from shardfx.ir.shards import local_shard
from shardfx.module.model_state import ModelState
from shardfx.runtime.step import STORED
from shardfx.runtime.store import Store, version
from shardfx.runtime.verify.interface import without_content

_originals = WeakIdKeyDictionary()
"""The watch of each parameter of a model that is parallel, too."""
_hooks: list[Any] = []
_quiet: list[None] = []


@contextmanager
def unwatched() -> Iterator[None]:
    """Disable the checks: within, models may be read whatever became of them."""
    _quiet.append(None)
    try:
        yield
    finally:
        _quiet.pop()


class SourceModelWatch:
    """The state of a source model and of the parallel modules made of it; a hook of the model, queried when it is
    called or saved. A copy of the model has one that watches nothing. ``trainings`` grows where the model is trained
    itself."""

    def __init__(self) -> None:
        self._model: weakref.ref[nn.Module] | None = None
        self._stores: weakref.WeakKeyDictionary[Store, int] = weakref.WeakKeyDictionary()
        self._version, self.trainings = 0, 0

    def __deepcopy__(self, memo: dict[int, Any]) -> SourceModelWatch:
        return SourceModelWatch()

    def __reduce__(self) -> tuple[type[SourceModelWatch], tuple[()]]:
        return SourceModelWatch, ()

    def begin(self, model: nn.Module, store: Store) -> None:
        """Watch a model beside a store that was filled from it."""
        self._model = weakref.ref(model)
        self._stores[store] = _version_of(_shards(store))
        self._version = _version_of(model.parameters())
        for parameter in model.parameters():
            _originals[parameter] = self

    def __call__(self, module: nn.Module, *args: Any) -> None:
        """The module's forward pre-hook: a call is the beginning of a training of its own, or reads its weights."""
        if torch.compiler.is_compiling():
            return
        if not (module.training and torch.is_grad_enabled()):
            self._check(module, "model(...)")
        if module.training and not _quiet and self._model is not None and self._model() is module:
            self.trainings += 1

    def saving(self, module: nn.Module, *args: Any) -> None:
        """The module's state dict pre-hook."""
        self._check(module, "model.state_dict()")

    def _check(self, module: nn.Module, where: str) -> None:
        if _quiet or self._model is None or self._model() is not module:
            return
        now = _version_of(module.parameters())
        trained = [store for store, known in self._stores.items() if _version_of(_shards(store)) != known]
        if now != self._version:  # the model was trained or loaded since
            self._version = now
            self._stores.update({store: _version_of(_shards(store)) for store in trained})
        elif trained:
            raise Error(
                "the parallel module was trained, and the model that it was made of was not",
                where=where,
                expected="the trained weights",
                got="those from before parallelize",
                remedy="call and save pm; or model.load_state_dict(pm.full_state_dict()) first. The weights as they "
                "were: copy.deepcopy(model) before parallelize",
            )

    @property
    def gradients_elsewhere(self) -> bool:
        """Whether a parallel module of the model has gradients."""
        return any(p.grad is not None for store in self._stores for p in _shards(store))


def _shards(store: Store) -> Iterator[torch.Tensor]:
    return iter(store.parameters.values())


def _version_of(parameters: Iterable[torch.Tensor]) -> int:
    """The number of in-place writes to any of these."""
    return sum(map(version, parameters))


def watch_original(model: nn.Module) -> SourceModelWatch:
    """The watch of a source model, which is hooked before it is traced: guards compare hooks."""
    watch = next((hook for hook in model._forward_pre_hooks.values() if isinstance(hook, SourceModelWatch)), None)
    if watch is None or (watch._model is not None and watch._model() is not model):
        watch = SourceModelWatch()
        model.register_forward_pre_hook(watch)
        model.register_state_dict_pre_hook(watch.saving)
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_before_step))
    return watch


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Check an optimizer's step: one made before ``parallelize`` has the model's parameters, which get no gradient."""
    old = [p for group in optimizer.param_groups for p in group["params"] if p in _originals]
    if not old:
        return
    if any(p.grad is not None and bool(p.grad.any()) for p in old):
        for p in old:
            _originals[p].trainings += 1
        return
    if _originals[old[0]].gradients_elsewhere:
        kind = type(optimizer).__name__
        raise Error(
            f"this {kind} has the parameters of the model, and gradients are those of the parallel module's",
            where=f"{kind}.step()",
            expected="an optimizer of pm.parameters()",
            got=f"{len(old)} parameters of the model from before parallelize, without a gradient",
            remedy="parallelize(model, mesh, hints, optimizer=optimizer) carries it over; or make it afterwards",
        )


REMEDY = (
    "load them into pm: pm.load_full_state_dict(model.state_dict()); a model that is to go its own way is a copy: "
    "parallelize(copy.deepcopy(model), mesh, hints)"
)


class SourceWeightsCheck:
    """A snapshot of a source model's weights when they last were those of a parallel module of it.

    Args:
        state: the parallel module's.
        watch: knows whether the model is trained itself.
    """

    def __init__(self, model: nn.Module, state: ModelState, watch: SourceModelWatch) -> None:
        self._model: Callable[[], nn.Module | None] = weakref.ref(model)
        self._state, self._watch = state, watch
        self._trainings = watch.trainings
        self._buffers = {name for name, _ in model.named_buffers()}  # calls may add others
        self._note(model)

    def __deepcopy__(self, memo: object) -> SourceWeightsCheck:
        made = copy.copy(self)
        made._model = lambda: None  # a copy of the parallel module was not made of the model
        return made

    def _note(self, model: nn.Module) -> None:
        parameters = [*model.parameters()]
        buffers = [each for name, each in model.named_buffers() if name in self._buffers]
        self._parameters = [*map(weakref.ref, parameters)]
        self._plain = [weakref.ref(each) for each in (*parameters, *buffers) if _is_plain(each)]
        self._trained, self._known = [p.requires_grad for p in parameters], _content(self._plain)
        self._written = _version_of(_shards(self._state.store))

    def check(self) -> None:
        """Raise if the weights have changed, and are not those of the parallel module. What was frozen or unfrozen is
        so in the parallel module, too; a model of which all is frozen is a teacher.

        Raises:
            Error: naming the first one.
        """
        model = self._model()
        if model is None or self._watch.trainings != self._trainings:
            return
        trained = [p is not None and p.requires_grad for p in (each() for each in self._parameters)]
        if trained != self._trained and any(trained):
            self._freeze(model)
            self._trained = trained
        if _content(self._plain) != self._known:
            if (other := next(self._others(model), None)) is not None:
                self._report(other)
            self._note(model)

    def _freeze(self, model: nn.Module) -> None:
        """Freeze and unfreeze the parallel module's parameters as the model's are."""
        store = self._state.store
        for name, parameter in model.named_parameters():
            known = self._state.aliases.get(name, name)
            if known in store.parameters:
                store.parameters[known].requires_grad_(parameter.requires_grad)
            elif (known in store.trained_elsewhere) != parameter.requires_grad:
                store.trained_elsewhere ^= {known}

    def _report(self, other: str) -> None:
        if _version_of(_shards(self._state.store)) == self._written:
            raise Error(
                "the model's weights were changed after parallelize, and the parallel module has those from before",
                where="pm(...)",
                expected="weights as they were when it was parallelized, or those of pm",
                got=f"another {other!r}",
                remedy=REMEDY,
            )
        warnings.warn(
            "the model was given weights that are not those of the parallel module, which goes on with its own "
            f"(another {other!r}); if they are meant for it, {REMEDY}",
            ShardfxWarning,
            stacklevel=2,
        )

    def _others(self, model: nn.Module) -> Iterator[str]:
        """The names of weights that differ from the parallel module's."""
        state, store, graph = self._state, self._state.store, self._state.compiled.after
        store.refresh()
        full = {
            state.aliases.get(name, name): (name, tensor.detach())
            for name, tensor in stored(model).items()
            if not without_content(tensor)
        }
        for inp in graph.inputs:
            if inp.kind not in STORED or inp.name not in full or not store.is_here(inp.name):
                continue
            (name, tensor), type_, spec = full[inp.name], inp.value.type, inp.value.spec
            if spec is None or (tuple(tensor.shape), tensor.dtype) != (type_.shape, type_.dtype):
                continue
            for rank in range(graph.mesh.size) if store.rank is None else (store.rank,):
                shard = store.shard(inp.name, rank).detach()
                if not same(shard, local_shard(tensor, spec, graph.mesh, rank).to(shard.device)):
                    yield name
                    break


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are equal, NaN where NaN is."""
    return one.shape == other.shape and bool(((one == other) | ((one != one) & (other != other))).all())


def _content(tensors: Iterable[weakref.ref[torch.Tensor]]) -> list[object]:
    """A fingerprint of tensors: versions, addresses, and two elements, as writes by ``p.data`` count nowhere."""
    here = [tensor for ref in tensors if (tensor := ref()) is not None]
    some = [each for each in (*here[:1], *here[-1:]) if each.numel() and each.device.type == "cpu"]
    values = [str(each.detach()[tuple(n // 2 for n in each.shape)].item()) for each in some]
    return [[each._version for each in here], [each.data_ptr() for each in here], *values]


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether it has storage, and a version counter."""
    known = type(tensor) in (torch.Tensor, nn.Parameter, nn.Buffer) and tensor.layout is torch.strided
    return known and not tensor.is_meta and not tensor.is_inference()
