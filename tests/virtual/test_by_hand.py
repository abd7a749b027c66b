"""Accumulation by hand, as training loops have it, beside iterations: whose loss and gradients are the whole
batch's?"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardfx as sx
from tests.zoo import make

IGNORED, STEPS, RANKS = -100, 4, 2
Number = tuple[float, dict[str, Tensor]]


def uneven() -> tuple[nn.Module, Tensor, Tensor]:
    """A small GPT, and texts of which later rows have ever fewer targets."""
    case = make("gpt_fused")
    x = case.args[0]
    y = torch.randint(80, x.shape, generator=torch.Generator().manual_seed(0))
    for row in range(len(y)):
        y[row, : row * y.shape[1] // len(y)] = IGNORED
    return case.model, x, y


def mean(out: Tensor, y: Tensor) -> Tensor:
    """What a model's own loss is: the mean over the tokens that count."""
    return F.cross_entropy(out.flatten(0, 1), y.flatten(), ignore_index=IGNORED)


def whole(model: nn.Module, x: Tensor, y: Tensor) -> Number:
    loss = mean(model(x), y)
    loss.backward()
    return loss.item(), {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


def means_of_means(model: nn.Module, x: Tensor, y: Tensor) -> Number:
    """``loss = loss / gradient_accumulation_steps; loss.backward()``, and a mean over ranks: transformers' Trainer
    where a model takes no ``num_items_in_batch``, and DistributedDataParallel with ``no_sync``."""
    total = 0.0
    for mine, theirs in zip(x.chunk(RANKS), y.chunk(RANKS), strict=True):
        for a, b in zip(mine.chunk(STEPS), theirs.chunk(STEPS), strict=True):
            loss = mean(model(a), b) / STEPS / RANKS
            loss.backward()
            total += loss.item()
    return total, {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


def by_the_rank_s_count(model: nn.Module, x: Tensor, y: Tensor) -> Number:
    """A sum over what counts in all steps of a *rank*, and a mean over ranks: ``num_items_in_batch`` where it is not
    gathered (``average_tokens_across_devices=False``)."""
    total = 0.0
    for mine, theirs in zip(x.chunk(RANKS), y.chunk(RANKS), strict=True):
        count = (theirs != IGNORED).sum()
        for a, b in zip(mine.chunk(STEPS), theirs.chunk(STEPS), strict=True):
            loss = mean(model(a), b) * (b != IGNORED).sum() / count / RANKS
            loss.backward()
            total += loss.item()
    return total, {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


def in_iterations(model: nn.Module, x: Tensor, y: Tensor) -> Number:
    hints = sx.Hints(args=(x,), loss=mean, targets=(y,), specs={"args.0": "dp, -"}, grad_accumulation=STEPS)
    pm = sx.parallelize(model, sx.Mesh(dp=RANKS), hints, virtual=True)
    loss = pm(x, y)
    loss.backward()
    return loss.item(), dict(pm.full_grads())


def off(made: Number, right: Number) -> tuple[float, float]:
    """By how much loss and gradients are wrong, as shares of the right ones."""
    loss = abs(made[0] - right[0]) / right[0]
    worst = max(float((made[1][name] - each).norm() / each.norm()) for name, each in right[1].items())
    return loss, worst


@pytest.mark.long
@pytest.mark.parametrize("how", [means_of_means, by_the_rank_s_count, in_iterations])
def test_whose_number_is_that_of_the_whole_batch(how: Callable[[nn.Module, Tensor, Tensor], Number]) -> None:
    model, x, y = uneven()
    right = whole(copy.deepcopy(model), x, y)
    loss, gradients = off(how(copy.deepcopy(model), x, y), right)
    if how is in_iterations:
        assert loss < 1e-12 and gradients < 1e-9
    else:
        assert loss > 1e-4 and gradients > 1e-2


@pytest.mark.long
def test_where_all_tokens_count_they_agree() -> None:
    model, x, y = uneven()
    y = y.where(y != IGNORED, 0)
    right = whole(copy.deepcopy(model), x, y)
    for how in (means_of_means, by_the_rank_s_count, in_iterations):
        assert max(off(how(copy.deepcopy(model), x, y), right)) < 1e-9
