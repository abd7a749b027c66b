"""The plans of the correctness table, as data: mesh, hints, and how their result is compared with one device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

import shardfx as sx

from .models import Model

CLIP, RATE = 0.1, 1e-3
"""The norm at which gradients are clipped, and the learning rate."""
MICROBATCHES = 4
ADAMW = {"lr": RATE, "eps": 1e-6}


def adamw(params: Any) -> torch.optim.Optimizer:
    """The optimizer in the program."""
    return torch.optim.AdamW(params, **ADAMW)  # type: ignore[arg-type]


def anything(model: Model) -> str:
    """No reason against any model."""
    return ""


def with_images(model: Model) -> str:
    return "" if model.images else "no image"


def with_logits_of_tokens(model: Model) -> str:
    return "" if model.head else "no logits by token"


COMPILED = "compiled"
"""The plan that is run by ``pm.compile()``."""


@dataclass(frozen=True)
class Plan:
    """One column of the table.

    Args:
        batch: the axes that shard the batch, outermost first.
        axes: of the mesh, in order.
        weights: whether the model's tensor parallelism (hints over ``tp``) applies.
        compare: ``gradients`` of one step; ``program``: parameters after steps of the optimizer in the program;
            ``optimizer``: parameters after steps of the user's own fused AdamW.
        hints: further fields of :class:`shardfx.Hints`, by model.
        specs: further placements, by model.
        compiled: run by ``pm.compile()``.
        loops: whether the batch comes in micro-batches.
        why_not: why the plan does not apply to a model; empty where it does.
    """

    name: str
    axes: Mapping[str, Any]
    batch: str = "dp"
    weights: bool = False
    compare: str = "gradients"
    hints: Callable[[Model], dict[str, Any]] = field(default=lambda model: {})
    specs: Callable[[Model], dict[str, str]] = field(default=lambda model: {})
    compiled: bool = False
    loops: bool = False
    why_not: Callable[[Model], str] = anything

    @property
    def clip(self) -> float | None:
        return CLIP if self.compare == "program" else None


def _zero(level: int, **more: Any) -> Callable[[Model], dict[str, Any]]:
    return lambda model: {"zero": level, "zero_min_numel": 0, **more}


def _loop_hints(model: Model) -> dict[str, Any]:
    """The statistics of a batch norm are those of each micro-batch: those of the full batch need all at once."""
    return {"batch_stats": "microbatch"} if model.batch_norm else {}


def _update(model: Model) -> dict[str, Any]:
    return {"optimizer": adamw, "clip_grad_norm": CLIP}


PLANS = (
    Plan("dp2 x tp2", {"dp": 2, "tp": 2}, weights=True),
    Plan(COMPILED, {"dp": 2}, compiled=True),
    Plan("dp2 x tp2, zero 3", {"dp": 2, "tp": 2}, weights=True, hints=_zero(3)),
    Plan("update", {"dp": 2, "tp": 2}, weights=True, compare="program", hints=_update),
    Plan(
        "pp2 1F1B",
        {"pp": 2, "mb": sx.Loop(MICROBATCHES)},
        batch="mb",
        hints=lambda model: {"pipeline": sx.Pipeline(schedule="1f1b"), **_loop_hints(model)},
        loops=True,
    ),
    Plan("recompute", {"dp": 2}, hints=lambda model: {"recompute": model.block}),
    Plan(
        "accumulate 4",
        {"dp": 2},
        hints=lambda model: {"grad_accumulation": MICROBATCHES, **_loop_hints(model)},
        loops=True,
    ),
    Plan(
        "offload",
        {"dp": 2},
        compare="program",
        hints=lambda model: _update(model) | {"offload": [sx.Offload(("activations", "optimizer"), min_numel=1)]},
    ),
    Plan(
        "chunked loss",
        {"dp": 2, "chunk": sx.Loop(4)},
        specs=lambda model: {model.head: "dp, chunk, -"},
        why_not=with_logits_of_tokens,
    ),
    Plan("zero 3, arena", {"dp": 2}, hints=_zero(3, arena=True)),
    Plan("zero 1, fused AdamW", {"dp": 2}, compare="optimizer", hints=_zero(1)),
    Plan("2 x 2 tiles", {"h": 2, "w": 2}, batch="", why_not=with_images),
)
BY_NAME = {plan.name: plan for plan in PLANS}


def specs_of(plan: Plan, model: Model) -> dict[str, str]:
    """The placements of inputs (the batch over the data axes, images over the axes of tiles) and of weights."""
    case = model.case
    inputs = {f"args.{i}": x for i, x in enumerate(case.args)} | {f"kwargs.{k}": x for k, x in case.kwargs.items()}
    specs = {}
    for name, x in (inputs | {f"targets.{i}": x for i, x in enumerate(case.targets)}).items():
        tiles = [axis for axis in ("h", "w") if axis in plan.axes and x.dim() >= 3]
        rest = ["-"] * (x.dim() - 1 - len(tiles)) + tiles
        specs[name] = ", ".join([plan.batch or "-", *rest])
    return specs | (dict(case.megatron_specs) if plan.weights else {}) | plan.specs(model)


def hints_of(plan: Plan, model: Model, device: torch.device) -> sx.Hints:
    case = model.case
    return sx.Hints(
        args=case.args,
        kwargs=case.kwargs,
        loss=case.loss,
        targets=case.targets,
        specs=specs_of(plan, model),
        device=device,
        **plan.hints(model),
    )
