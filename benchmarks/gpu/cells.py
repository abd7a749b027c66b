"""The correctness table: each model under each plan on virtual ranks, in float64, compared with one device."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import shardfx as sx
from tests.reference import rel_err

from .context import Context, NotApplicable, Wrong
from .device import Device
from .models import ROWS, Model, table_model
from .plans import ADAMW, BY_NAME, CLIP, MICROBATCHES, PLANS, Plan, hints_of

TOLERANCE, STEPS = 1e-9, 2
FLOAT32 = 1e-6
"""The tolerance where a model computes in float32 within (Mixtral's router), which Inductor rounds otherwise."""
REHEARSED = ("dp2 x tp2", "zero 1, fused AdamW")
"""The plans that a rehearsal takes of each model; of the MLP it takes all, and of the UNet tiles."""


def tolerance(model: Model, plan: Plan) -> float:
    """How far a cell may be off, relative to the largest of what is compared."""
    return FLOAT32 if model.experts and plan.compiled else TOLERANCE


def names(rehearse: bool) -> list[str]:
    """The cells, model by model: ``model | plan``."""
    cells = [(model, plan.name) for model in ROWS for plan in PLANS]
    if rehearse:
        some = {("UNet", "2 x 2 tiles"), ("GPT, fused qkv", "chunked loss")}
        cells = [cell for cell in cells if cell[0] == "MLP" or cell[1] in REHEARSED or cell in some]
    return [f"{model} | {plan}" for model, plan in cells]


def run(context: Context) -> None:
    """All cells of this process."""
    warnings.simplefilter("ignore")
    for cell in context.cells:
        model, plan = cell.split(" | ")
        context.attempt(cell, lambda model=model, plan=plan: check(model, BY_NAME[plan], context.device))  # type: ignore[misc]


def check(name: str, plan: Plan, device: Device) -> dict[str, Any]:
    """One cell: plan, prove, run, compare.

    Raises:
        NotApplicable: the plan is none for this model.
        Wrong: the numbers are not those of one device, or the proof failed.
    """
    model = table_model(name, device.torch_device)
    if why := plan.why_not(model):
        raise NotApplicable(why)
    alone = one_device(model, plan)
    pm = sx.parallelize(
        model.case.model, sx.Mesh(**plan.axes), hints_of(plan, model, device.torch_device), virtual=True
    )
    if plan.compiled:
        pm.compile(**device.compile_options())
    found = parallel(pm, model, plan)
    error = found.error(alone)
    verdict = pm.verify()
    row: dict[str, Any] = {
        "error": error,
        "tolerance": tolerance(model, plan),
        "proven": verdict.status,
        "peak_predicted": pm.memory(0).peak,
    }
    if not error <= row["tolerance"]:
        raise Wrong(f"off by {error:.1e}", row)
    if not verdict:
        raise Wrong(f"{verdict.status}: {str(verdict.why)[:200]}", row)
    return row


@dataclass(frozen=True)
class Outcome:
    """The loss of the last step, and gradients or parameters (with buffers) by name."""

    loss: Tensor
    tensors: Mapping[str, Tensor]

    def error(self, alone: Outcome) -> float:
        """The largest relative error against one device.

        Raises:
            Wrong: a tensor is missing.
        """
        if missing := alone.tensors.keys() - self.tensors.keys():
            raise Wrong(f"missing: {', '.join(sorted(missing))[:200]}", {})
        pairs = [(self.loss, alone.loss), *((self.tensors[name], each) for name, each in alone.tensors.items())]
        return max(rel_err(ours.detach().cpu(), theirs.detach().cpu()) for ours, theirs in pairs)


def parallel(pm: sx.ParallelModule, model: Model, plan: Plan) -> Outcome:
    """What the parallel module computes."""
    case = model.case
    given = (*case.args, *case.targets)
    if plan.compare == "program":
        for _ in range(STEPS):
            loss = pm.step(*given, **case.kwargs)
        return Outcome(loss, pm.full_state_dict())
    if plan.compare == "gradients":
        loss = pm(*given, **case.kwargs)
        loss.backward()
        return Outcome(loss, pm.full_grads())
    optimizer = torch.optim.AdamW(pm.parameters(), **ADAMW, fused=True)  # type: ignore[arg-type]
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = pm(*given, **case.kwargs)
        loss.backward()
        optimizer.step()
    return Outcome(loss, pm.full_state_dict())


def one_device(model: Model, plan: Plan) -> Outcome:
    """What a copy of the model computes alone."""
    case, alone = model.case, deepcopy(model.case.model)
    if not plan.loops:
        case.alone(alone)
    optimizer = torch.optim.AdamW(alone.parameters(), **ADAMW, fused=plan.compare == "optimizer")  # type: ignore[arg-type]
    for _ in range(1 if plan.compare == "gradients" else STEPS):
        optimizer.zero_grad()
        loss = torch.stack(list(_losses(model, plan, alone))).sum()
        loss.backward()
        if plan.compare == "gradients":
            return Outcome(loss, {n: p.grad for n, p in alone.named_parameters() if p.grad is not None})
        if plan.clip is not None:
            nn.utils.clip_grad_norm_(alone.parameters(), CLIP)
        optimizer.step()
    kept = {name for name, _ in alone.named_parameters()} | alone.state_dict().keys()
    return Outcome(loss, {name: each for name, each in alone.state_dict(keep_vars=True).items() if name in kept})


def _losses(model: Model, plan: Plan, alone: nn.Module) -> Iterator[Tensor]:
    """Shares of the loss: of the whole batch, or (batch norms with statistics of a micro-batch) of equal parts."""
    case = model.case
    if not (plan.loops and model.batch_norm):
        yield case.loss(alone(*case.args, **case.kwargs), *case.targets)
        return
    for x, y in zip(case.args[0].chunk(MICROBATCHES), case.targets[0].chunk(MICROBATCHES), strict=True):
        yield case.loss(alone(x), y) / MICROBATCHES
