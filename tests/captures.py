"""Captures that tests share: to capture a model takes longer than most of what is tested of its plans.

>>> with captured_once("mlp3"):
...     pm = sx.parallelize(make("mlp3").model, mesh, hints)     # captured at the first time, on whatever mesh
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import nn

import shardfx as sx
import shardfx.api
import shardfx.compile
from shardfx.ir.capture.frontend.dynamo import DynamoTrace
from shardfx.ir.capture.frontend.loss_module import OwnLoss
from shardfx.ir.capture.model_and_loss import leaf_names
from shardfx.ir.capture.trace import Captured
from shardfx.module.state_checks import SourceModelWatch

KNOWN: dict[Hashable, Captured] = {}
TRACES: dict[Hashable, DynamoTrace] = {}
PLAIN = (bool, int, float, str, torch.dtype, torch.device, type(None))
OF_TORCH = frozenset(vars(nn.Module())) - {"training"}
"""Attributes of all modules: parameters, buffers and modules, which are looked at by name, and hooks."""


@contextmanager
def captured_once(name: str) -> Iterator[None]:
    """Within (or in a function that it decorates), a model is captured once in this process for like examples.

    Args:
        name: of models that are the same when their modules are: in types, modes, attributes, and in the types of
            parameters and buffers. These, the loss and the types of the examples are looked at.

    A captured graph is the same on all meshes; each call gets a copy, with constants of its own. What depends on the
    numbers of the examples (``Hints(guard=True)``), on objects among them, on hooks or on how the batch is sharded
    (``Hints(batch_stats="local")``) is captured at each call.
    """
    capture, trace = shardfx.compile.capture_model, shardfx.compile.trace_model

    def key_of(model: nn.Module | torch.export.ExportedProgram, hints: sx.Hints) -> Hashable:
        """None where a model is captured at each call."""
        examples = leaf_names(hints.args, hints.kwargs, hints.targets)
        alike = all(isinstance(leaf, (torch.Tensor, *PLAIN)) for _, leaf in examples) and hints.batch_stats is None
        if hints.guard or not alike or not isinstance(model, nn.Module) or _is_changed(model):
            return None
        given = tuple((each, _key(leaf)) for each, leaf in examples)
        asked = (hints.loss, hints.optimizer, hints.clip_grad_norm, hints.mixed_precision)
        return (name, shardfx.compile.capture, asked, _content(model), given, _surroundings())

    def traced_once(model: nn.Module, hints: sx.Hints, *further: Any, **named: Any) -> DynamoTrace:
        key = None if further or named or isinstance(hints.loss, OwnLoss) else key_of(model, hints)
        if key is None:
            return trace(model, hints, *further, **named)
        if key not in TRACES:
            TRACES[key] = trace(model, hints)
        return TRACES[key]

    def once(
        model: nn.Module | torch.export.ExportedProgram,
        mesh: sx.Mesh,
        hints: sx.Hints,
        found: DynamoTrace | None = None,
    ) -> Captured:
        if (plain := key_of(model, hints)) is None:
            return capture(model, mesh, hints, found)
        key = plain, found and (found.has_loss, found.gradients, found.trained)
        if key not in KNOWN:
            KNOWN[key] = capture(model, mesh, hints, found)
        graph = shardfx.compile.own_constants(KNOWN[key].graph.copy())
        graph.mesh = mesh
        return replace(KNOWN[key], graph=graph, trace=found)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shardfx.compile, "capture_model", once)
        patch.setattr(shardfx.api, "trace_model", traced_once)
        yield


def _is_changed(model: nn.Module) -> bool:
    """Whether a module has hooks but for our own, or a forward of its own."""
    hooks = [hook for m in model.modules() for n in vars(m) if n.endswith("_hooks") for hook in vars(m)[n].values()]
    own = any("forward" in vars(module) for module in model.modules())
    return own or any(not isinstance(getattr(hook, "__self__", hook), SourceModelWatch) for hook in hooks)


def _surroundings() -> Hashable:
    return torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.get_default_dtype()


def _content(model: nn.Module) -> Hashable:
    """A model without its numbers."""
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    modules = [
        (name, type(module), tuple((each, _key(a)) for each, a in vars(module).items() if each not in OF_TORCH))
        for name, module in model.named_modules(remove_duplicate=False)
    ]
    return tuple(modules), tuple((name, _first_name(tensor, tensors), _key(tensor)) for name, tensor in tensors)


def _first_name(tensor: torch.Tensor, among: list[tuple[str, torch.Tensor]]) -> str:
    """The first name of a tensor, which tied ones share."""
    return next(name for name, each in among if each is tensor)


def _key(given: Any) -> Hashable:
    """What is equal for equal things; what cannot be compared is equal to itself alone."""
    if isinstance(given, torch.Tensor):
        return tuple(given.shape), given.stride(), given.dtype, given.device, given.requires_grad
    if isinstance(given, (list, tuple)):
        return type(given), tuple(_key(each) for each in given)
    if isinstance(given, dict):
        return type(given), tuple((each, _key(value)) for each, value in given.items())
    if isinstance(given, set):
        return type(given), frozenset(given)
    return type(given), given if isinstance(given, Hashable) else Compared(given)


@dataclass(frozen=True)
class Compared:
    """What can be compared, and has no hash: a configuration."""

    given: object

    def __hash__(self) -> int:
        return hash(type(self.given))
