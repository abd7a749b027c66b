"""Code that branches on properties of inputs: which are one tensor, strides, ``requires_grad``. Each call equals eager,
whatever the first one was."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardfx as sx
from tests.reference import rel_err

MESH = sx.Mesh(dp=2)
Ask = Callable[..., bool]


class Asks(nn.Module):
    """Three times as much, where its question is answered by yes."""

    def __init__(self, ask: Ask) -> None:
        super().__init__()
        self.fc, self.ask = nn.Linear(4, 4).double(), ask

    def forward(self, *given: Tensor) -> Tensor:
        h = self.fc(sum(given))  # type: ignore[arg-type]
        return h * 3 if self.ask(self, h, *given) else h


def loss(out: Tensor, wanted: Tensor) -> Tensor:
    return ((out - wanted) ** 2).mean()


def both(ask: Ask, *given: Tensor, **how: Any) -> tuple[nn.Module, Any]:
    """A model, and the parallel module of it for these examples."""
    model = Asks(ask)
    specs = {f"args.{number}": "dp, -" for number in range(len(given))}
    hints = sx.Hints(args=given, loss=loss, targets=(rows(len(given[0])),), specs=specs, **how)
    return copy.deepcopy(model), sx.parallelize(model, MESH, hints, virtual=True)


def rows(count: int) -> Tensor:
    return torch.randn(count, 4, dtype=torch.float64)


def columns(count: int) -> Tensor:
    """As ``rows``, and transposed in memory."""
    return torch.randn(4, count, dtype=torch.float64).t()


def spread(count: int) -> Tensor:
    """One row, for all."""
    return torch.randn(1, 4, dtype=torch.float64).expand(count, 4)


def check_step(model: nn.Module, pm: Any, *given: Tensor) -> None:
    wanted = rows(len(given[0]))
    model.zero_grad()
    pm.zero_grad()
    whole, ours = loss(model(*given), wanted), pm(*given, wanted)
    assert rel_err(ours.detach(), whole.detach()) < 1e-12
    whole.backward()  # type: ignore[no-untyped-call]
    ours.backward()
    grads = pm.full_grads()
    assert all(rel_err(grads[name], p.grad) < 1e-12 for name, p in model.named_parameters())


def check_results(model: nn.Module, pm: Any, *given: Tensor) -> None:
    assert rel_err(pm(*given).detach(), model(*given).detach()) < 1e-12


def are_one(model: nn.Module, h: Tensor, a: Tensor, b: Tensor) -> bool:
    return a is b


@pytest.mark.long
@pytest.mark.parametrize("guard", [False, True])
def test_inputs_that_are_one_tensor_are_told_from_two(guard: bool) -> None:
    x, z = rows(4), rows(4)
    for examples in ((x, x), (x, z)):
        model, pm = both(are_one, *examples, guard=guard)
        for count in (4, 6):
            x, z = rows(count), rows(count)
            check_step(model, pm, x, x)
            check_step(model, pm, x, z)
            check_results(model, pm, z, z)


def test_gradients_of_an_input_that_is_given_twice() -> None:
    model, pm = both(are_one, rows(4), rows(4))
    x, y = rows(4), rows(4)
    theirs, ours = x.clone().requires_grad_(), x.clone().requires_grad_()
    loss(model(theirs, theirs), y).backward()  # type: ignore[no-untyped-call]
    pm(ours, ours, y).backward()
    assert ours.grad is not None and theirs.grad is not None and rel_err(ours.grad, theirs.grad) < 1e-12


def lies_row_by_row(model: nn.Module, h: Tensor, a: Tensor) -> bool:
    return a.is_contiguous()


def has_a_stride_of_zero(model: nn.Module, h: Tensor, a: Tensor) -> bool:
    return 0 in a.stride()


@pytest.mark.long
@pytest.mark.parametrize(("ask", "example"), [(lies_row_by_row, columns), (has_a_stride_of_zero, rows)])
def test_branches_on_strides_match_eager_for_inputs_of_other_strides(
    ask: Ask, example: Callable[[int], Tensor]
) -> None:
    model, pm = both(ask, example(4))
    for made in (columns, rows, spread):
        for count in (4, 6):
            check_step(model, pm, made(count))
        with torch.no_grad():
            check_results(model, pm, made(6))


@pytest.mark.long
def test_branch_on_strides_under_guard() -> None:
    model, pm = both(lies_row_by_row, rows(4), guard=True)
    check_step(model, pm, columns(6))
    with pytest.raises(sx.Error, match="something else when it is traced"):
        pm(spread(6), rows(6))
    model, pm = both(lambda model, h, a: bool(a.sum() > 1e9), rows(4), guard=True)
    check_step(model, pm, spread(6))


def modes() -> Iterator[tuple[bool, Any]]:
    """Training or evaluation, and with gradients or not."""
    for training in (True, False):
        for around in (nullcontext, torch.no_grad, torch.inference_mode):
            yield training, around


QUESTIONS: dict[str, Ask] = {
    "of_a_weight": lambda model, h, a: model.fc.weight.requires_grad,
    "is_leaf": lambda model, h, a: h.is_leaf,
}


@pytest.mark.long
@pytest.mark.parametrize("question", QUESTIONS)
def test_branch_on_whether_gradients_are_wanted_matches_eager(question: str) -> None:
    model, pm = both(QUESTIONS[question], rows(4), max_specializations=40)
    x, wants, y = rows(4), rows(4).requires_grad_(), rows(4)
    for training, around in modes():
        model.train(training)
        pm.train(training)
        with around():
            for given in (x, wants):
                check_results(model, pm, given)
                assert rel_err(pm(given, y).detach(), loss(model(given), y).detach()) < 1e-12
    check_step(model, pm, x)
    for name in ("weight", "bias"):  # frozen, one by one
        model.get_parameter(f"fc.{name}").requires_grad_(False)
        for known, shard in pm.named_parameters():
            shard.requires_grad_(shard.requires_grad and name not in known)
        check_results(model, pm, x)
        check_results(model, pm, wants)
        assert rel_err(pm(x, y).detach(), loss(model(x), y).detach()) < 1e-12
