"""A loss whose gradients are there already: ``backward`` hands them out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shardfx.ir.errors import Error


class HandOut(torch.autograd.Function):
    """A loss whose gradients are there already: ``backward`` hands them out, and keeps none.

    A gradient that nobody else holds becomes ``parameter.grad`` itself; one that is held would be copied.
    """

    @staticmethod
    def forward(
        ctx: Any, loss: torch.Tensor, grads: list[torch.Tensor | None], *parameters: torch.Tensor
    ) -> torch.Tensor:
        """The loss as it is, and the gradients of ``parameters`` kept for ``backward``."""
        ctx.grads = grads
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *above: torch.Tensor) -> Any:
        """The kept gradients, times that of the loss.

        Raises:
            Error: they were handed out before.
        """
        (scale,) = above
        grads = ctx.grads
        if grads is None:
            raise Error(
                "the gradients of this loss were handed out already",
                where="loss.backward()",
                expected="one backward per pm(...)",
                got="another one",
                remedy="call pm(...) again, or keep them: loss.backward(retain_graph=True)",
            )
        if _kept_for_later():
            return (None, None, *(g if g is None else g * scale for g in grads))
        ctx.grads = None
        if scale.device.type == "cpu" and bool(scale == 1):
            return (None, None, *grads)
        return (None, None, *(g if g is None else g.mul_(scale) for g in grads))


def _kept_for_later() -> bool:
    """Whether this backward was asked to retain the graph."""
    known = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return known is None or bool(known())


def hand_out(loss: torch.Tensor, grads: list[torch.Tensor | None], parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    """The loss, whose ``backward()`` gives ``grads`` to ``parameters``."""
    return HandOut.apply(loss, grads, *parameters)  # type: ignore[no-any-return, no-untyped-call]
