"""The model that a parallel module was made of: its own parameters stay as they are.

A script that goes on with them would train nothing and save untrained weights. So an optimizer that steps them in the
place of the parallel module's is an error, and so is evaluating or saving the model after the parallel module was
trained, while the model was not.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from shardfx.ir.errors import Error
from shardfx.runtime.store import Store, version

_originals = WeakIdKeyDictionary()
"""The watch of each parameter of a model that is parallel, too."""
_hooks: list[Any] = []
_quiet: list[None] = []


@contextmanager
def unwatched() -> Iterator[None]:
    """Within, models may be read whatever became of them."""
    _quiet.append(None)
    try:
        yield
    finally:
        _quiet.pop()


class Watch:
    """What became of a model and of the parallel modules that were made of it; a hook of the model, to be asked when
    it is called or saved. A copy of the model has one that watches nothing. ``trainings`` grows where
    the model is trained itself."""

    def __init__(self) -> None:
        self._model: weakref.ref[nn.Module] | None = None
        self._stores: weakref.WeakKeyDictionary[Store, int] = weakref.WeakKeyDictionary()
        self._version, self.trainings = 0, 0

    def __deepcopy__(self, memo: dict[int, Any]) -> Watch:
        return Watch()

    def __reduce__(self) -> tuple[type[Watch], tuple[()]]:
        return Watch, ()

    def begin(self, model: nn.Module, store: Store) -> None:
        """Watch a model beside a store that was filled from it."""
        self._model = weakref.ref(model)
        self._stores[store] = _version_of(store.parameters)
        self._version = _version_of({"": list(model.parameters())})
        for parameter in model.parameters():
            _originals[parameter] = self

    def __call__(self, module: nn.Module, *given: Any) -> None:
        """The module's forward pre-hook: a call is the beginning of a training of its own, or reads its weights."""
        if not torch.compiler.is_compiling() and not (module.training and torch.is_grad_enabled()):
            self._check(module, "model(...)")
        if module.training and not _quiet and self._model is not None and self._model() is module:
            self.trainings += 1

    def saving(self, module: nn.Module, *given: Any) -> None:
        """The module's state dict pre-hook."""
        self._check(module, "model.state_dict()")

    def _check(self, module: nn.Module, where: str) -> None:
        if _quiet or self._model is None or self._model() is not module:
            return
        now = _version_of({"": list(module.parameters())})
        trained = [store for store, known in self._stores.items() if _version_of(store.parameters) != known]
        if now != self._version:  # the model was trained or loaded since
            self._version = now
            self._stores.update({store: _version_of(store.parameters) for store in trained})
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
    def stepped_elsewhere(self) -> bool:
        """Whether a parallel module of the model has gradients to be stepped by."""
        every = (p for store in self._stores for pieces in store.parameters.values() for p in pieces)
        return any(p.grad is not None for p in every)


def _version_of(parameters: Mapping[str, list[Any]]) -> int:
    """How many times something was written into any of these."""
    return sum(version(p) for pieces in parameters.values() for p in pieces)


def watch_original(model: nn.Module, store: Store) -> Watch | None:
    """Watch a model that is parallel from now on, if there are weights that it may fall behind."""
    if not store.parameters:
        return None
    watch = next((hook for hook in model._forward_pre_hooks.values() if isinstance(hook, Watch)), None)
    if watch is None or watch._model is None:
        watch = Watch()
        model.register_forward_pre_hook(watch)
        model.register_state_dict_pre_hook(watch.saving)
    watch.begin(model, store)
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_before_step))
    return watch


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """An optimizer that was made before ``parallelize`` has the model's parameters, which get no gradient."""
    old = [p for group in optimizer.param_groups for p in group["params"] if p in _originals]
    if not old:
        return
    if any(p.grad is not None and bool(p.grad.any()) for p in old):
        for p in old:
            _originals[p].trainings += 1
        return
    if _originals[old[0]].stepped_elsewhere:
        kind = type(optimizer).__name__
        raise Error(
            f"this {kind} has the parameters of the model, and gradients are those of the parallel module's",
            where=f"{kind}.step()",
            expected="an optimizer of pm.parameters()",
            got=f"{len(old)} parameters of the model from before parallelize, without a gradient",
            remedy="parallelize(model, mesh, hints, optimizer=optimizer) carries it over; or make it afterwards",
        )
