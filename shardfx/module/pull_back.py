"""Gradients of the model's results that come from outside: ``pm(x)`` in a larger computation, as any module is.

    out = pm(x)                                   the forward program
    other_loss(out).backward()                    gradients of the results come in; a program that computes the
                                                  forward anew, then the backward for them

The second program is planned as any other: its loss is the product of results and given gradients, which are its
targets. Random numbers are drawn anew alike, and buffers are as they were before the forward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.utils._pytree as pytree

from shardfx.gradients import is_pulled
from shardfx.ir.errors import Error
from shardfx.ir.graph import OutputKind
from shardfx.runtime.step import ProgramRunner, RunStart
from shardfx.runtime.store import version

from .call import TARGETS, Call, Form, kind_of


def pulling(call: Call, form: Form, given: Sequence[torch.Tensor], wanted: frozenset[str]) -> tuple[Call, Form]:
    """The call, and what it needs, with the gradients of its results as targets."""
    named = {f"{TARGETS}{i}": tensor for i, tensor in enumerate(given)}
    inputs = {**form.inputs, **{name: kind_of(tensor) for name, tensor in named.items()}}
    call = replace(call, targets=tuple(given), leaves={**call.leaves, **named}, has_targets=True)
    return call, replace(form, inputs=inputs, gradients=wanted, pulls=True)


@dataclass(frozen=True)
class AsItWas:
    """What a forward went out from, so that it can be done again."""

    tensors: tuple[torch.Tensor, ...]
    versions: tuple[int, ...]
    kept: RunStart

    @staticmethod
    def of(step: ProgramRunner, tensors: Sequence[torch.Tensor], seed: torch.Tensor | None) -> AsItWas:
        """The versions of these tensors, and copies of the buffers that the forward writes."""
        written = {output.name for output in step.graph.outputs if output.kind is OutputKind.BUFFER}
        copies: dict[int, torch.Tensor] = {}
        buffers = {}
        for name in filter(step.store.is_here, written):
            for rank in step.ranks:
                piece = step.store.shard(name, rank)
                buffers[name, rank] = copies.setdefault(piece.data_ptr(), piece.clone())
        return AsItWas(tuple(tensors), tuple(version(t) for t in tensors), RunStart(seed, buffers))

    def check(self) -> None:
        """Raise where something was written into what the forward used.

        Raises:
            Error: a parameter or an input has changed since.
        """
        changed = [t for t, known in zip(self.tensors, self.versions, strict=True) if version(t) != known]
        if changed:
            raise Error(
                "a parameter or an input of pm(...) was changed in place before the backward of its results",
                where="backward() through pm(...)",
                expected="the tensors of the forward, as they were",
                got=f"{len(changed)} of {len(self.tensors)} written to since",
                remedy="step the optimizer after the backward; or call pm(...) again",
            )


class Onwards(torch.autograd.Function):
    """The results of a forward, whose gradients are pulled back by ``pull``."""

    @staticmethod
    def forward(ctx: Any, pull: Callable[..., Any], results: list[torch.Tensor], *tensors: torch.Tensor) -> Any:
        """The results, as outputs of what ``tensors`` are inputs of."""
        ctx.pull = pull
        return tuple(each.clone() if each._is_view() else each for each in results)

    @staticmethod
    def backward(ctx: Any, *above: torch.Tensor) -> Any:
        """The gradients of the tensors.

        Raises:
            Error: these are to have gradients again; or ``pull`` says why there are none.
        """
        reject_second("the results of pm(...)", above)
        return (None, None, *(ctx.pull(above) or [None for _ in ctx.needs_input_grad[2:]]))


def reject_second(what: str, above: Sequence[torch.Tensor | None]) -> None:
    """Refuse gradients of gradients, and many at once.

    Raises:
        Error: the backward that is running was asked for ``create_graph``, or is of a batch of gradients.
    """
    if any(each is not None and is_batched(each) for each in above):
        raise Error(
            f"the gradients of {what} are asked for in a batch, and programs compute one of them",
            where="torch.autograd.grad(..., is_grads_batched=True), or torch.func.vmap",
            expected="a backward for each",
            got="a batch of gradients",
            remedy="a loop of torch.autograd.grad(..., retain_graph=True); or transform the model itself: "
            "with pm.gathered() as model: ...",
        )
    if torch.is_grad_enabled():
        raise Error(
            f"the gradients of {what} have no gradients themselves",
            where="backward(create_graph=True)",
            expected="gradients that are used as they are",
            got="create_graph=True",
            remedy="compute what needs second derivatives (a gradient penalty) on the model itself",
        )


def is_batched(tensor: torch.Tensor) -> bool:
    """Whether a tensor stands for many, to a ``vmap``."""
    inside = torch._C._functorch
    return inside.is_batchedtensor(tensor) or inside.is_legacy_batchedtensor(tensor)


def attach(out: Any, pull: Callable[..., Any], tensors: Sequence[torch.Tensor]) -> Any:
    """The model's results, with a gradient that ``pull`` gives to ``tensors``."""
    leaves, tree = pytree.tree_flatten(out)
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and is_pulled(leaf.dtype)]
    if places:
        made = Onwards.apply(pull, [leaves[i] for i in places], *tensors)  # type: ignore[no-untyped-call]
        for i, tensor in zip(places, made, strict=True):
            leaves[i] = tensor
    return pytree.tree_unflatten(leaves, tree)


def reject_part() -> None:
    """Refuse to pull back what only this rank knows.

    Raises:
        Error: always.
    """
    raise Error(
        "the results of pm(...) are this rank's part, and how a loss of them counts is not known",
        where="backward() through pm(...)",
        expected="inputs of the global batch, whose results are whole on every rank",
        got="this rank's own part of them",
        remedy="pass the whole batch; or give pm the loss: use pm(x, y)",
    )


def refuse(above: Mapping[str, torch.Tensor] | Sequence[torch.Tensor]) -> Any:
    """What pulls back results that came beside a loss.

    Raises:
        Error: always.
    """
    raise Error(
        "results that came beside a loss have no gradient",
        where="backward() through pm(..., with_results=True)",
        expected="the loss alone to be differentiated",
        got="a gradient of the results",
        remedy="say the whole loss in Hints(loss=...); or use pm(x) and a loss of its results",
    )


def reject_without_loss(trains: bool) -> None:
    """Refuse ``with_results`` where a call gives results anyway.

    Raises:
        Error: there is no loss in this call.
    """
    if not trains:
        raise Error(
            "there is no loss for results to come beside",
            where="pm(..., with_results=True)",
            expected="Hints(loss=...), and its targets behind the model's arguments",
            got="a call that gives the model's results",
            remedy="leave with_results out",
        )
