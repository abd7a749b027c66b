"""Input assertions of functions, and reads of ``.data``: kept where torch would leave them out of a trace.

F.one_hot(i, 4)                    i is looked up in 0, 1, 2, 3: any other raises, as on one device
F.binary_cross_entropy(p, y)       a guard: no p and no y is below 0 or above 1
torch._assert_async(ok)            a guard: ok is not zero
Normal(mean, scale)                a guard: what the distribution validates is valid
torch.cov(x, fweights=n)           written out; a guard: no n is below 0, and their sum is not 0
x.data                             x.detach()
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from shardfx.ir.errors import Error


class AssertionSink(Protocol):
    """The tracer of a model's code, which records assertions."""

    def wants(self, wrong: Tensor, op: str) -> None:
        """Guard that ``wrong`` is nowhere true; where it is, ``op`` raises."""

    def count(self, classes: Tensor) -> int | None:
        """The number of classes that class indices imply; None where it is unknown."""


Answer = Callable[..., Any]


def _read(asked: AssertionSink, func: Any, tensor: Tensor, *_: Any) -> Tensor:
    return tensor.detach()


def _replaced(asked: AssertionSink, func: Any, *_: Any) -> None:
    raise Error(
        "the model's code replaces what a tensor holds",
        expected="new tensors, or buffers that are written in place",
        got="x.data = ...",
        remedy="go on with the new tensor; of a buffer, self.name.copy_(...) under torch.no_grad()",
    )


def _one_hot(asked: AssertionSink, func: Any, input: Tensor, num_classes: int = -1) -> Any:
    if num_classes == -1 and (count := asked.count(input)) is not None:
        num_classes = count
    if num_classes > 0 and input.numel():
        known = torch.arange(num_classes, device=input.device)
        input = known.index_select(0, input.reshape(-1)).reshape(input.shape)
    return func(input, num_classes)


def _cross_entropy(asked: AssertionSink, func: Any, input: Tensor, target: Tensor, *args: Any, **kwargs: Any) -> Any:
    for part, each in (("input", input), ("target", target)):
        asked.wants(_no_chance(each), f"binary_cross_entropy, whose {part} is from 0 to 1,")
    return func(input, target, *args, **kwargs)


def _bernoulli(asked: AssertionSink, func: Any, input: Tensor, *args: Any, **kwargs: Any) -> Any:
    chance = args[0] if args and isinstance(args[0], Tensor) else kwargs.get("p", input if not args else None)
    if isinstance(chance, Tensor):
        asked.wants(_no_chance(chance), "bernoulli, whose chances are from 0 to 1,")
    return func(input, *args, **kwargs)


def _bernoulli_(asked: AssertionSink, func: Any, input: Tensor, p: Any = 0.5, **kwargs: Any) -> Any:
    if isinstance(p, Tensor):
        asked.wants(_no_chance(p), "bernoulli_, whose chances are from 0 to 1,")
    return func(input, p, **kwargs)


class AllTrue:
    """The result of ``torch._is_all_true``, once it is a guard: true, and, as of torch 2.15, a tensor."""

    def __bool__(self) -> bool:
        return True

    def cpu(self) -> AllTrue:
        """Itself."""
        return self

    @classmethod
    def __torch_function__(cls, *_: Any) -> None:
        """Lets ``torch._assert_async`` take it."""


def _assert_async(asked: AssertionSink, func: Any, condition: Tensor | AllTrue, message: str = "") -> None:
    if not isinstance(condition, AllTrue):
        asked.wants(condition.detach() == 0, f"torch._assert_async({message!r})")


def _all_true(asked: AssertionSink, func: Any, each: Tensor) -> AllTrue:
    asked.wants(each.detach() == 0, "what asks whether all is true and raises else (a distribution that validates)")
    return AllTrue()


def _cov(
    asked: AssertionSink,
    func: Any,
    input: Tensor,
    *,
    correction: int = 1,
    fweights: Tensor | None = None,
    aweights: Tensor | None = None,
) -> Any:
    """``torch.cov``, which in torch asks for the content of the divisor."""
    weights = [each for each in (fweights, aweights) if each is not None]
    rows = input if input.ndim == 2 else input.reshape(1, -1)
    if input.ndim > 2 or input.dtype == torch.bool or any(each.shape != rows.shape[1:] for each in weights):
        return func(input, correction=correction, fweights=fweights, aweights=aweights)  # which says what is wrong
    for each in weights:
        asked.wants(each.detach() < 0, "cov, whose weights are none below 0,")
    weight = weights[0] if len(weights) == 1 else weights[0] * weights[1] if weights else None
    total = torch.full((), rows.shape[1], device=input.device) if weight is None else weight.sum()
    if weight is not None:
        asked.wants(total.detach() == 0, "cov, whose weights are not all 0,")
    mean = (rows if weight is None else rows * weight).sum(1) / total
    rows = rows - mean.unsqueeze(1)
    left = total - correction
    if weight is not None and aweights is not None and correction:
        left = total - correction * (weight * aweights).sum() / total
    made = rows @ (rows if weight is None else rows * weight).mH
    return (made / torch.where(left > 0, left, torch.zeros_like(left))).squeeze()


def _corrcoef(asked: AssertionSink, func: Any, input: Tensor) -> Any:
    if input.ndim > 2:
        return func(input)
    made = _cov(asked, torch.cov, input)
    if not made.ndim:
        return made / made
    spread = (made.diagonal().real if made.is_complex() else made.diagonal()).sqrt()
    made = made / spread[:, None] / spread
    return torch.complex(made.real.clip(-1, 1), made.imag.clip(-1, 1)) if made.is_complex() else made.clip(-1, 1)


def _ctc(asked: AssertionSink, func: Any, *_: Any, **__: Any) -> None:
    raise Error(
        "ctc_loss cannot be captured: how much it keeps for its backward follows from the lengths that it is given",
        expected="ops whose results have shapes that follow from those of the inputs",
        got="F.ctc_loss",
        remedy="leave the loss out of Hints, and compute it outside: F.ctc_loss(pm(x), ...).backward()",
    )


def _no_chance(each: Tensor) -> Tensor:
    each = each.detach()
    return (each < 0) | (each > 1)


INPUT_ASSERTIONS: Mapping[Any, Answer] = {
    Tensor.data.__get__: _read,  # type: ignore[attr-defined]
    Tensor.data.__set__: _replaced,  # type: ignore[attr-defined]
    F.one_hot: _one_hot,
    F.binary_cross_entropy: _cross_entropy,
    torch.bernoulli: _bernoulli,
    Tensor.bernoulli: _bernoulli,
    Tensor.bernoulli_: _bernoulli_,
    torch._assert_async: _assert_async,
    torch._is_all_true: _all_true,
    torch.cov: _cov,
    Tensor.cov: _cov,
    torch.corrcoef: _corrcoef,
    Tensor.corrcoef: _corrcoef,
    F.ctc_loss: _ctc,
    torch.ctc_loss: _ctc,
}
"""The stand-in of each function in a trace."""
