"""The model and its loss as one function of tensors: what is traced."""

from __future__ import annotations

import linecache
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

from shardfx.ir.errors import Error
from shardfx.ir.graph import Where


class Results:
    """How the model's results are arranged: known once it was traced."""

    tree: pytree.TreeSpec
    leaves: tuple[Any, ...]


class ModelAndLoss(nn.Module):
    """The model and its loss as one function of tensor leaves."""

    def __init__(
        self,
        model: nn.Module,
        tree: pytree.TreeSpec,
        leaves: Sequence[Any],
        loss: Callable[..., torch.Tensor] | None,
        targets: int,
        results: Results,
    ) -> None:
        super().__init__()
        self.model = model
        self._tree, self._leaves, self._loss, self._targets = tree, list(leaves), loss, targets
        self.results = results

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The model's tensors, behind the loss where there is one. ``tensors`` are the leaves of arguments and
        targets."""
        given = iter(tensors)
        leaves = [next(given) if isinstance(leaf, torch.Tensor) else leaf for leaf in self._leaves]
        args, kwargs, targets = pytree.tree_unflatten(leaves, self._tree)
        out = self.model(*args, **kwargs)
        flat, tree = pytree.tree_flatten(out)
        self.results.tree = tree
        self.results.leaves = tuple("tensor" if isinstance(leaf, torch.Tensor) else leaf for leaf in flat)
        outs = [leaf.detach() for leaf in flat if isinstance(leaf, torch.Tensor)]
        if self._loss is None:
            return tuple(outs)
        loss = self._loss(out, *targets)
        if not isinstance(loss, torch.Tensor) or loss.dim() != 0:
            raise Error(
                "the loss is not a scalar tensor",
                where="Hints(loss=...)",
                expected="a tensor of shape ()",
                got=f"{tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__,
                remedy="reduce it, for example by .mean()",
            )
        return (loss, *outs)


def leaf_names(args: tuple[Any, ...], kwargs: Mapping[str, Any], targets: tuple[Any, ...]) -> list[tuple[str, Any]]:
    """Names such as ``args.0``, ``kwargs.mask``, ``targets.0``, ``args.0.key``, with the leaves they name."""
    found = []
    for root, tree in (("args", args), ("kwargs", dict(kwargs)), ("targets", targets)):
        for path, leaf in pytree.tree_flatten_with_path(tree)[0]:
            keys = [str(getattr(k, "idx", getattr(k, "key", getattr(k, "name", k)))) for k in path]
            found.append((".".join([root, *keys]), leaf))
    return found


def loss_source(loss: Callable[..., Any] | None) -> Where | None:
    """Where the user wrote the loss."""
    if loss is None:
        return None
    code = getattr(loss, "__code__", None) or getattr(getattr(type(loss), "forward", None), "__code__", None)
    if code is None:
        return Where("loss")
    return Where(
        "loss", code.co_filename, code.co_firstlineno, linecache.getline(code.co_filename, code.co_firstlineno).strip()
    )
