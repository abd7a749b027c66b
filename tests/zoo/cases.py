"""What a case of the zoo is, its losses and data."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models import LENGTH, VOCAB

BATCH = 8
IGNORED = -100


def as_it_is(model: nn.Module) -> None:
    """Leave a model alone."""


@dataclass(frozen=True)
class Case:
    """One model and one training step of it, on one device.

    ``megatron_specs`` and ``sequence_specs`` are hints over the mesh axis ``tp``, ``expert_specs`` over ``ep``; the
    tests add those of the data. ``alone`` is done to the copy of the model that one device trains.
    What ``tests.reference.rel_err`` may reach between two orders of summation: ``tolerance`` for outputs, losses,
    gradients and buffers, ``trained_tolerance`` for the parameters after three steps of AdamW.
    """

    name: str
    model: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    loss: Callable[..., Tensor]
    targets: tuple[Any, ...]
    megatron_specs: Mapping[str, str] = field(default_factory=dict)
    sequence_specs: Mapping[str, str] | None = None
    expert_specs: Mapping[str, str] = field(default_factory=dict)
    alone: Callable[[nn.Module], object] = as_it_is
    tolerance: float = 1e-9
    trained_tolerance: float = 1e-9


# Transformers computes rotary tables and RMS norms in float32 whatever the model's dtype. A program that sums a norm
# in another order is off by 4e-7 in the gradients, and where a gradient is tiny AdamW makes 1e-3 of it (Qwen3).
FLOAT32_INSIDE = {"tolerance": 1e-5, "trained_tolerance": 1e-2}

CASES: dict[str, Callable[[], Case]] = {}
"""By name, in the order in which they are defined."""


def case(function: Callable[[], Case]) -> Callable[[], Case]:
    """Enter the case that a function makes: in float64, and the same at every call."""

    def build() -> Case:
        with double():
            return function()

    build.__name__ = function.__name__
    build.__doc__ = function.__doc__
    CASES[function.__name__] = build
    return build


@contextmanager
def double() -> Iterator[None]:
    """Default dtype float64 and a fixed seed, both put back at the end; transformers talks of real errors only."""
    logger = logging.getLogger("transformers")
    before, level = torch.get_default_dtype(), logger.level
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        torch.set_default_dtype(torch.float64)
        logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            torch.set_default_dtype(before)
            logger.setLevel(level)


# ---- losses and data


def classify(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels)


def next_token(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


def hf_next_token(out: Any, labels: Tensor) -> Tensor:
    return next_token(out.logits, labels)


def hf_classify(out: Any, labels: Tensor) -> Tensor:
    return classify(out.logits, labels)


def tokens() -> Tensor:
    return torch.randint(0, VOCAB, (BATCH, LENGTH))


def labels() -> Tensor:
    """Sample 0 keeps one token, the later ones more and more: no two ranks see the same count."""
    out = torch.randint(0, VOCAB, (BATCH, LENGTH))
    for sample in range(BATCH):
        out[sample, 1 + 2 * sample :] = IGNORED
    return out
