"""The weights of the model that a parallel module was made of: they are not its own, and what a script does to them
later is not done to it.

    model.load_state_dict(torch.load(path, weights_only=True))      ema.copy_(p)      model.head.requires_grad_(False)

Where they are others than those of the parallel module, each call says so. A model that is trained itself, or evaluated
with weights of the parallel module, goes on beside it.
"""

from __future__ import annotations

import copy
import warnings
import weakref
from collections.abc import Iterator, Sequence
from itertools import compress
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from shardfx.ir.errors import Error, ShardfxWarning
from shardfx.ir.graph import Graph
from shardfx.ir.shards import sharding_local
from shardfx.module.held.original import Watch
from shardfx.module.held.state import ModelState
from shardfx.runtime.step import STORED
from shardfx.runtime.store import version

REMEDY = (
    "load them into pm: pm.load_full_state_dict(model.state_dict()); a model that is to go its own way is a copy: "
    "parallelize(copy.deepcopy(model), mesh, hints)"
)

WRITTEN, TRAINED = attrgetter("_version"), attrgetter("requires_grad")
HOOKS, BEHIND = attrgetter("_backward_hooks"), attrgetter("_post_accumulate_grad_hooks")


class WeightsAsWere:
    """What a model's weights were when they last were those of a parallel module of it.

    Args:
        graph: the plan by which ``state`` holds them.
        ranks: those of this process.
        watch: knows whether the model is trained itself.
    """

    def __init__(self, model: nn.Module, graph: Graph, state: ModelState, ranks: Sequence[int], watch: Watch) -> None:
        self._model, self._modules = weakref.ref(model), [weakref.ref(module) for module in model.modules()]
        self._graph, self._state, self._ranks, self._watch = graph, state, ranks, watch
        self._trainings = watch.trainings
        parameters, every = self._tensors()
        self._plain = [_is_plain(each) for each in every]
        self._known, self._written = self._content(every), self._version()
        self._trained = [*map(TRAINED, parameters)]

    def __deepcopy__(self, memo: object) -> WeightsAsWere:
        made = copy.copy(self)
        made._modules = []  # a copy of the parallel module was not made of the model
        return made

    def check(self) -> None:
        """Raise if the weights were changed, and are not those of the parallel module.

        Raises:
            Error: naming the first one; or a parameter that was frozen, or given a hook.
        """
        if not self._modules or self._watch.trainings != self._trainings:
            return
        parameters, every = self._tensors()
        trained = [*map(TRAINED, parameters)]
        if trained != self._trained and any(trained):  # with none it is a teacher
            self._check_trained()
        self._trained = trained
        if any(map(HOOKS, parameters)) or any(map(BEHIND, parameters)):
            raise Error(
                "a hook on a parameter of the model would never be called",
                where="pm(...)",
                expected="hooks on parameters of pm, which are other tensors",
                got="one that was registered on the model after parallelize",
                remedy="register it on the parameters of pm, and remove this one",
            )
        content = self._content(every)
        if content != self._known:
            self._compare()
            self._plain = [_is_plain(each) for each in every]
            self._known, self._written = self._content(every), self._version()

    def _tensors(self) -> tuple[list[Any], list[Any]]:
        """The parameters, and these with the buffers."""
        held = [module for each in self._modules if (module := each()) is not None]
        parameters = [p for module in held for p in module._parameters.values() if p is not None]
        buffers = [b for module in held if module._buffers for b in module._buffers.values() if b is not None]
        return parameters, parameters + buffers

    def _content(self, tensors: Sequence[Any]) -> list[object]:
        """Which tensors there are, how often each was written into, where it lies; and two elements, for what is
        written by ``p.data`` counts nowhere."""
        plain = [*compress(tensors, self._plain)]
        found: list[object] = [*map(id, tensors), *map(WRITTEN, plain), *map(torch.Tensor.data_ptr, plain)]
        some = [each for each in (*plain[:1], *plain[-1:]) if each.numel() and each.device.type == "cpu"]
        return found + [str(each.detach()[tuple(n // 2 for n in each.shape)].item()) for each in some]

    def _version(self) -> int:
        return sum(version(piece) for pieces in self._state.store.parameters.values() for piece in pieces)

    def _compare(self) -> None:
        model = self._model()
        other = None if model is None else next(self._others(model), None)
        if other is None:
            return
        if self._version() == self._written:
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
        """The names of weights that are not those of the parallel module."""
        state = self._state
        whole = {
            state.aliases.get(name, name): (name, tensor.detach())
            for name, tensor in (*model.named_parameters(), *model.named_buffers())
            if not tensor.is_meta and not isinstance(tensor, FakeTensor)
        }
        for given in self._graph.inputs:
            if given.kind not in STORED or given.name not in whole or not state.store.is_here(given.name):
                continue
            (name, tensor), spec = whole[given.name], given.value.spec
            if tensor.dtype != given.value.type.dtype or spec is None or tuple(tensor.shape) != given.value.shape:
                continue
            for rank in self._ranks:
                piece = state.store.shard(given.name, rank).detach()
                if not same(piece, sharding_local(tensor, spec, self._graph.mesh, rank).to(piece.device)):
                    yield name
                    break

    def _check_trained(self) -> None:
        """Raise where some parameters were frozen or unfrozen, but not those of the parallel module."""
        model, state = self._model(), self._state
        for name, p in model.named_parameters() if model is not None else ():
            pieces = state.store.parameters.get(state.aliases.get(name, name), ())
            if any(piece.requires_grad != p.requires_grad for piece in pieces):
                did = "trainable" if p.requires_grad else "frozen"
                raise Error(
                    f"{name!r} of the model was made {did} after parallelize, and the parallel module's is not",
                    where="pm(...)",
                    expected="requires_grad as it was, or of the parameters of pm as well",
                    got=f"requires_grad={p.requires_grad} of the model, {not p.requires_grad} of pm",
                    remedy="say it of pm: pm.get_submodule(path).requires_grad_(...); a model that is to go its own "
                    "way is a copy: parallelize(copy.deepcopy(model), mesh, hints)",
                )


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors hold the same, NaN where NaN is."""
    return one.shape == other.shape and bool(((one == other) | ((one != one) & (other != other))).all())


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether it has memory, and a number of writes into it."""
    known = type(tensor) in (torch.Tensor, nn.Parameter, nn.Buffer) and tensor.layout is torch.strided
    return known and not tensor.is_meta and not tensor.is_inference()
