"""Samples of the survey: tiny models, each with one batch of inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._pytree import tree_map

BATCH = 4


@dataclass(frozen=True)
class Sample:
    """A model with one batch of inputs."""

    model: nn.Module
    kwargs: Mapping[str, Any]


Cases = dict[str, tuple[dict[str, Any], Callable[[], dict[str, Any]]]]
"""By name: the options of a model's class, and what makes its inputs."""


def in_float64(model: nn.Module, kwargs: Mapping[str, Any]) -> Sample:
    """The model and its inputs, in float64."""
    wide = tree_map(lambda x: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x, dict(kwargs))
    return Sample(model.double(), wide)


def without_chance(model: nn.Module) -> nn.Module:
    """The model in training, whose dropouts drop nothing: of elements, and of paths as timm has them."""
    for module in model.modules():
        if isinstance(module, _DropoutNd):
            module.p = 0.0
        for rate in ("drop_prob", "dropout_prob"):
            if isinstance(getattr(module, rate, None), float):
                setattr(module, rate, 0.0)
    return model.train()


def noise(*shape: int) -> Tensor:
    """Random numbers of a batch: in that shape, behind the batch's dim."""
    return torch.randn(BATCH, *shape)
