"""An odd model on a mesh against one device: two steps of training, evaluation, the proof, warnings."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

import shardfx as sx

from .odd_model import Given, Odd, mesh

RATE = 0.05


def run(odd: Odd, way: str) -> list[str]:
    """Train, evaluate, prove; gives what is not as it should be: differences, verdicts, warnings."""
    given = odd.given()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", "redundant compute")  # batches and heads are odd too
        pm = sx.parallelize(given.model, mesh(way), odd.hints(way, given), virtual=True)
        wrong = [*trained(odd, pm, given), *evaluated(odd, pm, given)]
        verdict = pm.verify()
    return [*wrong, *([] if verdict else [str(verdict)]), *(f"warned: {each.message}" for each in caught)]


def trained(odd: Odd, pm: sx.ParallelModule, given: Given) -> list[str]:
    """What differs in two steps: losses, gradients of parameters and inputs, parameters and buffers at the end."""
    wrong: list[str] = []
    for step in range(2):
        mine, theirs = (wanting((given.args, given.kwargs)) for _ in range(2))
        ours = pm(*mine[0], *given.targets, **mine[1])
        ours.backward()
        loss = odd.loss(given.alone(*theirs[0], **theirs[1]), *given.targets)
        loss.backward()
        wrong += differs(f"loss of step {step}", ours, loss, odd.close)
        grads = pm.full_grads()
        own = {name: each.grad for name, each in given.alone.named_parameters() if each.grad is not None}
        wrong += [f"gradients of {set(own) ^ set(grads)} on one side"] if set(own) != set(grads) else []
        for name in {*own} & {*grads}:
            wrong += differs(f"gradient of {name} in step {step}", grads[name], own[name], odd.close)
        for at, (a, b) in enumerate(zip(tree_leaves(mine), tree_leaves(theirs), strict=True)):
            if isinstance(a, Tensor) and a.requires_grad:
                wrong += differs(f"gradient of input {at}", a.grad, b.grad, odd.close)
        for module in (pm, given.alone):
            for each in module.parameters():
                if each.grad is not None:
                    each.data -= RATE * each.grad
                    each.grad = None
    state = pm.full_state_dict()
    for name, tensor in given.alone.state_dict().items():
        wrong += differs(f"{name} at the end", state[name], tensor, odd.close)
    return wrong


def evaluated(odd: Odd, pm: sx.ParallelModule, given: Given) -> list[str]:
    """What differs in results and loss without training."""
    pm.eval(), given.alone.eval()
    with torch.no_grad():
        loss, results = pm(*given.args, *given.targets, **given.kwargs, with_results=True)
        out = given.alone(*given.args, **given.kwargs)
        theirs = odd.loss(out, *given.targets)
    wrong = differs("loss in evaluation", loss, theirs, odd.close)
    for at, (a, b) in enumerate(zip(tree_leaves(results), tree_leaves(out), strict=True)):
        wrong += differs(f"result {at} in evaluation", a, b, odd.close) if isinstance(b, Tensor) else []
    return wrong


def wanting(given: Any) -> Any:
    """The same numbers, which want gradients."""

    def wants(each: Any) -> Any:
        if not isinstance(each, Tensor):
            return each
        inexact = each.is_floating_point() or each.is_complex()
        return each.clone().requires_grad_() if inexact else each

    return tree_map(wants, given)


def differs(what: str, ours: Tensor | None, theirs: Tensor | None, close: float) -> list[str]:
    """A line if they do, by more than rounding does."""
    if ours is None or theirs is None:
        none = [each is None or not each.any() for each in (ours, theirs)]
        return [] if all(none) else [f"{what}: on one side there is none"]
    ours, theirs = ours.detach(), theirs.detach()
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return [f"{what}: {ours.dtype} {tuple(ours.shape)} for {theirs.dtype} {tuple(theirs.shape)}"]
    if ours.numel() == 0 or torch.equal(ours, theirs):
        return []
    kind = torch.complex128 if theirs.is_complex() else torch.float64
    error = (ours.to(kind) - theirs.to(kind)).abs().max() / theirs.to(kind).abs().max().clamp_min(1e-3)
    return [] if error < close else [f"{what}: off by {error.item():.1e}"]
