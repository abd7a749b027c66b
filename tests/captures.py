"""Captures that tests share: to capture a model takes longer than most of what is tested of its plans.

>>> with captured_once("mlp3"):
...     pm = sx.parallelize(make("mlp3").model, mesh, hints)     # captured at the first time, on whatever mesh
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import shardfx as sx
import shardfx.compile
from shardfx.ir.capture.model_and_loss import leaf_names
from shardfx.ir.capture.trace import Captured

KNOWN: dict[Hashable, Captured] = {}


@contextmanager
def captured_once(name: str) -> Iterator[None]:
    """Within, what is captured under this name for like examples is captured once in this process.

    Args:
        name: of a model that is the same whenever it is made. What it trains, its mode, the loss and the types of the
            examples may differ from call to call: they are looked at.

    A captured graph is the same on all meshes; each call gets a copy, with constants of its own. What depends on the
    numbers of the examples (``Hints(guard=True)``) is captured at each call.
    """
    capture = shardfx.compile.capture_model

    def once(model: nn.Module | torch.export.ExportedProgram, mesh: sx.Mesh, hints: sx.Hints) -> Captured:
        if hints.guard or not isinstance(model, nn.Module):
            return capture(model, mesh, hints)
        key = (name, hints.loss, _content(model), _examples(hints))
        if key not in KNOWN:
            KNOWN[key] = capture(model, mesh, hints)
        graph = shardfx.compile.own_constants(KNOWN[key].graph.copy())
        graph.mesh = mesh
        return replace(KNOWN[key], graph=graph)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shardfx.compile, "capture_model", once)
        yield


def _content(model: nn.Module) -> Hashable:
    """The parameters and buffers of a model, and the mode of each module, without numbers."""
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return (
        tuple((name, type(module), module.training) for name, module in model.named_modules()),
        tuple((name, _type(tensor)) for name, tensor in tensors),
    )


def _examples(hints: sx.Hints) -> Hashable:
    """The types of the example inputs, and what is no tensor among them."""
    return tuple((name, _type(leaf)) for name, leaf in leaf_names(hints.args, hints.kwargs, hints.targets))


def _type(leaf: Any) -> Hashable:
    if isinstance(leaf, torch.Tensor):
        return tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.device, leaf.requires_grad
    return repr(leaf)
