"""An odd model on a mesh against one device: two steps of training, evaluation, the proof, warnings."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

import shardfx as sx

from .odd_model import Given, Odd, mesh

RATE = 0.05


@dataclass(frozen=True)
class Found:
    """The plan, and what is not as it should be: differences, verdicts, warnings."""

    pm: sx.ParallelModule
    wrong: list[str]


def run(odd: Odd, way: str, **more: Any) -> Found:
    """Train, evaluate, prove."""
    given = odd.given()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", "redundant compute")  # batches and heads are odd too
        pm = sx.parallelize(given.model, mesh(way), odd.hints(way, given, **more), virtual=True)
        alone = OneRank(one_rank(odd, given), odd) if odd.draws else OneDevice(given.alone, odd)
        wrong = [*trained(odd, pm, given, alone), *evaluated(odd, pm, given, alone)]
        verdict = pm.verify()
    wrong += [] if verdict else [str(verdict)]
    said = [str(each.message) for each in caught]
    wrong += [f"warned: {each}" for each in said if not odd.warns or odd.warns not in each]
    return Found(pm, wrong)


def one_rank(odd: Odd, given: Given) -> sx.ParallelModule:
    """A plan that shardings nothing."""
    hints = sx.Hints(given.args, given.kwargs, odd.loss, given.targets)
    return sx.parallelize(given.alone, sx.Mesh(dp=1), hints, virtual=True)


def trained(odd: Odd, pm: sx.ParallelModule, given: Given, alone: Any) -> list[str]:
    """What differs in two steps: losses, gradients of parameters and inputs, parameters and buffers at the end."""
    wrong: list[str] = []
    for step in range(2):
        mine, theirs = (wanting((given.args, given.kwargs)) for _ in range(2))
        torch.manual_seed(step)
        ours = pm(*mine[0], *given.targets, **mine[1])
        ours.backward()
        torch.manual_seed(step)
        loss = alone.loss(*theirs[0], *given.targets, **theirs[1])
        loss.backward()
        wrong += differs(f"loss of step {step}", ours, loss, odd.close)
        grads, own = pm.full_grads(), alone.grads()
        wrong += [f"gradients of {set(own) ^ set(grads)} on one side"] if set(own) != set(grads) else []
        for name in {*own} & {*grads}:
            wrong += differs(f"gradient of {name} in step {step}", grads[name], own[name], odd.close)
        for at, (a, b) in enumerate(zip(tree_leaves(mine), tree_leaves(theirs), strict=True)):
            if isinstance(a, Tensor) and a.requires_grad:
                wrong += differs(f"gradient of input {at}", a.grad, b.grad, odd.close)
        for module in (pm, alone.module):
            for each in module.parameters():
                if each.grad is not None:
                    each.data -= RATE * each.grad
                    each.grad = None
    state = pm.full_state_dict()
    for name, tensor in alone.state().items():
        wrong += differs(f"{name} at the end", state[name], tensor, odd.close)
    return wrong


def evaluated(odd: Odd, pm: sx.ParallelModule, given: Given, alone: Any) -> list[str]:
    """What differs in results and loss without training."""
    pm.eval(), alone.module.eval()
    with torch.no_grad():
        loss, results = pm(*given.args, *given.targets, **given.kwargs, with_results=True)
        theirs = alone.loss(*given.args, *given.targets, **given.kwargs)
        out = alone.results(*given.args, *given.targets, **given.kwargs)
    wrong = differs("loss in evaluation", loss, theirs, odd.close)
    for at, (a, b) in enumerate(zip(tree_leaves(results), tree_leaves(out), strict=True)):
        wrong += differs(f"result {at} in evaluation", a, b, odd.close) if isinstance(b, Tensor) else []
    pm.train(), alone.module.train()
    return wrong


@dataclass(frozen=True)
class OneDevice:
    """The model as it is."""

    module: Any
    odd: Odd

    def loss(self, *given: Any, **kwargs: Any) -> Tensor:
        args = given[: len(self.odd.args)]
        return self.odd.loss(self.module(*args, **kwargs), *given[len(args) :])

    def results(self, *given: Any, **kwargs: Any) -> Any:
        return self.module(*given[: len(self.odd.args)], **kwargs)

    def grads(self) -> dict[str, Tensor]:
        return {name: each.grad for name, each in self.module.named_parameters() if each.grad is not None}

    def state(self) -> dict[str, Tensor]:
        return dict(self.module.state_dict())


class OneRank(OneDevice):
    """A plan for one rank, which draws the random numbers of any mesh."""

    def loss(self, *given: Any, **kwargs: Any) -> Tensor:
        return self.module(*given, **kwargs)  # type: ignore[no-any-return]

    def results(self, *given: Any, **kwargs: Any) -> Any:
        return self.module(*given, with_results=True, **kwargs)[1]

    def grads(self) -> dict[str, Tensor]:
        return self.module.full_grads()  # type: ignore[no-any-return]

    def state(self) -> dict[str, Tensor]:
        return self.module.full_state_dict()  # type: ignore[no-any-return]


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
