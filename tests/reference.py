"""What one device computes: the truth that parallel programs are compared with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import shardfx as sx
from tests.zoo import Case


@dataclass(frozen=True)
class Reference:
    """``outputs`` (its tensor leaves) and ``grads`` are of the first step, ``buffers`` and ``params`` of the end."""

    outputs: list[Tensor]
    losses: list[float]
    grads: dict[str, Tensor]
    buffers: dict[str, Tensor]
    params: dict[str, Tensor]


def single_device(case: Case, steps: int = 3, seed: int = 0) -> Reference:
    """Train a copy of the model alone. A parameter without a gradient is not in ``grads``; a tied one is there once."""
    model = deepcopy(case.model)
    case.alone(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    outputs: list[Tensor] = []
    losses: list[float] = []
    grads: dict[str, Tensor] = {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for step in range(steps):
            optimizer.zero_grad()
            out = model(*case.args, **case.kwargs)
            loss = case.loss(out, *case.targets)
            loss.backward()
            losses.append(loss.item())
            if step == 0:
                outputs = [leaf.detach().clone() for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
                grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
            optimizer.step()
    buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    params = {name: param.detach().clone() for name, param in model.named_parameters()}
    return Reference(outputs, losses, grads, buffers, params)


def check_step(
    pm: sx.ParallelModule,
    model: nn.Module,
    loss: Callable[..., Tensor],
    args: tuple[Tensor, ...],
    targets: tuple[Tensor, ...] = (),
    *,
    kwargs: Mapping[str, Any] | None = None,
    bound: float = 1e-9,
    proven: bool = True,
) -> None:
    """Call a plan and the model that it is of, forward and backward: losses, gradients of parameters and buffers are
    equal within ``bound``, relative and absolute; and the plan is proven."""
    kwargs = kwargs or {}
    close = {"rtol": bound, "atol": bound}
    ours, theirs = pm(*args, *targets, **kwargs), loss(model(*args, **kwargs), *targets)
    ours.backward()
    theirs.backward()
    torch.testing.assert_close(ours, theirs, **close)
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    torch.testing.assert_close(pm.full_grads(), gradients, **close)
    state = pm.full_state_dict()
    for name, buffer in model.named_buffers():
        if name in state:
            torch.testing.assert_close(state[name], buffer, msg=name, **close)
    if proven:
        verdict = pm.verify()
        assert verdict, verdict.why


def rel_err(a: Tensor | float, b: Tensor | float, floor: float = 1e-3) -> float:
    """The largest difference over the largest magnitude; ``inf`` for other shapes or for a NaN on one side.

    Below ``floor`` (the learning rate) a magnitude counts as ``floor``: the gradient of a key's bias is zero but for
    rounding, AdamW blows that up, and the noise of two programs has nothing in common.
    """
    # A Python number becomes float32 unless told otherwise.
    a, b = (torch.as_tensor(x, dtype=torch.float64).detach() for x in (a, b))
    if a.shape != b.shape:
        return float("inf")
    if a.numel() == 0:
        return 0.0
    different = (a != b) & ~(a.isnan() & b.isnan())
    if not different.any():
        return 0.0
    error = (a - b)[different].abs().max()
    scale = torch.stack((a[different].abs().max(), b.nan_to_num(posinf=0.0, neginf=0.0).abs().max())).max()
    result = (error / scale.clamp_min(floor)).item()
    return result if result == result and scale.isfinite() else float("inf")
