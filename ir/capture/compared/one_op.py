"""Which ops of a program are traced as another function than their kernels compute: each tried alone.

Torch writes many ops in terms of others, in Python, for its compilers; that form is what is traced, and eager torch
never runs it. Where what is captured is not the model, each op of the program is captured alone on what it was given
there, and compared with itself.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx, nn

from shardfx.ir.capture.forms.parts_of_batch import ONE
from shardfx.ir.capture.intake.surroundings import Surroundings
from shardfx.ir.capture.model_and_loss import ModelAndLoss, Results
from shardfx.ir.capture.sources import source_of
from shardfx.ir.graph import Graph, Where, op_name

from .as_eager import AsItIs, Difference
from .both_runs import Draws, Named

Write = Callable[[ModelAndLoss, tuple[Tensor, ...]], tuple[Graph, Draws]]
"""Captures a program."""


@dataclass(frozen=True)
class WrongOp:
    """An op, where it is called, and what its traced form makes in place of what it makes."""

    op: Any
    where: Where
    difference: Difference

    def __str__(self) -> str:
        return op_name(self.op)


class OneOp(nn.Module):
    """A call of an op, of its tensors alone."""

    def __init__(self, op: Any, args: Any, kwargs: Any) -> None:
        super().__init__()
        leaves, self._tree = pytree.tree_flatten((args, kwargs))
        self._op = op
        self._leaves = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

    def forward(self, *tensors: Tensor) -> list[Tensor]:
        """The tensors of what it gives."""
        leaves = list(self._leaves)
        for place, tensor in zip(self._places, tensors, strict=True):
            leaves[place] = tensor
        args, kwargs = pytree.tree_unflatten(leaves, self._tree)
        return [each for each in pytree.tree_leaves(self._op(*args, **kwargs)) if isinstance(each, Tensor)]


def weighed(made: list[Tensor]) -> Tensor:
    """A number in which every element of some tensors counts, each by another weight."""
    total = torch.zeros(())
    for each in made:
        if each.is_floating_point():
            weights = torch.arange(1, each.numel() + 1, dtype=each.dtype).cos().reshape(each.shape)
            total = total + (each * weights).sum()
    return total


def wrong_ops(exported: fx.GraphModule, given: tuple[Tensor, ...], write: Write) -> Iterator[WrongOp]:
    """The ops of an exported program whose traced form is another function, on what they are given there."""
    called: dict[Hashable, tuple[fx.Node, Any, Any]] = {}

    class Noting(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            if isinstance(n.target, torch._ops.OpOverload) and n.target.namespace == "aten":
                args, kwargs = pytree.tree_map_only(
                    Tensor, lambda each: each.detach().clone(), self.fetch_args_kwargs_from_env(n)
                )
                called.setdefault(_key(n.target, args, kwargs), (n, args, kwargs))
            return super().run_node(n)

    before = [each.detach().clone() for each in exported.buffers()]
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        Noting(exported).run(*(each.detach().clone() for each in given))
        for each, was in zip(exported.buffers(), before, strict=True):
            each.copy_(was)
    for node, args, kwargs in called.values():
        found = _tried(node.target, args, kwargs, write)
        if found is not None:
            yield WrongOp(node.target, source_of(node), found)


def _key(op: Any, args: Any, kwargs: Any) -> Hashable:
    leaves, tree = pytree.tree_flatten((args, kwargs))
    said = (
        (tuple(each.shape), each.stride(), each.dtype) if isinstance(each, Tensor) else repr(each) for each in leaves
    )
    return op, tuple(said), tree


def _tried(op: Any, args: Any, kwargs: Any, write: Write) -> Difference | None:
    tensors = [each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
    given = tuple(each.requires_grad_(each.is_floating_point() or each.is_complex()) for each in tensors)
    leaves, tree = pytree.tree_flatten((given, {}, ()))
    program = ModelAndLoss(OneOp(op, args, kwargs), tree, leaves, weighed, 0, Results())
    named = Named(_Same(), tuple(f"args.{number}" for number in range(len(given))), 1.0, "", ONE)
    try:
        around = Surroundings(program.model, program.loss)
        return AsItIs(program, given, named, around, trains=True).difference(*write(program, given))
    except Exception:  # of one that cannot be captured alone nothing is known
        return None


class _Same(dict[str, str]):
    def __missing__(self, key: str) -> str:
        return key
